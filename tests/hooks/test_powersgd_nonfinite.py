"""Show that zero, non-finite and too large gradients ruin torch's PowerSGD state, and not gradcomp's."""

import math

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default

from gradcomp.hooks import default_hooks
from tests.hooks.powersgd_oracle import (
    Bucket,
    compressed,
    positions,
    powersgd_step,
    random_gradient,
    relative,
)
from tests.hooks.powersgd_runs import FEW_SHAPES, MODULES, START, new_state, run_step
from tests.kept import directions_in, error_in
from tests.tolerances import ONE_STEP

# Zero gradients.


def zeros_then_random(rank, name, factor_rank):
    module = MODULES[name]
    state = new_state(module, matrix_approximation_rank=factor_rank)
    outputs = [
        run_step(module, state, torch.zeros(64 * 64), [(64, 64)]),
        *(run_step(module, state, torch.zeros(64 * 64), [(64, 64)]) for _ in range(START + 3)),
    ]
    later = [
        run_step(module, state, random_gradient([(64, 64)], rank, step), [(64, 64)]) for step in range(4)
    ]
    return outputs, later


@pytest.mark.parametrize("factor_rank", [1, 2])
def test_zero_gradients(run_ranks, factor_rank):
    """Torch divides by a norm of zero. In gradcomp zeros stay zero, and later gradients are averaged."""
    for outputs, later in run_ranks(zeros_then_random, 2, "gradcomp", factor_rank):
        assert not any(output.any() for output in outputs)
        assert all(output.isfinite().all() for output in later)
        assert all(output.any() for output in later), "gradients after zeros are lost"
    for outputs, later in run_ranks(zeros_then_random, 2, "torch", factor_rank):
        assert outputs[-1].isnan().all()
        assert later[-1].isnan().all()


# One step that is not finite.


def one_bad_step(rank, name, options, value, tensor, bad_ranks):
    """Take steps. One of them has this value in this tensor on the bad ranks.

    Returns (gradient, output, (error, Q) after the step) of each compressed step.
    """
    module = MODULES[name]
    state = new_state(module, **options)
    offset = sum(math.prod(shape) for shape in FEW_SHAPES[:tensor])
    results = []
    for step in range(START + 6):
        gradient = random_gradient(FEW_SHAPES, rank, step)
        if step == START + 3 and rank in bad_ranks:
            gradient[offset + 1] = value
        output = run_step(module, state, gradient, FEW_SHAPES)
        memory = None
        if name == "gradcomp" and step >= START:
            memory = (error_in(state), directions_in(state))
        results.append((gradient, output, memory))
    return results[START:]


def assert_one_bad_step(ranks, tensor):
    bad = positions(FEW_SHAPES, [tensor])
    order = compressed(FEW_SHAPES, 2)
    for step in range(6):
        outputs = [results[step][1] for results in ranks]
        assert all(torch.equal(outputs[0].nan_to_num(7), output.nan_to_num(7)) for output in outputs)
        if step == 3:
            # Every rank sees the bad value, so that a GradScaler skips the step on every rank.
            assert not outputs[0][bad].isfinite().all()
            assert outputs[0][~bad].isfinite().all()
            if tensor in order:
                assert not outputs[0][bad].isfinite().any()
        else:
            assert all(output.isfinite().all() for output in outputs)
        if step == 0:
            continue
        gradients = [results[step][0] for results in ranks]
        errors = [results[step - 1][2][0] for results in ranks]
        assert all(error.isfinite().all() for error in errors)
        if step == 4 and tensor in order:
            for error, results in zip(errors, ranks, strict=True):
                kept = bad & results[3][0].isfinite()  # but for the element, and the rounding of M
                assert torch.allclose(error[kept], results[2][2][0][kept], rtol=0, atol=1e-5)
        expected = powersgd_step(
            FEW_SHAPES,
            [gradient.nan_to_num(0, 0, 0) for gradient in gradients],
            errors,
            ranks[0][step - 1][2][1],
            order,
        )
        good = ~bad if step == 3 else torch.ones_like(bad)
        assert relative(outputs[0][good], expected.output[good]) <= ONE_STEP


OPTIONS = [{}, {"use_error_feedback": False}, {"warm_start": False}, {"orthogonalization_epsilon": 1e-8}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_bad_step_is_forgotten(run_ranks, options):
    """In that step every rank's output is non-finite, whichever rank had the value. Later steps are right."""
    for value, bad_ranks in [(math.inf, [0, 1]), (-math.inf, [1]), (math.nan, [0])]:
        for tensor in (0, 1, 3):
            ranks = run_ranks(one_bad_step, 2, "gradcomp", options, value, tensor, bad_ranks)
            assert_one_bad_step(ranks, tensor)


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("error_feedback", [True, False])
def test_a_bad_step_poisons_torchs_state(run_ranks, rank, error_feedback):
    options = {"matrix_approximation_rank": rank, "use_error_feedback": error_feedback}
    for results in run_ranks(one_bad_step, 2, "torch", options, math.inf, 0, [0, 1]):
        bad = positions(FEW_SHAPES, [0])
        finite = [bool(output[bad].isfinite().all()) for _, output, _ in results]
        assert finite == [True, True, True, False, False, False]


# fp16.


def large_gradients(rank, name):
    """Average gradients of 40,000 on two ranks: the sum overflows float16, but not the mean."""
    module = MODULES[name]
    wrapper = {"gradcomp": default_hooks, "torch": torch_default}[name].fp16_compress_wrapper
    state, shapes = new_state(module, matrix_approximation_rank=1), [(48, 48), (5,)]
    gradient = torch.cat([torch.outer(torch.ones(48), torch.ones(48)).flatten() * 2.0, torch.full((5,), 4e4)])
    for _ in range(START):
        run_step(module, state, torch.zeros_like(gradient), shapes)
    return wrapper(module.powerSGD_hook)(state, Bucket(gradient.clone(), shapes)).wait()


def test_fp16_divides_before_it_rounds(run_ranks):
    for output in run_ranks(large_gradients, 2, "torch"):
        assert output[-5:].isinf().all()
    for output in run_ranks(large_gradients, 2, "gradcomp"):
        assert output[-5:].tolist() == [40_000.0] * 5
        assert output.isfinite().all()


def overflow_once(rank, name):
    """Take steps. In one of them, rank 1's gradient overflows float16."""
    wrapper = {"gradcomp": default_hooks, "torch": torch_default}[name].fp16_compress_wrapper
    hook, state, outputs = wrapper(MODULES[name].powerSGD_hook), new_state(MODULES[name]), []
    for step in range(START + 6):
        gradient = random_gradient(FEW_SHAPES, rank, step)
        if step == START + 3 and rank == 1:
            gradient *= 1e6
        outputs.append(hook(state, Bucket(gradient, FEW_SHAPES)).wait())
    return outputs[START:]


def test_a_step_that_overflows_fp16_is_forgotten(run_ranks):
    """Only the step that overflows is non-finite, on all ranks: a GradScaler may cause it to find a scale."""
    first, second = run_ranks(overflow_once, 2, "gradcomp")
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))
    assert [bool(output.isfinite().all()) for output in first] == [True, True, True, False, True, True]
    for outputs in run_ranks(overflow_once, 2, "torch"):
        assert not outputs[-1].isfinite().all()
