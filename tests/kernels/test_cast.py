"""The casts to 16 bits and back: the Triton kernel and plain torch against float64."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gradcomp import ops
from gradcomp.cpu import copy as cpu
from gradcomp.kernels import flatten as cast_kernel
from tests.kernels.copies import BLOCK, FLOATS, assert_scaled_copy, poisoned, tensors_of

TASKS = Path("/proc/self/task")  # the process's threads, on Linux


@pytest.mark.smallest
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 13, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_compress_and_decompress(numel, dtype, half, device):
    (buffer,) = tensors_of([(numel,)], dtype, device)
    before = buffer.clone()
    wire = poisoned(numel, half, device)
    assert ops.cast(buffer, out=wire, scale=1 / 3) is wire
    assert_scaled_copy(wire, buffer.double(), 1 / 3, dtype)
    assert torch.equal(buffer, before)
    if dtype != torch.float64:  # torch rounds fp64 to fp32 before it rounds to 16 bits
        reference = torch.empty_like(wire)
        cpu.cast(buffer, out=reference, scale=1 / 3)
        assert torch.equal(wire, reference), "kernel and plain torch differ in a bit"
        cpu.cast(buffer.clone(), out=reference, scale=1 / 3, overwrite=True)
        assert torch.equal(wire, reference), "in place, plain torch rounds otherwise"
    result = poisoned(numel, dtype, device)
    assert ops.cast(wire, out=result) is result
    assert torch.equal(result, wire.to(dtype))


@pytest.mark.skipif(not TASKS.exists(), reason="counts threads in /proc")
def test_decompressing_on_a_backends_thread_starts_no_threads():
    wire = torch.randn(2**20).half()

    def threads_started(decompress) -> int:
        out = torch.empty(2**20)

        def run() -> int:
            before = len(list(TASKS.iterdir()))
            decompress(wire, out)
            return len(list(TASKS.iterdir())) - before

        with ThreadPoolExecutor(1) as pool:
            started = pool.submit(run).result()
        assert torch.equal(out, wire.float())
        return started

    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert threads_started(lambda wire, out: cpu.cast(wire, out=out)) == 0
        assert threads_started(lambda wire, out: out.copy_(wire)) > 0, "torch starts none either"
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("cast", [ops.cast, cpu.cast], ids=["triton", "torch"])
def test_compress_divides_before_it_rounds(cast, device):
    """torch's `.to(float16).div_(2)` makes 80,000 infinite, though half of it fits, and it rounds twice."""
    tiny = 2.0**-24  # the smallest float16
    buffer = torch.tensor([80_000.0, -120_000.0, 1.4 * tiny], device=device)
    assert buffer.to(torch.float16).div_(2).tolist() == [math.inf, -math.inf, 0.0]
    wire = poisoned(3, torch.float16, device)
    cast(buffer, out=wire, scale=0.5)
    assert wire.tolist() == [40_000.0, -60_000.0, tiny]


@pytest.mark.parametrize("cast", [ops.cast, cpu.cast], ids=["triton", "torch"])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # numpy's, in the interpreter
def test_compress_keeps_what_is_not_finite(cast, half, device):
    buffer = torch.tensor([math.inf, -math.inf, math.nan, 3.4e38, 0.0, -0.0], device=device)
    wire = torch.zeros(6, dtype=half, device=device)
    cast(buffer, out=wire, scale=0.25)
    assert wire[:2].tolist() == [math.inf, -math.inf]
    assert wire[2].isnan()
    assert wire[3].isinf().item() == (half == torch.float16)
    assert torch.copysign(torch.ones(2, device=device), wire[4:].float()).tolist() == [1, -1]


def test_cast_unaligned(device):
    base = torch.randn(2 * BLOCK + 2, device=device)
    wire = poisoned(2 * BLOCK + 2, torch.bfloat16, device)
    ops.cast(base[1:-1], out=wire[1:-1])
    assert torch.equal(wire[1:-1], base[1:-1].bfloat16())
    assert wire[[0, -1]].isnan().all()


def test_cast_offsets_beyond_2_to_the_31(monkeypatch, device):
    """Check the last of more than 2³¹ elements. In the interpreter, only the grid's last program runs."""
    numel = 2**31 + 3
    src = torch.empty(numel, dtype=torch.float16, device=device)
    out = torch.empty(numel, dtype=torch.bfloat16, device=device)
    src[-3:] = torch.tensor([1.0, -2.0, 3.0])
    if device.type == "cpu":
        from triton.runtime import interpreter

        builder = interpreter.interpreter_builder
        last = (numel - 1) // cast_kernel.BLOCK
        set_grid_dim = builder.set_grid_dim
        monkeypatch.setattr(
            builder, "set_grid_idx", lambda x, y, z: setattr(builder, "grid_idx", (last, 0, 0))
        )
        monkeypatch.setattr(cast_kernel.triton, "cdiv", lambda numel, block: 1)
        monkeypatch.setattr(builder, "set_grid_dim", lambda x, y, z: set_grid_dim(last + 1, 1, 1))
    cast_kernel.cast(src, out=out, scale=2.0)
    assert out[-3:].tolist() == [2, -4, 6]
