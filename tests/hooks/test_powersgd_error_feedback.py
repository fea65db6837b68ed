"""Test that PowerSGD loses nothing: error feedback, gradients of low rank, zero gradients."""

from itertools import pairwise

import pytest
import torch

from gradcomp.hooks import powerSGD_hook
from tests.hooks.powersgd_oracle import (
    Bucket,
    compressed,
    positions,
    powersgd_step,
    random_gradient,
    relative,
    starts,
)
from tests.hooks.powersgd_runs import HOOKS, MATRICES, SHAPES, START, simulate, steps_of_ours
from tests.kept import error_in
from tests.tolerances import ONE_STEP, RECOVERY, UNIT_ROUNDOFF, average


def assert_nothing_is_lost(ranks, steps, factor_rank):
    """Assert that Σ averaged outputs + the mean of the final errors = Σ mean gradients."""
    numel = ranks[0][0][0].numel()
    given, out, largest = torch.zeros(numel).double(), torch.zeros(numel).double(), 0.0
    for step in range(steps):
        given += torch.stack([results[step][0].double() for results in ranks]).mean(0)
        out += ranks[0][step][2].double()
        for results in ranks:
            largest = max(largest, float((results[step][0].abs() + results[step][3][0].abs()).max()))
    errors = torch.stack([results[-1][3][0].double() for results in ranks]).mean(0)
    # In each step and element M rounds once, P Qᵀ (rank terms) twice, and the error once.
    bound = steps * (2 * factor_rank + 4) * UNIT_ROUNDOFF[torch.float32] * largest
    assert (out + errors - given).abs().max() <= bound
    assert errors.abs().max() > 1e3 * bound, "nothing was compressed"


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize(("hook", "rank"), [("powerSGD", 1), ("powerSGD", 4), ("batched", 2)])
def test_error_feedback_loses_nothing(hook, rank, warm_start, world_size):
    steps = 30
    options = {"matrix_approximation_rank": rank, "warm_start": warm_start}
    ranks = simulate(steps_of_ours, world_size, hook, options, SHAPES, steps, torch.float32)
    assert_nothing_is_lost(ranks, steps, rank)
    if hook == "batched":
        return
    mask = ~positions(SHAPES, compressed(SHAPES, rank))
    for step in range(steps):
        locals_ = torch.stack([results[step][0].double()[mask] for results in ranks])
        bound = average(torch.float32, world_size, locals_.abs().amax(0))
        for results in ranks:
            assert ((results[step][2][mask] - locals_.mean(0)).abs() <= bound).all()
            assert not results[step][3][0][mask].any()


def test_no_error_feedback():
    """Without error feedback every step compresses the gradient alone, and keeps no errors."""
    options = {"matrix_approximation_rank": 2, "use_error_feedback": False}
    ranks = simulate(steps_of_ours, 2, "powerSGD", options, SHAPES, 4, torch.float32)
    assert not any(results[step][3][0].any() for results in ranks for step in range(4))
    order = compressed(SHAPES, 2)
    for step in range(1, 4):
        gradients = [results[step][0] for results in ranks]
        zeros = [torch.zeros_like(gradient) for gradient in gradients]
        expected = powersgd_step(SHAPES, gradients, zeros, ranks[0][step][1][1], order)
        for results in ranks:
            assert relative(results[step][2], expected.output) <= ONE_STEP


def test_no_warm_start():
    """The projections are new in every step, equal on all ranks, and lead to the oracle's step."""
    options = {"matrix_approximation_rank": 2, "warm_start": False}
    ranks = simulate(steps_of_ours, 2, "powerSGD", options, SHAPES, 4, torch.float32)
    order = compressed(SHAPES, 2)
    for step in range(1, 4):
        gradients, errors = ([results[step][i] for results in ranks] for i in (0, 1))
        qs = ranks[0][step][1][1]
        expected = powersgd_step(SHAPES, gradients, [error for error, _ in errors], qs, order)
        for results in ranks:
            assert relative(results[step][2], expected.output) <= ONE_STEP
            for mine, first, before in zip(results[step][3][1], ranks[0][step][3][1], qs, strict=True):
                assert torch.equal(mine, first)
                assert mine.shape[0] == 1 or not torch.equal(mine, before)


def low_rank_steps(rank, factor_rank, shapes, sequence):
    """Return (gradient, output) for a sequence of gradients.

    sequence: for each step "low" (of rank factor_rank), "one" (of rank one) or "zero", all three equal on all
        ranks, or "own" (random, another one on every rank).
    """
    options = {"matrix_approximation_rank": factor_rank, "use_error_feedback": False}
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=START, **options)
    results = []
    for step, choice in enumerate(["own"] * START + sequence):
        gradient = random_gradient(shapes, rank, step)
        if choice != "own":
            columns = {"low": factor_rank, "one": 1, "zero": 0}[choice]
            generator = torch.Generator().manual_seed(step)
            gradient = torch.cat(
                [
                    (
                        torch.randn(n, columns, generator=generator)
                        @ torch.randn(columns, m, generator=generator)
                    ).flatten()
                    for n, m in shapes
                ]
            )
        output = powerSGD_hook.powerSGD_hook(state, Bucket(gradient.clone(), shapes)).wait()
        results.append((gradient, output))
    return results[START:]


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_gradients_of_low_rank_are_recovered(rank):
    """Each step has another gradient of rank r. Any projection recovers it."""
    for results in simulate(low_rank_steps, 2, rank, MATRICES, ["low"] * 4):
        for gradient, output in results:
            assert relative(output, gradient) <= RECOVERY


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("pause", ["zero", "one"])
def test_gradients_are_recovered_after_poorer_ones(pause, rank):
    """A zero gradient (an unused parameter's) or one of rank 1 must not lower the next result's rank."""
    for results in simulate(low_rank_steps, 2, rank, MATRICES, ["low", pause, pause, "low", "low"]):
        for gradient, output in results:
            if gradient.any():
                assert relative(output, gradient) <= RECOVERY
            else:
                assert not output.any()


def zero_then_random(rank, options):
    """Take 12 steps with gradients of zero up to step START + 1; return the last output."""
    state = powerSGD_hook.PowerSGDState(None, 2, START, **options)
    outputs = []
    for step in range(12):
        gradient = random_gradient(MATRICES, rank, step) * (step > START + 1)
        outputs.append(powerSGD_hook.powerSGD_hook(state, Bucket(gradient, MATRICES)).wait())
    return outputs[-1]


@pytest.mark.parametrize("options", [{}, {"orthogonalization_epsilon": 1e-8}, {"warm_start": False}], ids=str)
def test_zero_gradients_first(options):
    """A layer whose first gradients are zero is compressed like any other from then on."""
    begin = starts(MATRICES)
    for output in simulate(zero_then_random, 2, options):
        for start, end in pairwise(begin):
            assert output[start:end].any(), "its gradients are never sent"


def near_the_end_of_fp16(rank, hook, distribution, factor_rank):
    """Take fp16 steps, one with gradients near fp16's largest number.

    Returns (gradient, error before, output, error after) of each step after that one.
    """
    state = powerSGD_hook.PowerSGDState(None, factor_rank, START)
    results, before, generator = [], None, torch.Generator().manual_seed(5 + rank)
    for step in range(12):
        gradient = torch.randn(4096, generator=generator) * 0.003
        if step == START + 2:
            gradient = {
                "signs": gradient.sign() * 32_768,
                "equal": torch.full_like(gradient, 30_000) + gradient,
                "normal": gradient / gradient.abs().max() * 60_000,
            }[distribution]
        gradient = gradient.half()
        output = HOOKS[hook](state, Bucket(gradient.clone(), [(64, 64)])).wait()
        after = error_in(state) if step >= START else None
        results.append((gradient, before, output, after))
        before = after
    return results[START + 3 :]


@pytest.mark.parametrize("distribution", ["signs", "equal", "normal"])
@pytest.mark.parametrize(("hook", "factor_rank"), [("powerSGD", 1), ("powerSGD", 4), ("batched", 1)])
def test_after_a_step_near_the_end_of_fp16_the_next_are_finite_and_right(hook, factor_rank, distribution):
    """Rounding loses up to 2^-11 of the largest summand: a gradient, an error or an output."""
    ranks = simulate(near_the_end_of_fp16, 2, hook, distribution, factor_rank)
    for steps in zip(*ranks, strict=True):
        gradient, before, output, after = (torch.stack(each).double() for each in zip(*steps, strict=True))
        assert output.isfinite().all()
        assert torch.equal(output[0], output[1])
        largest = max(float(each.abs().max()) for each in (gradient, before, output))
        lost = (output[0] + after.mean(0) - gradient.mean(0) - before.mean(0)).abs().max()
        assert lost <= 4 * UNIT_ROUNDOFF[torch.float16] * largest
