"""The benchmark of a recorder's cost runs, with every hook and way to record."""

from benchmarks.recorder_cost import HOOKS, WAYS
from tests.programs import run_module


def test_it_prints_a_row_per_hook_and_way():
    done = run_module("benchmarks.recorder_cost", "--steps", "20")
    assert done.returncode == 0, done.stdout
    rows = [line for line in done.stdout.splitlines() if " to " in line and "(" in line][1:]
    assert [(name, way) for name in HOOKS for way in WAYS] == [
        (row[:18].strip(), row[18:28].strip()) for row in rows
    ]
