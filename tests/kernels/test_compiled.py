"""What the compiler makes of the kernels for sm_80, sm_90 and sm_100: no spills, wide accesses."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import gradcomp.kernels
from tests.kernels.compiled import ARCHITECTURES, Variant, variants

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=ARCHITECTURES, ids="sm_{}".format)
def report(request) -> dict[str, dict]:
    """What compiling every variant for one architecture gives, by the variant's name."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled", str(request.param)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def kernels_without_variant(variants: list[Variant]) -> set[str]:
    """The kernels (functions named _*_kernel) of gradcomp.kernels that no variant compiles."""
    found = {
        name
        for module in pkgutil.iter_modules(gradcomp.kernels.__path__)
        for name in vars(importlib.import_module(f"gradcomp.kernels.{module.name}"))
        if name.startswith("_") and name.endswith("_kernel")
    }
    assert found, "no kernel found: the search is broken"
    return found - {variant.kernel.__name__ for variant in variants}


def test_every_kernel_is_compiled():
    assert kernels_without_variant(list(variants())) == set()
    assert kernels_without_variant(list(variants())[:1]) == {"_flatten_kernel"}


def test_nothing_spills(report):
    spilling = {name: facts for name, facts in report.items() if facts["spilled_bytes"]}
    assert not spilling
    local = {name: facts for name, facts in report.items() if any(op[2] == "L" for op in facts["memory"])}
    assert not local


def test_three_blocks_fit_a_multiprocessor(report):
    """65,536 registers hold 3 blocks of 4 warps up to 168 each; their loads in flight hide the latency."""
    assert {name: facts["registers"] for name, facts in report.items() if facts["registers"] > 168} == {}


def test_whole_aligned_tiles_move_128_bits_at_a_time(report):
    for name, facts in report.items():
        wide = {op.split(".")[0] for op in facts["memory"] if "128" in op or "256" in op}
        assert wide == {"LDG", "STG"}, f"{name}: {facts['memory']}"
