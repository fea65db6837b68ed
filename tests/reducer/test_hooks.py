"""Test communication hooks on the Reducer: ours, torch's, and wrong ones."""

import copy

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default

from gradcomp.hooks import debugging_hooks, default_hooks, powerSGD_hook
from tests.reducer.models import MLP, loss_of, make_reducer


def with_torchs_hook(rank, name):
    torch.manual_seed(0)
    model = MLP()
    local = copy.deepcopy(model)
    reducer = make_reducer(model)
    state, hook = {
        "allreduce": (None, torch_default.allreduce_hook),
        "fp16": (None, torch_default.fp16_compress_hook),
        "noop": (None, debugging_hooks.noop_hook),
        "powerSGD": (powerSGD_hook.PowerSGDState(None, 2, 2), powerSGD_hook.powerSGD_hook),
    }[name]
    reducer.register_comm_hook(state, hook)
    for step in range(4):
        x = torch.randn(6, 20, generator=torch.Generator().manual_seed(10 * rank + step))
        for each in (local, model):
            each.zero_grad()
            loss_of(each(x)).backward()
    return [torch.cat([p.grad.flatten() for p in each.parameters()]) for each in (local, model)]


@pytest.mark.parametrize(("hook", "tolerance"), [("allreduce", 1e-6), ("fp16", 1e-2), ("powerSGD", 0.9)])
def test_hooks_of_torchs_and_ours(run_ranks, hook, tolerance):
    """Every hook returns equal averages on all ranks, and approximates the mean."""
    ranks = run_ranks(with_torchs_hook, 2, hook)
    mean = torch.stack([local for local, _ in ranks]).mean(0)
    for _, averaged in ranks:
        assert torch.equal(averaged, ranks[0][1])
        assert (averaged - mean).norm() <= tolerance * mean.norm()


def test_a_hook_that_does_nothing(run_ranks):
    for local, averaged in run_ranks(with_torchs_hook, 2, "noop"):
        assert torch.equal(local, averaged)


def one_step_with(hook):
    model = MLP()
    reducer = make_reducer(model)
    reducer.register_comm_hook(None, hook)
    loss_of(model(torch.randn(3, 20))).backward()


def bad_hooks(rank):
    messages = []

    def holding(value):
        future = torch.futures.Future()
        future.set_result(value)
        return future

    def raising(state, bucket):
        raise ZeroDivisionError("in the hook")

    for hook in (
        lambda state, bucket: bucket.buffer(),
        lambda state, bucket: holding("text"),
        lambda state, bucket: holding(bucket.buffer()[:-1]),
        raising,
    ):
        with pytest.raises((RuntimeError, ZeroDivisionError)) as caught:
            one_step_with(hook)
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    reducer = make_reducer(MLP())
    with pytest.raises(TypeError, match="must be callable"):
        reducer.register_comm_hook(None, "hook")
    reducer.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        reducer.register_comm_hook(None, default_hooks.allreduce_hook)
    return messages


def test_hooks_that_are_wrong(run_ranks):
    ((no_future, text, short, raised),) = run_ranks(bad_hooks, 1)
    assert "returned Tensor, but must return a torch.futures.Future" in no_future
    assert "holds str, but a bucket of 4355 elements must come back" in text
    assert "elements must come back" in short
    assert raised == "ZeroDivisionError: in the hook"
