"""Test PowerSGD's directions: Q's columns, scaled by powers of two, also after a restart."""

import math

import pytest
import torch
import triton
import triton.language as tl

from gradcomp.kernels.powersgd.random import SHORTEST_SQUARED, direction, is_kept, scale_of
from gradcomp.kernels.powersgd.tile import SHRINK
from gradcomp.kernels.powersgd.work import PowerSGDWork
from gradcomp.layout import PowerSGDLayout
from tests.depth import everyday
from tests.kernels.powersgd.ranks import MIXED, plans_of, random_grads, step

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# Squared lengths: powers of four and their neighbors, other numbers, and both ends of the range. Columns of
# the lengths in REPLACED are replaced by random columns.
POWERS = [4.0**k for k in (-99, -10, -1, 0, 1, 2, 50, 127)]
SQUARED = [
    *POWERS,
    *(math.nextafter(power, 0.0) for power in POWERS),
    *(math.nextafter(power, math.inf) for power in POWERS),
    *(2.0, 3.0, 0.5, 10.0, SHORTEST_SQUARED.value, 2.0**287),
]
REPLACED = [0.0, math.nextafter(SHORTEST_SQUARED.value, 0.0), 5e-324, math.inf, math.nan]


@triton.jit
def _scale_kernel(
    norms_ptr,
    matrices_ptr,
    factor_ptr,
    start_ptr,
    RANK: tl.constexpr,  # noqa: N803
    UNIT: tl.constexpr,  # noqa: N803
):
    offs = tl.arange(0, RANK)
    start, factor = direction(norms_ptr, norms_ptr, matrices_ptr, offs, RANK, 64, UNIT)
    tl.store(factor_ptr + offs, factor)
    tl.store(start_ptr + offs, start)


@pytest.mark.parametrize("unit", [False, True])
def test_the_kernel_and_the_host_scale_columns_alike(unit, device):
    given = SQUARED + REPLACED
    rank = 64
    squared = torch.zeros(rank, dtype=FP64, device=device)
    squared[: len(given)] = torch.tensor(given, dtype=FP64)
    work = PowerSGDWork(PowerSGDLayout([(64, 64)], rank, 0), 4, 4)
    factor, start = torch.empty_like(squared), torch.empty(rank, dtype=torch.int64, device=device)
    _scale_kernel[(1,)](
        squared, torch.tensor(work.matrix_table, device=device), factor, start, RANK=rank, UNIT=unit
    )
    factor /= SHRINK.value
    torch.testing.assert_close(factor, scale_of(squared, unit), rtol=4e-16 if unit else 0, atol=0)
    kept = is_kept(squared)
    assert kept.tolist() == [True] * len(SQUARED) + [False] * (rank - len(SQUARED))
    fields = work.fields(0)
    assert start.tolist() == [fields["q_panel" if keep else "random_panel"] for keep in kept]
    assert (factor[~kept] == 1).all()
    length = factor[kept] * squared[kept].sqrt()
    if unit:
        assert (length - 1).abs().max() < 1e-15
    else:
        assert (factor.frexp().mantissa == 0.5).all()  # a power of two
        # Compare squares: the root of a power of four's neighbor would round to the power of two.
        scaled = (factor * factor * squared)[kept]
        assert ((scaled > 0.25) & (scaled <= 1)).all()


RESUMED = [
    *((FP32, 3, {"epsilon": 0.1}), (FP32, 4, {"warm_start": False}), (FP32, 16, {}), (BF16, 4, {})),
    *((FP32, 1, {}), (FP32, 3, {}), (FP16, 2, {}), (FP64, 2, {})),
]


@pytest.mark.parametrize(("dtype", "rank", "options"), everyday(RESUMED[:3], RESUMED), ids=str)
def test_a_resumed_run_computes_the_same_bits(dtype, rank, options, device):
    """Without error feedback a run continues from its directions alone. It is resumed after every step."""
    options = {"error_feedback": False, **options}
    (plan,) = plans_of(MIXED, rank, dtype, device, **options)
    for seed in range(everyday(2, 3)):
        (resumed,) = plans_of(MIXED, rank, dtype, device, **options)
        resumed.load(plan.error(), plan.directions())
        (grad,) = random_grads(plan.layout, dtype, device, seed)
        # One matrix gets no gradient at first, so its columns stay random.
        matrix = plan.layout.matrices[0]
        if seed == 0:
            grad[matrix.offset : matrix.offset + matrix.numel] = 0
        again = grad.clone()
        step([plan], [grad], seed)
        step([resumed], [again], seed)
        assert torch.equal(again, grad)
        assert torch.equal(resumed.p_wire, plan.p_wire)
        assert all(map(torch.equal, resumed.directions(), plan.directions()))
