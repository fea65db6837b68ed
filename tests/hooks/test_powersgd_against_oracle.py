"""Compare one step of PowerSGD with torch's hook and with a float64 oracle, in every dtype."""

import math

import pytest
import torch

from tests.hooks.powersgd_oracle import compressed, positions, powersgd_step, relative
from tests.hooks.powersgd_runs import SHAPES, simulate, step_of_both, steps_of_ours
from tests.oracle import projector
from tests.tolerances import (
    EPSILON_STEP,
    ONE_STEP,
    ONE_STEP_FP64,
    ONE_STEP_SPAN,
    SIXTEEN_BIT_ROUNDINGS,
    UNIT_ROUNDOFF,
)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_one_step_as_torchs(rank, world_size):
    """The step starts from torch's state after some steps, with and without torch's batching of matrices."""
    for batched in (False, True):
        options = {"matrix_approximation_rank": rank, "batch_tensors_with_same_shape": batched}
        ranks = simulate(step_of_both, world_size, options, SHAPES, 3)
        mask = positions(SHAPES, compressed(SHAPES, rank))
        for _, (our_output, our_error, _), (their_output, _, their_error) in ranks:
            assert relative(our_output, their_output) <= ONE_STEP
            assert relative(our_error[mask], their_error[mask]) <= ONE_STEP
            assert not our_error[~mask].any()
            assert torch.equal(our_output, ranks[0][1][0])


@pytest.mark.parametrize("rank", [1, 2])
def test_one_step_with_epsilon_as_torchs(rank):
    """For ranks 1 and 2 torch runs its Gram–Schmidt, the only method that takes an epsilon."""
    options = {"matrix_approximation_rank": rank, "orthogonalization_epsilon": 1e-8}
    for _, (ours, _, _), (theirs, _, _) in simulate(step_of_both, 2, options, SHAPES, 3):
        assert relative(ours, theirs) <= EPSILON_STEP


def ranked(rank, **options):
    return {"matrix_approximation_rank": rank, **options}


BOUNDS = {torch.float32: (ONE_STEP, ONE_STEP_SPAN), torch.float64: (ONE_STEP_FP64, 100 * ONE_STEP_FP64)}
for dtype in (torch.float16, torch.bfloat16):
    BOUNDS[dtype] = SIXTEEN_BIT_ROUNDINGS * UNIT_ROUNDOFF[dtype], math.inf
# World size, options, dtype. At a rate of 0.5 even matrices smaller than their factors are compressed.
CASES = [
    *((world_size, ranked(rank), torch.float32) for world_size in (1, 2, 3) for rank in (1, 2, 4, 8)),
    *((2, ranked(rank), torch.float64) for rank in (1, 2, 4, 8)),
    *((2, ranked(2), dtype) for dtype in (torch.float16, torch.bfloat16)),
    *((2, ranked(2, **{name: False}), torch.float32) for name in ("warm_start", "use_error_feedback")),
    (2, ranked(4, min_compression_rate=0.5), torch.float32),
    (2, ranked(2, min_compression_rate=30), torch.float32),
]


@pytest.mark.parametrize(("world_size", "options", "dtype"), CASES, ids=str)
def test_steps_as_the_oracles(world_size, options, dtype):
    """A step equals the oracle's step from the same state. Without error feedback no error is kept.

    Without warm start, projections are new in every step, and equal on all ranks.
    """
    ranks = simulate(steps_of_ours, world_size, "powerSGD", options, SHAPES, 4, dtype)
    order = compressed(SHAPES, options["matrix_approximation_rank"], options.get("min_compression_rate", 2))
    bound, span_bound = BOUNDS[dtype]
    for step in range(1, 4):
        gradients, before, outputs, after = zip(*(results[step] for results in ranks), strict=True)
        errors, qs = [error for error, _ in before], before[0][1]
        expected = powersgd_step(SHAPES, gradients, errors, qs, order)
        for output, (our_error, directions), error in zip(outputs, after, expected.errors, strict=True):
            assert output.dtype == dtype
            assert relative(output, expected.output) <= bound
            if not options.get("use_error_feedback", True):
                assert not our_error.any()
            elif error.any():
                assert relative(our_error, error) <= bound
            for mine, first, q in zip(directions, after[0][1], expected.qs, strict=True):
                if options.get("warm_start", True):
                    assert relative(projector(mine), projector(q)) <= span_bound
                else:
                    assert torch.equal(mine, first)
                    is_whole = mine.shape[0] <= mine.shape[1]  # spans everything
                    assert is_whole or relative(projector(mine), projector(q)) > 0.1


def test_min_compression_rate():
    assert len(compressed(SHAPES, 4, 0.5)) > len(compressed(SHAPES, 4)) > len(compressed(SHAPES, 2, 30)) > 0


def test_rank_above_the_matrix():
    """With a rank above min(n, m), P Qᵀ is the mean itself, and there is no error."""
    shapes = ((3, 40), (40, 3), (5, 5), (1, 9), (9, 1), (4,))
    options = {"matrix_approximation_rank": 64, "min_compression_rate": 0.1}
    assert len(compressed(shapes, 64, 0.1)) == 5
    ranks = simulate(steps_of_ours, 2, "powerSGD", options, shapes, 3, torch.float32)
    for step in range(3):
        mean = torch.stack([results[step][0].double() for results in ranks]).mean(0)
        for results in ranks:
            _, _, output, (_, directions) = results[step]
            assert relative(output, mean + owed_before(ranks, step)) <= ONE_STEP
            assert [tuple(direction.shape) for direction in directions] == [
                *((40, 3), (3, 3), (5, 5), (9, 1), (1, 1))
            ]


def owed_before(ranks, step):
    """Return the ranks' mean error before a step. The output may hold it beside the mean gradient."""
    if step == 0:
        return torch.zeros(ranks[0][0][0].numel(), dtype=torch.float64)
    return torch.stack([results[step][1][0].double() for results in ranks]).mean(0)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("hook", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)], ids=["fp16", "bf16"]
)
@pytest.mark.parametrize("inner", ["powerSGD", "batched"])
def test_one_wrapped_step_is_close(inner, hook, dtype, world_size):
    """With and without the wrapper, the first step projects on the same random directions."""
    options = {"matrix_approximation_rank": 2}
    plain, wrapped = (
        simulate(steps_of_ours, world_size, name, options, SHAPES, 1, torch.float32)
        for name in (inner, f"{hook} around {inner}")
    )
    for ((_, _, expected, _),), ((_, _, output, _),) in zip(plain, wrapped, strict=True):
        assert output.dtype == torch.float32
        distance = relative(output, expected)
        assert 0 < distance <= SIXTEEN_BIT_ROUNDINGS * UNIT_ROUNDOFF[dtype]
