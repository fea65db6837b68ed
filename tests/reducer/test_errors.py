"""Test the Reducer's errors when it is used wrongly."""

import os
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

from gradcomp import DistributedDataParallel
from gradcomp.hooks import default_hooks
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradcomp.reducer import Reducer
from tests.ranks import of_all_ranks
from tests.reducer.models import MLP, PLAIN, STATIC, UNUSED, Branches, Embeddings, loss_of, make_reducer


def model_of(change, rank):
    """Return a model that is another one on rank 1."""
    if change == "frozen":
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[rank].requires_grad_(False)
        return model
    model = MLP()
    if rank == 1:
        model.append(nn.Linear(3, 3)) if change == "number" else None
        model[2] = nn.Linear(65, 64) if change == "shape" else model[2]
        model = model.double() if change == "dtype" else model
        model[2].weight.data = model[2].weight.data.t() if change == "layout" else model[2].weight.data
    return model


# By the change: the values of ranks 0 and 1, and their place in the list of parameters.
DIFFERENT = {
    "number": ("6", "8", None),
    "shape": ('["2.weight", [64, 64], "torch.float32"]', '["2.weight", [64, 65], "torch.float32"]', 2),
    "dtype": ('["0.weight", [64, 20], "torch.float32"]', '["0.weight", [64, 20], "torch.float64"]', 0),
    "layout": (
        '["2.weight", [64, 64], "torch.float32"]',
        '["2.weight", [64, 64], "torch.float32", [1, 64]]',
        2,
    ),
    "frozen": ('["1.weight", [8, 8], "torch.float32"]', '["0.weight", [8, 8], "torch.float32"]', 0),
}


@pytest.mark.ranks(2)
def test_ranks_with_different_models(rank):
    for change, (first, second, place) in DIFFERENT.items():
        with pytest.raises(RuntimeError) as caught:
            make_reducer(model_of(change, rank))
        said, other = of_all_ranks(str(caught.value))
        parameters = "parameters that require gradients"
        what = f"the number of {parameters}" if place is None else f"{parameters}[{place}]"
        assert said == other
        assert said.startswith("what the Reducer was given differs between the ranks: ")
        assert f"{what} is {first} on rank 0 and {second} on rank 1" in said
        assert "Build the same model on every rank, and give" in said


@pytest.mark.ranks(2)
def test_a_backward_that_does_not_reach_all_parameters(rank):
    model = Branches()
    kept = make_reducer(model)
    messages = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            loss_of(model(torch.ones(2, 12))).backward()
        messages.append(str(caught.value))
    kept.close()
    for message in messages:
        assert "Expected to have finished reduction in the prior iteration" in message
        assert "never.weight, never.bias" in message
        assert "`find_unused_parameters=True`" in message
        assert "`forward` function outputs participate in calculating loss" in message
        assert message.endswith(f"Parameter indices which did not receive grad for rank {rank}: 2 3 4 5 8 9")


class Breaks(torch.autograd.Function):
    """This function raises in backward while `is_broken`."""

    is_broken = True

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Breaks.is_broken:
            raise ArithmeticError("half way")
        return gradient


@pytest.mark.ranks(2)
def test_a_backward_that_is_broken_off(rank):
    """Break off the first of three backwards."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    kept = make_reducer(model)
    said = []
    for step in range(3):
        model.zero_grad()
        Breaks.is_broken = step == 0
        try:
            model[1](Breaks.apply(model[0](torch.full((1, 3), rank + 1.0)))).sum().backward()
        except (ArithmeticError, RuntimeError) as error:
            said.append(str(error))
    kept.close()
    (first, gradient), (second, same) = of_all_ranks((said, model[0].weight.grad))
    assert first == second
    assert first[0] == "half way"
    assert "parameter 1.bias became ready twice" in first[1]
    assert "an exception that broke off the backward before this one" in first[1]
    assert len(first) == 2
    assert torch.equal(gradient, same)


LATE = {
    "no hook": (lambda: (None, None), "0"),
    "all-reduce": (lambda: (None, default_hooks.allreduce_hook), "0"),
    "fp16": (lambda: (None, default_hooks.fp16_compress_hook), "0"),
    "a plain start": (lambda: (PowerSGDState(None, 1, 9), powerSGD_hook), "0"),
    "messages": (lambda: (None, default_hooks.allreduce_hook), "20"),
    "messages without a hook": (lambda: (None, None), "20"),
    "int8": (lambda: (QuantizationState(bits=8, start_iter=1), quantization_hook), "20"),
}


class LateAverage(nn.Module):
    """The average of `second` is under way when a backward of this model breaks off."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(300, 300), nn.Linear(300, 300)

    def forward(self, x):
        return self.second(Breaks.apply(self.first(x)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("as_view", [False, True])
def test_the_step_after_an_error_waits_for_what_is_under_way(rank, as_view):
    """Rank 1 joins the average of a broken off backward when rank 0 is in the next good step, or waits."""
    store, found = dist.distributed_c10d._get_default_store(), {}
    for name, (make, delay) in LATE.items():
        os.environ["GRADCOMP_ROUND_TRIP_MS"] = delay
        group = dist.new_group()  # whose delay is not known yet
        torch.manual_seed(0)
        options = {"gradient_as_bucket_view": as_view, "bucket_cap_mb": 0.1, "process_group": group}
        ddp = DistributedDataParallel(LateAverage(), **options)
        state, hook = make()
        if hook is not None:
            if state is not None:
                state.process_group = group
            ddp.register_comm_hook(group if state is None else state, hook)
        errors = []
        for step in range(4):
            Breaks.is_broken = step == 1
            if step == 1 and rank == 1:
                any(store.check([name]) for _ in range(2000))  # in vain if rank 0 waits
            if step == 3 and rank == 0:
                ddp.module.second.bias.register_post_accumulate_grad_hook(
                    lambda _, name=name: store.set(name, "")
                )
            ddp.zero_grad()
            x = torch.full((1, 300), rank + 1.0 + step)
            try:
                ddp(x).square().sum().backward()
            except (ArithmeticError, RuntimeError) as error:
                errors.append(type(error))
        module = LateAverage()
        module.load_state_dict(ddp.module.state_dict())
        module(x).square().sum().backward()
        off = 0.0
        for own, averaged in zip(module.parameters(), ddp.module.parameters(), strict=True):
            dist.all_reduce(own.grad)
            off = max(off, float((own.grad / 2 - averaged.grad).norm() / own.grad.norm()))
        found[name] = errors, off
    for name, (errors, off) in found.items():
        assert errors == [ArithmeticError, RuntimeError], name
        assert off < 0.02, name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("prepared", [False, True])
def test_a_static_graph_with_reentrant_checkpointing_needs_the_outputs(rank, prepared):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    kept = make_reducer(model, static_graph=True)
    for step in range(2):
        model.zero_grad()
        x = torch.full((1, 4), rank + step + 1.0, requires_grad=True)
        output = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)
        if not prepared:
            with pytest.raises(RuntimeError, match=r"prepare_for_backward\(outputs\) was not called"):
                output.sum().backward()
            return
        kept.prepare_for_backward(output)
        output.sum().backward()
    assert torch.equal(model.weight.grad, torch.full((4, 4), 2.5))


@pytest.mark.ranks(1)
def test_what_has_to_be_declared(rank):
    tokens = torch.randint(0, 30, (5, 4))
    for model, inputs, options, message in [
        (MLP(), torch.randn(3, 20), UNUSED, "prepare_for_backward"),
        (Embeddings(), tokens, {"sparse_params": []}, r"sparse.weight has a sparse gradient.*sparse_params"),
    ]:
        kept = make_reducer(model, **options)
        with pytest.raises(RuntimeError, match=message):
            loss_of(model(inputs)).backward()
        kept.close()


@pytest.mark.ranks(1)
def test_arguments(rank):
    model, no_member = MLP(), dist.GroupMember.NON_GROUP_MEMBER
    named = [*model.named_parameters()]
    refused = [
        (
            TypeError,
            model,
            "takes model.parameters() or model.named_parameters(), got an object of type Linear",
        ),
        (TypeError, dict(named), "got '0.weight'. Likely cause: the module itself"),
        (TypeError, model[0].weight, "got a tensor of shape (64, 20)"),
        (TypeError, model.parameters, "got an object of type method. Likely cause"),
        (TypeError, [(param, name) for name, param in named], "got an object of type tuple"),
        (TypeError, ["weight"], "got 'weight'"),
        (ValueError, [model[0].weight * 2], "number 0 is computed from other tensors"),
        (ValueError, iter([]), "used up by an optimizer: call it again"),
        (ValueError, MLP().requires_grad_(False).parameters(), "no parameter that requires gradients"),
    ]
    for wrapper in (nn.parallel.DistributedDataParallel(MLP()), DistributedDataParallel(MLP())):
        message = "in which a DistributedDataParallel averages gradients already: register the hook there"
        refused += [(ValueError, wrapper.named_parameters(), f"of a DistributedDataParallel {message}")]
        refused += [(ValueError, nn.Sequential(wrapper).parameters(), f"of a Sequential {message}")]
    for error, params, message in refused:
        with pytest.raises(error, match=re.escape(message)):
            Reducer(params)
    for cap in (None, "25", -1, float("nan")):
        with pytest.raises(ValueError, match=f"bucket_cap_mb is {cap!r}, but must be a number of at least 0"):
            Reducer(named, bucket_cap_mb=cap)
    with pytest.raises(TypeError, match=r"process_group, got -100\. .* this rank is not in the group"):
        Reducer(named, no_member)
    reducer = Reducer([model[0].weight, model[0].weight])
    assert len(reducer._params) == 1
    with pytest.raises(TypeError, match=r"must be callable\. .*: state and hook are swapped"):
        reducer.register_comm_hook(default_hooks.allreduce_hook, None)


def test_no_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        Reducer(MLP().parameters())


class Adapted(nn.Module):
    """This model has a frozen layer, and another one that never gets a gradient."""

    def __init__(self):
        super().__init__()
        self.base, self.head, self.never = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(2, 2)
        self.base.requires_grad_(False)
        self.never.requires_grad_(False)

    def forward(self, x):
        return self.head(self.base(x))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [PLAIN, UNUSED, STATIC], ids=str)
def test_parameters_that_are_unfrozen_later(rank, options):
    """The others are averaged all the same, and a Reducer constructed again averages the unfrozen ones."""
    torch.manual_seed(rank)  # gradients differ between the ranks
    model = Adapted()
    reducers = [make_reducer(model, **options)]
    model.base.bias.requires_grad_(True)
    model.never.requires_grad_(True)
    for number in range(2):
        model.zero_grad()
        outputs = model(torch.full((2, 3), rank + 1.0))
        for reducer in reducers:
            reducer.prepare_for_backward(outputs)
        if number:
            outputs.sum().backward()
        else:
            with pytest.raises(RuntimeError, match=r"^parameters base\.bias are not averaged, and have grad"):
                outputs.sum().backward()
            model.never.requires_grad_(False)
            reducers.append(make_reducer(model, **options))
        averaged = [model.head.weight, model.base.bias][: 1 + number]
        assert torch.equal(*of_all_ranks(torch.cat([each.grad.flatten() for each in averaged])))


@pytest.mark.ranks(2)
def test_a_rank_that_leaves_a_backward_out(rank):
    """tests/comm/test_missing_rank.py has ranks that end."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    model, store = MLP(), dist.distributed_c10d._get_default_store()
    kept = make_reducer(model, process_group=group)
    loss_of(model(torch.randn(3, 20))).backward()
    if rank == 1:
        store.wait(["rank 0 has ended"], timedelta(seconds=30))
        return
    with pytest.raises(
        RuntimeError, match=r"(?s)^rank 0 of 2 could not average bucket [01] with .*[Tt]imed? ?out"
    ) as raised:
        loss_of(model(torch.randn(3, 20))).backward()
    assert str(raised.value).endswith("Look for the first error in the output of the other ranks")
    kept.close()
    store.set("rank 0 has ended", "")


def holding(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def raising(state, bucket):
    raise ZeroDivisionError("in the hook")


@pytest.mark.ranks(1)
def test_hooks_that_are_wrong(rank):
    for hook, message in [
        (lambda state, bucket: bucket.buffer(), "returned Tensor, but must return a torch.futures.Future"),
        (lambda state, bucket: holding("text"), "holds str, but a bucket of 4355 elements must come back"),
        (lambda state, bucket: holding(bucket.buffer()[:-1]), "elements must come back"),
        (raising, "^in the hook$"),
    ]:
        model = MLP()
        reducer = make_reducer(model)
        reducer.register_comm_hook(None, hook)
        with pytest.raises((RuntimeError, ZeroDivisionError), match=message):
            loss_of(model(torch.randn(3, 20))).backward()
