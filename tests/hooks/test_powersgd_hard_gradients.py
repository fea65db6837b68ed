"""Zero, poor, non-finite and too large gradients: steps after them are right."""

import math
from functools import partial

import pytest
import torch

from gradcomp.hooks import powerSGD_hook
from tests.depth import mixed
from tests.hooks.powersgd_oracle import Bucket, compressed, positions, random_gradient, relative, starts
from tests.hooks.powersgd_runs import FEW_SHAPES, HOOKS, MATRICES, START, new_state, run_step, simulate
from tests.kept import directions_in, error_in
from tests.oracle import PowerSGDOracle, split
from tests.tolerances import ONE_STEP, RECOVERY, UNIT_ROUNDOFF

OPTIONS = [{}, {"use_error_feedback": False}, {"warm_start": False}, {"orthogonalization_epsilon": 1e-8}]


def low_rank_steps(rank, factor_rank, sequence):
    """Return (gradient, output) of each step of a sequence.

    sequence: the rank of each step's gradient, which is equal on all ranks.
    """
    state, results = new_state(matrix_approximation_rank=factor_rank, use_error_feedback=False), []
    for step, columns in enumerate([9] * START + sequence):
        drawn = partial(torch.randn, generator=torch.Generator().manual_seed(step))
        factors = [(drawn(n, columns), drawn(columns, m)) for n, m in MATRICES]
        gradient = torch.cat([(left @ right).flatten() for left, right in factors])
        results.append((gradient, run_step(powerSGD_hook, state, gradient, MATRICES)))
    return results[START:]


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("pause", [0, 1])
def test_gradients_are_recovered_after_poorer_ones(pause, rank):
    """A zero gradient (an unused parameter's) or one of rank 1 must not lower the next result's rank."""
    for gradient, output in simulate(low_rank_steps, 1, rank, [rank, pause, pause, rank, rank])[0]:
        assert relative(output, gradient) <= RECOVERY if gradient.any() else not output.any()


def one_bad_step(rank, options, value, tensor, bad_ranks):
    """Take steps. One of them has this value in this tensor on the bad ranks.

    Returns (gradient, output, (error, Q) after the step) of each compressed step.
    """
    state, results = new_state(**options), []
    for step in range(START + 6):
        gradient = random_gradient(FEW_SHAPES, rank, step)
        if step == START + 3 and rank in bad_ranks:
            gradient[starts(FEW_SHAPES)[tensor] + 1] = value
        output = run_step(powerSGD_hook, state, gradient, FEW_SHAPES)
        results.append((gradient, output, (error_in(state), directions_in(state))))
    return results[START:]


@pytest.mark.parametrize(
    ("tensor", "case", "options"),
    mixed([0, 1, 3], [(math.inf, [0, 1]), (-math.inf, [1]), (math.nan, [0])], OPTIONS, together=2),
    ids=str,
)
def test_a_bad_step_is_forgotten(tensor, case, options):
    """In that step every rank's output is non-finite, whichever rank had the value. Later steps are right."""
    value, bad_ranks = case
    ranks = simulate(one_bad_step, 2, options, value, tensor, bad_ranks)
    bad, order = positions(FEW_SHAPES, [tensor]), compressed(FEW_SHAPES, 2)
    for step in range(1, 6):
        gradients, outputs, _ = zip(*(results[step] for results in ranks), strict=True)
        errors, directions = zip(*(results[step - 1][2] for results in ranks), strict=True)
        assert torch.equal(outputs[0].nan_to_num(7), outputs[1].nan_to_num(7))
        good = ~bad if step == 3 else torch.ones_like(bad)
        assert outputs[0][good].isfinite().all()
        if step == 3:  # a GradScaler skips it on every rank
            finite = outputs[0][bad].isfinite()
            assert not (finite.any() if tensor in order else finite.all())
        assert all(error.isfinite().all() for error in errors)
        for error, results in zip(errors if step == 4 else (), ranks, strict=step == 4):
            kept = bad & results[3][0].isfinite()  # as before the step, but for the rounding of M
            assert torch.allclose(error[kept], results[2][2][0][kept], rtol=0, atol=1e-5)
        oracle = PowerSGDOracle(FEW_SHAPES, 2)
        oracle.errors = [split(error.double(), FEW_SHAPES) for error in errors]
        gradients = [split(gradient.nan_to_num(0, 0, 0), FEW_SHAPES) for gradient in gradients]
        expected = torch.cat([each.flatten() for each in oracle.step(gradients, directions[0])])
        assert relative(outputs[0][good], expected[good]) <= ONE_STEP


def fp16_steps(rank, gradient_of):
    hook, state = HOOKS["fp16 around powerSGD"], new_state()
    gradients = [gradient_of(rank, step - START) for step in range(START + 6)]
    return [hook(state, Bucket(gradient, FEW_SHAPES)).wait() for gradient in gradients][START:]


def large(rank, step):
    """Return a gradient with a sum over two ranks that overflows float16, unlike the mean."""
    return random_gradient(FEW_SHAPES, 0, step).clamp(-1, 1) * 4e4 * positions(FEW_SHAPES, [1, 4])


def test_fp16_divides_before_it_rounds():
    for outputs in simulate(fp16_steps, 2, large):
        assert all(output.isfinite().all() for output in outputs)


def near_the_end_of_fp16(rank, hook, distribution, factor_rank):
    """Take fp16 steps, one with gradients near fp16's largest number.

    Returns (gradient, error before, output, error after) of each step after that one.
    """
    state, generator = (
        new_state(matrix_approximation_rank=factor_rank),
        torch.Generator().manual_seed(5 + rank),
    )
    results, before = [], None
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


@pytest.mark.parametrize(
    ("case", "distribution"),
    mixed([("powerSGD", 1), ("powerSGD", 4), ("batched", 1)], ["signs", "equal", "normal"]),
    ids=str,
)
def test_after_a_step_near_the_end_of_fp16_the_next_are_finite_and_right(case, distribution):
    """Rounding loses up to 2^-11 of the largest summand: a gradient, an error or an output."""
    hook, factor_rank = case
    for steps in zip(*simulate(near_the_end_of_fp16, 2, hook, distribution, factor_rank), strict=True):
        gradient, before, output, after = (torch.stack(each).double() for each in zip(*steps, strict=True))
        assert output.isfinite().all()
        assert torch.equal(output[0], output[1])
        largest = max(float(each.abs().max()) for each in (gradient, before, output))
        lost = (output[0] + after.mean(0) - gradient.mean(0) - before.mean(0)).abs().max()
        assert lost <= 4 * UNIT_ROUNDOFF[torch.float16] * largest
