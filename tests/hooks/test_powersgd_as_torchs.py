"""Compare a step of PowerSGD with torch's hook from an identical state; tests/test_oracle.py has oracles."""

import pytest
import torch

from tests.hooks.powersgd_oracle import compressed, positions, relative
from tests.hooks.powersgd_runs import SHAPES, simulate, step_of_both
from tests.tolerances import EPSILON_STEP, ONE_STEP


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_one_step_as_torchs(rank, world_size):
    """The step starts from torch's state after some steps, with and without torch's batching of matrices."""
    for batched in (False, True):
        options = {"matrix_approximation_rank": rank, "batch_tensors_with_same_shape": batched}
        ranks = simulate(step_of_both, world_size, options, SHAPES)
        mask = positions(SHAPES, compressed(SHAPES, rank))
        for (our_output, our_error), (their_output, their_error) in ranks:
            assert relative(our_output, their_output) <= ONE_STEP
            assert relative(our_error[mask], their_error[mask]) <= ONE_STEP
            assert not our_error[~mask].any()
            assert torch.equal(our_output, ranks[0][0][0])


@pytest.mark.parametrize("rank", [1, 2])
def test_one_step_with_epsilon_as_torchs(rank):
    """For ranks 1 and 2 torch runs its Gram–Schmidt, the only method that takes an epsilon."""
    options = {"matrix_approximation_rank": rank, "orthogonalization_epsilon": 1e-8}
    for (ours, _), (theirs, _) in simulate(step_of_both, 2, options, SHAPES):
        assert relative(ours, theirs) <= EPSILON_STEP


def test_min_compression_rate():
    assert len(compressed(SHAPES, 4, 0.5)) > len(compressed(SHAPES, 4)) > len(compressed(SHAPES, 2, 30)) > 0
