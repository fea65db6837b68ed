"""Test the kernels' machine code: no spills; for sm_80, sm_90 and sm_100 wide accesses, too."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from gradcomp.device import AMD_ARCHITECTURES
from gradcomp.kernels.powersgd.work import COPY_BLOCK
from tests.depth import everyday
from tests.kernels.compiled import ARCHITECTURES, is_kernel, kernel_modules
from tests.programs import users_environment

ROOT = Path(__file__).parents[2]
# How often a kernel that walks through M loads and stores a tile of the gradient or of the error memory.
TILES_MOVED = {"_project_kernel": (2, 1), "_back_project_kernel": (1, 0), "_reconstruct_kernel": (0, 1)}
PANEL_KERNELS = ("_gram_kernel", "_orthonormalize_kernel", "_orthonormalize_blocks_kernel")
# How often a thread of the quantized all-reduce's kernels loads and stores 128 bits: gradients, errors and
# exact elements, and at 8 bits codes, too. A thread holds 64 bytes of a tile of gradients or errors in fp32.
# Quantize and dequantize also copy as many exact elements; average with ONLY_SUMS adds those of 8 ranks.
# Average loads the codes of 4 ranks at a time. Without own values (HAS_OWN) it has no errors to move.
# By kernel, ONLY_SUMS and HAS_OWN.
QUANTIZED_MOVED = {
    ("_quantize_kernel", False, True): {4: (4 + 4 + 4, 4 + 4), 8: (4 + 4 + 4, 4 + 4 + 1)},
    ("_average_kernel", False, True): {4: (4, 4), 8: (4 + 4, 4 + 1)},
    ("_average_kernel", True, True): {4: (4 + 8 * 4, 4 + 4 + 4), 8: (4 + 8 * 4 + 4, 4 + 4 + 4)},
    ("_average_kernel", True, False): {4: (8 * 4, 4 + 4), 8: (8 * 4 + 4, 4 + 4)},
    ("_dequantize_kernel", False, True): {4: (4, 4 + 4), 8: (4 + 1, 4 + 4)},
}
COPYING_TENSORS = ("_project_kernel", "_reconstruct_kernel")
COPYING = ("_cast_kernel", "_flatten_kernel")
# AMD's architectures: MI300, and deep MI200, too. gfx950 is compiled by hand.
TESTED_AMD = everyday(("gfx942",), ("gfx90a", "gfx942"))
# What one program may have on an AMD GPU.
MAX_THREADS, MAX_SHARED_BYTES = 1024, 65536


def compile_all(architecture: int | str) -> dict[str, dict]:
    """Compile every variant for one architecture; return compile_for's report, by the variant's name."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled", str(architecture), "--json"],
        cwd=ROOT, env=users_environment(), capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


def kernels_not_among(compiled: Iterable[str]) -> set[str]:
    """Return the kernels of gradcomp.kernels (functions named _*_kernel) that were not compiled."""
    found = {name for module in kernel_modules() for name in vars(module) if is_kernel(name)}
    assert found, "no kernel found: the search is broken"
    return found - set(compiled)


def wide(facts: dict, operation: str) -> int:
    """Return the number of 128-bit accesses by LDG or STG, or by LDGSTS into shared memory."""
    return sum(
        count * (2 if "256" in name else 1)
        for name, count in facts["memory"].items()
        if name.startswith(operation) and ("128" in name or "256" in name)
    )


def resident_warps(facts: dict) -> int:
    """Return how many warps of whole blocks 65,536 registers hold, allocated in units of eight."""
    block = -(-facts["registers"] // 8) * 8 * 32 * facts["num_warps"]
    return 65536 // block * facts["num_warps"]


def check_every_kernel_is_compiled(report):
    compiled = {facts["kernel"] for facts in report.values()}
    assert kernels_not_among(compiled) == set()
    assert kernels_not_among(compiled - {"_flatten_kernel"}) == {"_flatten_kernel"}


def check_nothing_spills(report):
    assert not {name: facts for name, facts in report.items() if facts["spilled_bytes"]}
    local = {
        name: facts for name, facts in report.items() if any(op[2] == "L" for op in facts.get("memory", ()))
    }
    assert not local


def check_twelve_warps_fit_a_multiprocessor(report):
    """Check copies and small ranks: they are limited by memory, and warps in flight must hide its latency."""
    checked = {
        name: facts
        for name, facts in report.items()
        if facts["kernel"] in COPYING
        or (facts["kernel"] in TILES_MOVED and ("r=1]" in name or "r=4" in name))
    }
    assert len(checked) > 20
    assert {name: facts["registers"] for name, facts in checked.items() if resident_warps(facts) < 12} == {}


def check_two_programs_fit_a_multiprocessor(report):
    """Check ranks up to 16: one program must compute while another waits for memory."""
    checked = {name: facts for name, facts in report.items() if 0 < facts["rank"] <= 16 and is_walk(facts)}
    assert len(checked) > 20
    assert {name: facts["programs"] for name, facts in checked.items() if facts["programs"] < 2} == {}


def is_walk(facts: dict) -> bool:
    """Return whether many programs of the kernel walk through all matrices or factors."""
    return facts["kernel"] in TILES_MOVED


def check_copies_move_128_bits_at_a_time(report):
    for name, facts in report.items():
        if facts["kernel"] in COPYING:
            assert wide(facts, "LDG"), f"{name}: {facts['memory']}"
            assert wide(facts, "STG"), f"{name}: {facts['memory']}"


def check_matrices_move_128_bits_at_a_time(report):
    """Check the branch for gradients that are aligned to 16 bytes, and copies of uncompressed tensors."""
    checked = 0
    for name, facts in report.items():
        loads, stores = TILES_MOVED.get(facts["kernel"], (0, 0))
        # Without error feedback there is no error memory.
        if facts["kernel"] == "_project_kernel" and "plain" in name:
            loads, stores = 1, 0
        copied_bytes = COPY_BLOCK * facts["itemsize"] if facts["kernel"] in COPYING_TENSORS else 0
        copied = copied_bytes // (facts["num_warps"] * 32 * 16)
        of_tile = facts["accesses_per_tile"]
        assert wide(facts, "LDG") >= loads * of_tile + copied, f"{name}: {facts['memory']}"
        assert wide(facts, "STG") >= stores * of_tile + copied, f"{name}: {facts['memory']}"
        checked += bool(loads + stores) and facts["accesses_per_tile"] > 0
    assert checked > 20


def check_factors_move_128_bits_at_a_time(report):
    """Check reconstruct: copies from the wire to panels, and copies of uncompressed tensors.

    A thread holds 8 elements of a factor, 16 elements of an uncompressed tensor, and 128 bits of each column
    of Q.
    """
    checked = 0
    for name, facts in report.items():
        if facts["kernel"] == "_reconstruct_kernel":
            expected = (8 + 16) * facts["itemsize"] // 16
            columns = facts["rank"] if facts["rank"] <= 8 else 0
            assert wide(facts, "STG") >= expected, f"{name}: {facts['memory']}"
            assert wide(facts, "LDG") >= expected + columns, f"{name}: {facts['memory']}"
            checked += 1
    assert checked > 10


def check_panels_move_128_bits_at_a_time(report):
    """Check loads of P from the wire, and stores of orthonormal P, if a block has 16 bytes per thread."""
    checked = 0
    for name, facts in report.items():
        if facts["kernel"] not in PANEL_KERNELS:
            continue
        constants, num_threads = facts["constants"], facts["num_warps"] * 32
        numel = constants["BLOCK"] * min(facts["rank"], 32)
        loads = numel * facts["itemsize"] // (num_threads * 16)
        assert wide(facts, "LDG") >= loads, f"{name}: {facts['memory']}"
        checked += loads > 0
        if facts["kernel"] != "_gram_kernel":
            stores = numel * max(facts["itemsize"], 4) // (num_threads * 16)
            assert wide(facts, "STG") >= stores, f"{name}: {facts['memory']}"
            checked += stores > 0
    assert checked > 30


def check_blocks_move_128_bits_at_a_time(report):
    """Check gradients, errors and codes of 8 bits, in blocks of the default size."""
    checked = 0
    for name, facts in report.items():
        constants = facts["constants"]
        key = facts["kernel"], bool(constants.get("ONLY_SUMS")), bool(constants.get("HAS_OWN", True))
        if key in QUANTIZED_MOVED and "[fp32" in name and "size=128 W=8" in name:
            loads, stores = QUANTIZED_MOVED[key][facts["constants"]["BITS"]]
            assert wide(facts, "LDG") >= loads, f"{name}: {facts['memory']}"
            assert wide(facts, "STG") >= stores, f"{name}: {facts['memory']}"
            checked += 1
    assert checked == 10


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(each, marks=pytest.mark.smallest if each == 90 else ()) for each in ARCHITECTURES],
    ids="sm_{}".format,
)
def test_machine_code(architecture):
    """All checks are one test, so that one worker of pytest-xdist compiles an architecture once."""
    report = compile_all(architecture)
    check_every_kernel_is_compiled(report)
    check_nothing_spills(report)
    check_twelve_warps_fit_a_multiprocessor(report)
    check_copies_move_128_bits_at_a_time(report)
    check_two_programs_fit_a_multiprocessor(report)
    check_matrices_move_128_bits_at_a_time(report)
    check_factors_move_128_bits_at_a_time(report)
    check_panels_move_128_bits_at_a_time(report)
    check_blocks_move_128_bits_at_a_time(report)


def check_programs_fit_an_amd_gpu(report):
    """Check threads, 64 per warp, and shared memory. Beyond these, a launch raises OutOfResources."""
    large = {
        name: facts
        for name, facts in report.items()
        if facts["num_threads"] > MAX_THREADS or facts["shared_bytes"] > MAX_SHARED_BYTES
    }
    assert not large
    assert max(facts["num_threads"] for facts in report.values()) == MAX_THREADS


def check_products_are_on_matrix_cores_in_fp32_and_fp64(report):
    """Check that no product is in xf32 or bf16, which would round the factors."""
    checked = 0
    for name, facts in report.items():
        dtype = "f64" if facts["itemsize"] == 8 else "f32"
        if facts["kernel"] in TILES_MOVED and facts["rank"] > 8 and facts["stores"]:
            assert facts["products"], name
            assert all(re.search(rf"x\d+_?{dtype}$", each) for each in facts["products"]), facts["products"]
            checked += 1
    assert checked > 15


def check_no_program_waits_for_another(report):
    """Check that there are no atomics. On gfx942 they don't wait for stores; see powersgd/tile.py."""
    assert {name: facts["atomics"] for name, facts in report.items() if facts["atomics"]} == {}


@pytest.mark.parametrize("architecture", TESTED_AMD)
def test_machine_code_for_amd(architecture):
    assert architecture in AMD_ARCHITECTURES
    report = compile_all(architecture)
    check_every_kernel_is_compiled(report)
    check_nothing_spills(report)
    check_programs_fit_an_amd_gpu(report)
    check_products_are_on_matrix_cores_in_fp32_and_fp64(report)
    check_no_program_waits_for_another(report)
