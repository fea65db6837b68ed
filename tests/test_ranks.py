"""Test that ranks return results, interpret, and run marked tests; tests/testing/ranks has their failures."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, of_all_ranks


def rank_and_sum(rank):
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    return rank, tensor.item()


def interprets(rank):
    from gradcomp import ops

    return ops.runs_triton(torch.device("cpu"))


def test_results_come_back_by_rank(run_ranks):
    assert run_ranks(rank_and_sum, 3) == [(0, 3.0), (1, 3.0), (2, 3.0)]


def test_ranks_interpret_when_asked_to(run_ranks):
    without_gpu = not torch.cuda.is_available()
    for interpret in (False, True, False):
        assert run_ranks(interprets, 2, interpret=interpret) == [interpret and without_gpu] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("given", ["argument"])
def test_a_marked_test_runs_on_every_rank(rank, given):
    assert of_all_ranks((rank, given)) == [(0, "argument"), (1, "argument")]


@pytest.mark.simulated_ranks(3)
def test_a_marked_test_runs_on_every_simulated_rank(rank):
    assert of_all_ranks(rank) == [0, 1, 2]


@pytest.mark.xfail(strict=True, raises=RankError)
@pytest.mark.ranks(2)
def test_a_marked_test_fails_if_it_fails_on_a_rank(rank):
    assert rank == 0
