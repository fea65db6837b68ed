"""Compare gradcomp.DistributedDataParallel.join with torch's: ranks with different numbers of inputs."""

import warnings

import pytest
import torch

import gradcomp
from tests.parallel.beside_torch import assert_alike, assert_alike_in_groups, batch_of, flat, gradients
from tests.ranks import of_all_ranks
from tests.reducer.models import CAP_MB, MLP, UNUSED, Branches, loss_of, on_device
from tests.training import Layers


def uneven(cls, rank, divide, options):
    """Train on two inputs on rank 0, and on five on rank 1."""
    torch.manual_seed(0)
    model = on_device(MLP() if not options else Branches())
    ddp = cls(model, bucket_cap_mb=CAP_MB, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join(divide_by_initial_world_size=divide):
        for step in range(2 + 3 * rank):
            optimizer.zero_grad()
            loss_of(ddp(batch_of(model, rank, step))).backward()
            optimizer.step()
    return flat(model)


def test_join(run_group):
    cases = [(divide, options) for divide in (True, False) for options in ({}, UNUSED)]
    for ranks in assert_alike_in_groups(run_group, uneven, cases):
        assert all(torch.equal(each, ranks[0]) for each in ranks)


def without_any(cls, rank):
    """Train on no input on rank 0, which joins in the comparison of the others' first step."""
    torch.manual_seed(0)
    model = MLP()
    ddp = cls(model)
    with ddp.join():
        for step in range(2 * rank):
            loss_of(ddp(batch_of(model, rank, step))).backward()
    return flat(model)


@pytest.mark.ranks(2)
def test_join_does_not_warn(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained = uneven(gradcomp.DistributedDataParallel, rank, False, {})
    assert torch.equal(*of_all_ranks(trained))


def join_in_both_ways(cls, rank, as_view):
    """Join twice: divide by the number of ranks left, then by the number of all ranks."""
    torch.manual_seed(0)
    model = MLP()
    ddp = cls(model, gradient_as_bucket_view=as_view)
    results = []
    for divide_by_all in (False, True):
        with ddp.join(divide_by_initial_world_size=divide_by_all):
            for step in range(1 + 2 * rank):
                ddp.zero_grad()
                loss_of(ddp(batch_of(model, rank, step))).backward()
                results.append(gradients(model))
        results.append(gradients(model))  # of a rank that has left its own
    return results


def static_graph_left_early(cls, rank):
    """Train on one input on rank 1, the only rank that uses the second layer, and on three on rank 0."""
    torch.manual_seed(0)
    model = Layers(3, 3, 3)
    ddp = cls(model, static_graph=True)
    results = []
    with ddp.join():
        for _ in range(1 if rank else 3):
            ddp.zero_grad()
            loss_of(ddp(torch.ones(2, 3), skips=[] if rank else [1])).backward()
            results.append(gradients(model))
    return results


@pytest.mark.ranks(2)
def test_a_static_graph_stays_what_it_was_when_a_rank_has_left(rank):
    results = assert_alike(rank, static_graph_left_early)
    assert rank == 1 or all(
        not gradient.any() for gradient in results[-1][2:]
    )  # of the second layer: not None


def throw_early(cls, rank):
    model = MLP()
    ddp = cls(model)
    try:
        with ddp.join(throw_on_early_termination=True):
            for step in range(2 + rank):
                loss_of(ddp(batch_of(model, rank, step))).backward()
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.ranks(2)
def test_join_that_ends_when_one_rank_ends(rank):
    assert "exhausted" in assert_alike(rank, throw_early)


@pytest.mark.ranks(2)
def test_all_as_torchs(rank):
    assert_alike(rank, without_any)
    assert_alike(rank, join_in_both_ways, False)
    assert_alike(rank, join_in_both_ways, True)


@pytest.mark.ranks(1)
def test_a_rank_without_input_keeps_its_gradients_when_a_hook_raises(rank):
    model = MLP()
    ddp = gradcomp.DistributedDataParallel(model)

    def hook(state, bucket):
        raise ZeroDivisionError("in the hook")

    loss_of(ddp(torch.randn(3, 20))).backward()
    before = [param.grad for param in model.parameters()]
    ddp.register_comm_hook(None, hook)
    with pytest.raises(ZeroDivisionError):
        ddp.reducer.join_with_zeros()
    assert all(param.grad is gradient for param, gradient in zip(model.parameters(), before, strict=True))
