"""Test the error that PowerSGD's plan in plain torch keeps between steps."""

import pytest
import torch

from gradcomp.cpu import powersgd
from gradcomp.cpu.powersgd import PowerSGDPlan
from gradcomp.layout import PowerSGDLayout

SHAPES = [(24, 16), (24, 16), (5,), (40, 7), (24, 16)]


def plan_of(dtype, rank, square, **options):
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    layout = PowerSGDLayout.square(numel, rank) if square else PowerSGDLayout(SHAPES, rank, 1.0)
    defaults = {"error_feedback": True, "warm_start": True, "epsilon": 0.0, "seed": 0}
    return PowerSGDPlan(layout, dtype, torch.device("cpu"), **defaults | options)


def run_step(plan, gradient, seed):
    buffer = gradient.clone()
    plan.project(buffer, 1.0)
    plan.back_project(buffer, 1.0)
    plan.reconstruct(buffer, seed)
    return buffer


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_reading_the_error_changes_no_bit_of_later_steps(dtype, square, rank):
    """The plan computes the error from M when the error is read, or when the next gradient is added."""
    plans = [plan_of(dtype, rank, square) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for seed in range(4):
        gradient = torch.randn(plans[0].layout.numel, generator=generator).to(dtype)
        read, unread = (run_step(plan, gradient, seed) for plan in plans)
        assert torch.equal(read, unread)
        first = plans[0].error()
        assert torch.equal(first, plans[0].error())
    assert torch.equal(first, plans[1].error())
    if dtype != torch.bfloat16:
        assert first.any()


@pytest.mark.parametrize("chunk_numel", [powersgd.CHUNK_NUMEL, 64])
@pytest.mark.parametrize("rank", [2, powersgd.MAX_TERMS, powersgd.MAX_TERMS + 1])
def test_outputs_and_the_error_are_the_gradients_sum(rank, chunk_numel, monkeypatch):
    """Neither the rows per chunk matter, nor whether P Qᵀ is computed by terms or as a product."""
    monkeypatch.setattr(powersgd, "CHUNK_NUMEL", chunk_numel)
    plan = plan_of(torch.float64, rank, square=False)
    gradients = torch.randn(5, plan.layout.numel, dtype=torch.float64)
    outputs = sum(run_step(plan, gradient, seed) for seed, gradient in enumerate(gradients))
    torch.testing.assert_close(outputs + plan.error(), gradients.sum(0), rtol=1e-12, atol=1e-12)
