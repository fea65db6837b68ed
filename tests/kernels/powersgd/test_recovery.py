"""A step after zeros, inf, NaN, or gradients near the end of float16: later steps are right again."""

import math

import pytest
import torch

from gradcomp.kernels.powersgd import work as powersgd_work
from tests.depth import everyday
from tests.kernels.powersgd.ranks import (
    MIXED,
    check_step,
    directions_of,
    matrices_of,
    plans_of,
    random_grads,
    step,
)
from tests.tolerances import UNIT_ROUNDOFF

FP32, FP16 = torch.float32, torch.float16


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Let every program walk through several tiles, as in a large bucket."""
    monkeypatch.setattr(powersgd_work, "NUM_PROGRAMS", dict.fromkeys(powersgd_work.NUM_PROGRAMS, 4))


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_zero_gradients_and_back(rank, device):
    """Zeros give zeros. A layer is compressed again after a gradient of zero, as its Q becomes random."""
    plans = plans_of(MIXED, rank, FP32, device)
    for _ in range(2):
        grad = torch.zeros(plans[0].layout.numel, device=device)
        step(plans, [grad])
        assert not grad.any()
    check_step(plans, random_grads(plans[0].layout, FP32, device, 1))


# (rank, the value, whether there is error feedback)
BAD = [
    *((4, math.nan, True), (16, math.inf, True), (40, math.nan, True)),
    *((1, math.inf, True), (4, -math.inf, False), (16, math.nan, False)),
]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize(("rank", "bad", "feedback"), everyday(BAD[:2], BAD))
def test_not_finite_everywhere_and_sound_again(rank, bad, feedback, device):
    world_size = 2 if rank == 4 else 1
    plans = plans_of(MIXED, rank, FP32, device, world_size=world_size, error_feedback=feedback)
    layout, hit, other = plans[0].layout, 1, 0
    step(plans, random_grads(layout, FP32, device, 0, world_size))
    grads = random_grads(layout, FP32, device, 1, world_size)
    grads[-1][layout.matrices[hit].offset + 100] = bad
    before = [matrices_of(layout, plan.error())[hit] for plan in plans]
    step(plans, grads)
    for plan, error in zip(plans, before, strict=True):
        # On the ranks with finite gradients, too. Up to the rounding of M.
        assert torch.allclose(matrices_of(layout, plan.error())[hit], error, rtol=0, atol=1e-6)
        assert bool(error.any()) == feedback
    for grad in grads:
        outputs = matrices_of(layout, grad)
        assert not outputs[hit].isfinite().any()
        assert outputs[other].isfinite().all()
    assert all(plan.error().isfinite().all() for plan in plans)
    assert all(direction.isfinite().all() for direction in directions_of(plans[0]))
    check_step(plans, random_grads(layout, FP32, device, 2, world_size))


LARGE = [
    *((4, (40, 150), "signs"), (16, (40, 150), "uniform")),
    *((1, (64, 64), "signs"), (1, (40, 150), "uniform")),
]


# numpy warns in the interpreter: the large step itself may overflow.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize(("rank", "shape", "kind"), everyday(LARGE[:2], LARGE))
def test_after_a_step_near_the_end_of_fp16_the_next_are_finite_and_right(rank, shape, kind, device):
    """An error is shortened before use if its factors might not fit fp16. Outputs and errors still add up."""
    plans = plans_of([shape], rank, FP16, device, world_size=2)
    generator = torch.Generator().manual_seed(0)

    def mean(tensors):
        return torch.stack([tensor.double().cpu().flatten() for tensor in tensors]).mean(0)

    def ordinary():
        return [(torch.randn(*shape, generator=generator) * 0.003).half().flatten().to(device) for _ in plans]

    def large():
        of_kind = {"signs": lambda: torch.randn(*shape, generator=generator).sign() * 16_384,
                   "uniform": lambda: torch.rand(*shape, generator=generator) * 16_384}  # fmt: skip
        return [of_kind[kind]().half().flatten().to(device) for _ in plans]

    step(plans, ordinary())
    step(plans, large())
    for number in range(3):
        gradients, before = ordinary(), [plan.error().double() for plan in plans]
        outputs = [gradient.clone() for gradient in gradients]
        step(plans, outputs)
        assert outputs[0].isfinite().all()
        assert torch.equal(*outputs)
        sums = [plan._matrix(0).flatten() for plan in plans]
        resolution = UNIT_ROUNDOFF[FP16] * max(float(each.abs().max()) for each in (*sums, *outputs))
        lost = outputs[0].double().cpu() + mean(plan.error() for plan in plans) - mean(sums)
        assert lost.abs().max() <= 4 * resolution
        for used, gradient, error in zip(sums, gradients, before, strict=True):
            used = used.double() - gradient.double()
            cut = error - used
            # Between nothing and all of the error is used.
            assert (torch.maximum(used.abs(), cut.abs()) <= error.abs() + 4 * resolution).all()
            assert bool(cut.abs().max() > 4 * resolution) == (number == 0), "it is shortened once"
