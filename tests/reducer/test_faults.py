"""Test that the other ranks end with an error, in time, if a rank dies, raises or leaves a backward out."""

import os
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradcomp.hooks import default_hooks
from tests.ranks import RankError
from tests.reducer.models import MLP, loss_of, make_reducer

TIMEOUT_S = 4


def two_steps(rank, how):
    """On rank 1, fail in the second step's first bucket, or skip its backward and wait for rank 0's error."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT_S))
    store = dist.distributed_c10d._get_default_store()
    model = MLP()
    reducer = make_reducer(model, process_group=group)
    calls = []

    def hook(state, bucket):
        calls.append(bucket.index())
        if rank == 1 and len(calls) > 2 and how != "skips":
            if how == "dies":
                os._exit(0)
            raise ZeroDivisionError("on rank 1")
        return default_hooks.allreduce_hook(group, bucket)

    reducer.register_comm_hook(None, hook)
    for step in range(2):
        if rank == 1 and step == 1 and how == "skips":
            store.wait(["rank 0 has ended"], timedelta(seconds=30))
            return "left out"
        try:
            loss_of(model(torch.randn(3, 20))).backward()
        except RuntimeError as error:
            store.set("rank 0 has ended", "")
            return f"backward raised: {error}"
    return "finished"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dies", "Connection (reset|closed) by peer"),
        ("raises", "Connection (reset|closed) by peer|[Tt]imed out"),
    ],
)
def test_a_rank_that_fails_in_mid_backward(run_ranks, how, message):
    with pytest.raises(RankError) as caught:
        run_ranks(report, 2, how, timeout_s=30)
    assert "did not finish in time" not in str(caught.value)
    assert re.search(f"backward raised: .*({message})", str(caught.value), re.DOTALL)
    if how == "raises":
        assert "ZeroDivisionError: on rank 1" in str(caught.value)


def report(rank, how):
    raise AssertionError(two_steps(rank, how))


def test_a_rank_that_leaves_a_backward_out(run_ranks):
    first, second = run_ranks(two_steps, 2, "skips", timeout_s=30)
    assert second == "left out"
    assert first.startswith("backward raised: ")
    assert re.search(r"rank 0 of 2 could not average bucket [01] with .*: .*([Tt]imeout|[Tt]imed out)", first)
    assert first.endswith("Look for the first error in the output of the other ranks")
