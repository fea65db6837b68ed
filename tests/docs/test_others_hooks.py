"""The recorded verdicts have a page of tables, and docs/others_hooks.md shows every failure."""

import importlib.util
import re

import pytest
import torch

from benchmarks.records import RESULTS, read
from tests.programs import ROOT, TORCHRUN, run_python

PAGE = (ROOT / "docs" / "others_hooks.md").read_text()
TABLES = (RESULTS / "others_hooks.md").read_text()
PROGRAMS = ROOT / "docs" / "examples" / "upstream"
LONGEST_PROGRAM = 25
ROWS = read(RESULTS / "others_hooks.jsonl")
# Programs of two processes, which run under torchrun.
OF_TWO = (
    *("torch_fp16_overflow", "torch_powersgd_uncompressed_error"),
    *("colossalai_fp8_async", "colossalai_fp8_sync"),
)
# torch's hooks leave callbacks to gloo's threads. They may abort a process that has done its work: a callback
# is freed while Python shuts down, or holds the last reference to the group (docs/troubleshooting.md), or
# raises an exception that backward has already raised.
ABORTS_AT_EXIT = (
    "terminate called without an active exception",
    "Resource deadlock avoided",
    "Got the following error when running the callback",
)
# This program's output differs from run to run, so it has its own test.
OF_TWO_ORDERS = "torch_powersgd_order"


def documented(name: str) -> str:
    """Return a program's output according to the page."""
    (block,) = re.findall(rf"\[{name}\.py\]\(\S+\)[^`]*```\n(.*?)```", PAGE, flags=re.DOTALL)
    return block


def need_project_of(name: str) -> None:
    project = name.partition("_")[0]
    if importlib.util.find_spec(project) is None:
        pytest.skip(f"needs {project}")


@pytest.mark.parametrize("name", sorted({path.stem for path in PROGRAMS.glob("*.py")} - {OF_TWO_ORDERS}))
def test_a_program_prints_what_the_page_says(name):
    need_project_of(name)
    if name == "torch_quantization_on_gloo" and torch.__version__ >= "2.15":
        pytest.skip("torch 2.15's quantization hooks run on gloo")
    done = run_python(*(TORCHRUN if name in OF_TWO else ()), PROGRAMS / f"{name}.py", OMP_NUM_THREADS="1")
    assert done.stdout == documented(name), done.stderr
    assert done.returncode == 0 or any(abort in done.stderr for abort in ABORTS_AT_EXIT), done.stderr
    assert "observed" in done.stdout


def test_the_program_of_the_order_shows_two_orders():
    """gloo matches collectives by their order, so the program then ends in an abort or an exception."""
    done = run_python(*TORCHRUN, PROGRAMS / f"{OF_TWO_ORDERS}.py", OMP_NUM_THREADS="1")
    first, second = (
        re.findall(rf"rank {rank}: all-reduce of (\d+) elements", done.stdout) for rank in (0, 1)
    )
    assert first[:2] == ["16", "16"]
    assert second[:2] == ["16", "32"]
    assert done.returncode != 0
    for rank, sizes in ((0, first), (1, second)):
        assert f"rank {rank}: all-reduce of {sizes[1]} elements" in documented(OF_TWO_ORDERS)


def test_programs_are_short_and_without_gradcomp():
    for path in PROGRAMS.glob("*.py"):
        source = path.read_text()
        assert len(source.splitlines()) <= LONGEST_PROGRAM, path.name
        assert "gradcomp" not in source, path.name
        assert f"[{path.name}](examples/upstream/{path.name})" in PAGE


def test_every_failure_is_listed():
    """The lists name the hook and the property of every failure, and nothing else as failing."""
    listed = set(re.findall(r"^\| `([^`|]+)` \| `(\w+)` \|", TABLES, flags=re.MULTILINE))
    assert listed == {(row["hook"], row["property"]) for row in ROWS if row["outcome"] == "fails"}
    assert all((row["counterexample"] is None) == (row["outcome"] != "fails") for row in ROWS)
