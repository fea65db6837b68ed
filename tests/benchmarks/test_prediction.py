"""The prediction's counts, on kernels whose bytes and arithmetic are known by their shapes."""

import json

from benchmarks.prediction import predicted
from benchmarks.prediction.integers import compute, wrap
from tests.programs import run_python

# Compiled kernels need a process without Triton's interpreter.
COUNT = """
import json
import torch
from benchmarks.prediction.launches import WARP, compiled_for, counts_of, launches_of
from gradcomp.layout import LowRankLayout

layout = LowRankLayout([(640, 768), (96,), (256, 512)], {rank}, min_compression_rate=1)
total = {{}}
for launch in launches_of(layout, torch.float32):
    compiled = compiled_for(launch, 80)
    found = counts_of(launch, compiled, num_samples=launch.grid[0])
    threads = compiled.metadata.num_warps * WARP
    sums = total.setdefault(launch.kernel.__name__, {{}})
    for each in found:
        for name, size in each.global_bytes.items():
            sums[name] = sums.get(name, 0) + size * threads
        flops = sum(each.matrix_flops.values()) * compiled.metadata.num_warps
        sums["matrix flops"] = sums.get("matrix flops", 0) + flops
print(json.dumps(total))
"""
NUMEL = 640 * 768 + 256 * 512


def counted(rank):
    done = run_python("-c", COUNT.format(rank=rank))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_pass_over_the_matrices_is_counted_once():
    """Loops run as often as the tables say: gradient read once, M read and written once, M read once."""
    kernels = counted(4)
    assert kernels["_project_kernel"]["grad_ptr"] == 4 * NUMEL
    assert kernels["_project_kernel"]["memory_ptr"] == 8 * NUMEL
    assert kernels["_back_project_kernel"]["source_ptr"] == 4 * NUMEL


def test_matrix_products_are_counted():
    """At rank 16 the tensor cores do P Qᵀ and M Q̂ in project, three products each for one in tf32x3."""
    kernels = counted(16)
    assert kernels["_project_kernel"]["grad_ptr"] == 4 * NUMEL
    assert kernels["_project_kernel"]["matrix flops"] == 3 * 2 * (2 * NUMEL * 16)


def test_integers_wrap_as_registers_do():
    assert wrap(-1, "u32") == 2**32 - 1
    assert compute("add", ("s32",), [2**31 - 1, 1]) == -(2**31)
    assert compute("shr", ("u32",), [-1, 28]) == 15
    assert compute("mad", ("wide", "s32"), [-2, 3, 2**40]) == 2**40 - 6
    assert compute("setp", ("lt", "s64"), [-1, 0]) is True
    assert compute("cvt", ("u32", "u64"), [2**32 + 5]) == 5


def test_a_prediction_is_found_by_the_drivers_name_of_the_gpu(tmp_path):
    path = tmp_path / "predicted.jsonl"
    for gpu, hook_us in (("H200", 30.0), ("A100 80GB", 10.0), ("A100 80GB", 20.0)):
        predicted.record(gpu, "bert-large", 4, "float32", {"project": 5.0, "hook": hook_us}, path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["gpu"] for row in rows] == ["A100 80GB", "H200"]  # the second of the same step replaced it
    asked = ("bert-large", 4, "float32", "hook")
    assert predicted.lookup("NVIDIA A100-SXM4-80GB", *asked, path=path) == 20.0
    assert predicted.lookup("NVIDIA H200", *asked, path=path) == 30.0
    assert predicted.lookup("NVIDIA H200", "bert-large", 8, "float32", "hook", path=path) is None
    assert predicted.lookup("NVIDIA A100-SXM4-40GB", *asked, path=path) is None
