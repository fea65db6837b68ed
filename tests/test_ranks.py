"""Test that run_ranks returns results, and neither hides a failure nor waits forever."""

import os
import signal
import time

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


def raise_on_rank_1(rank):
    if rank == 1:
        raise ValueError("a bad day")
    dist.barrier()


def die_on_rank_1(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_in_vain(rank):
    if rank == 0:
        dist.recv(torch.zeros(1), src=1)


def test_results_come_back_by_rank(run_ranks):
    assert run_ranks(rank_and_sum, 3) == [(0, 3.0), (1, 3.0), (2, 3.0)]


def test_ranks_interpret_when_asked_to(run_ranks):
    without_gpu = not torch.cuda.is_available()
    for interpret in (False, True, False):
        assert run_ranks(interprets, 2, interpret=interpret) == [interpret and without_gpu] * 2


def test_a_rank_that_raises_is_reported(run_ranks):
    with pytest.raises(RankError, match=r"rank 1 failed:.*\n(.*\n)+ValueError: a bad day"):
        run_ranks(raise_on_rank_1, 2)


def test_a_rank_that_dies_is_reported(run_ranks):
    with pytest.raises(RankError, match="rank 1 failed: the process died, exit code -9"):
        run_ranks(die_on_rank_1, 2)


def test_a_hang_is_killed_and_its_stack_reported(run_ranks):
    started = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0 did not finish in time:\n(.*\n)*.*in wait_in_vain"):
        run_ranks(wait_in_vain, 2, timeout_s=4)
    assert time.monotonic() - started < 60, "the time-out did not act"


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
