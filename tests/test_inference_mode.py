"""Test that what is made in torch.inference_mode() works in later steps, or is refused by name."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradcomp
from gradcomp.compress import Recorder
from gradcomp.fsdp import compress_reduce_scatter, compress_replicas
from gradcomp.hooks import AutoState, QuantizationState, auto_hook, quantization_hook
from gradcomp.hooks.default_hooks import bf16_compress_hook
from gradcomp.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradcomp.local_steps import LocalSteps
from gradcomp.reducer import GradBucket, Reducer
from tests.fsdp.models import new_grid
from tests.test_defaults import drawn

HOOKS = {
    "none": (lambda: None, None),
    "bf16": (lambda: None, bf16_compress_hook),
    "int4": (partial(QuantizationState, None, 4, start_iter=2), quantization_hook),
    "nodes": (partial(QuantizationState, None, 8, start_iter=2, ranks_per_node=2), quantization_hook),
    "PowerSGD": (partial(PowerSGDState, None, 2, 2), powerSGD_hook),
    "batched, int8": (partial(PowerSGDState, None, 2, 2, factor_dtype=torch.int8), batched_powerSGD_hook),
    "auto": (partial(AutoState, None, ("int4", "powersgd:2"), start_iter=2), auto_hook),
}


def in_average(name, rank, mode):
    """Average before, in and after inference mode: normal tensors, inference tensors and both in one call."""
    make_state, hook = HOOKS[name]
    state, found = make_state(), []
    for number in range(12):
        with mode() if number % 4 >= 2 else nullcontext():
            made = drawn((12, 33), number, rank), drawn((7, 4), number, rank, 1).t()
        with mode() if number // 4 == 1 else nullcontext():
            found += gradcomp.average_([*made, drawn((5,), number, rank)], hook, state)
    return found


class Validated(nn.Module):
    """A model that makes a buffer anew in every evaluation, as caches of rotary embeddings are."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.layers = nn.Sequential(nn.Linear(12, 30), nn.BatchNorm1d(30), nn.Linear(30, 4))
        self.register_buffer("angles", torch.zeros(4))

    def forward(self, x):
        if not torch.is_grad_enabled():
            self.angles = x[0, :4].clone()
        return self.layers(x) * (1 + self.angles)


def trained(model, forward, rank, num_steps=4):
    found = []
    for number in range(num_steps):
        model.zero_grad()
        forward(drawn((6, 12), number, rank)).square().mean().backward()
        found += [getattr(each.grad, "_local_tensor", each.grad).clone() for each in model.parameters()]
    return found


def wrapped(options, rank, mode):
    """Wrap and validate in inference mode; train; validate again."""
    state, model = QuantizationState(None, 4, start_iter=2), Validated(rank)
    with mode(), torch.no_grad():
        ddp = gradcomp.DistributedDataParallel(model, **options)
        ddp.register_comm_hook(state, quantization_hook)
        ddp(drawn((6, 12), 9, rank))
    found = trained(model, ddp, rank)
    with mode(), torch.no_grad():
        ddp(drawn((6, 12), 8, rank))
    return [*found, *trained(model, ddp, rank), *(each.clone() for each in model.buffers())]


def on_reducer(options, rank, mode):
    """Construct in inference mode. One rank's unused parameters have gradients that were made in it."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(12, 4), nn.Linear(12, 4)])
    with mode():
        reducer = Reducer(model.named_parameters(), find_unused_parameters=True, **options)
    found = []
    for number in range(3):
        model.zero_grad()
        if not rank:
            with mode():
                made = [drawn(each.shape, number, 5) for each in model[1].parameters()]
            for param, gradient in zip(model[1].parameters(), made, strict=True):
                param.grad = gradient
        x = drawn((6, 12), number, rank)
        outputs = model[0](x) + (model[1](x) if rank else 0)
        reducer.prepare_for_backward(outputs)
        outputs.square().sum().backward()
        assert not any(each.grad.is_inference() for each in model.parameters())
        found += [each.grad.clone() for each in model.parameters()]
    return found


def with_changes_between_steps(name, rank, mode):
    """Scale, save, load, copy and restore errors in inference mode; record."""
    make_state, hook = HOOKS[name]
    with mode():
        state = make_state()
        recorder = Recorder(state)

    def steps(first):
        return [
            each
            for number in range(first, first + 4)
            for each in gradcomp.average_([drawn((12, 33), number, rank)], hook, state, keys=["a"])
        ]

    found = steps(0)
    with mode():
        state.rescale_errors(0.5)
    found += steps(4)
    with mode():
        state.rescale_errors(2.0)
        state.load_state_dict(state.state_dict())
        saved, state = state.state_dict(), copy.deepcopy(state)
        recorder.complete()
        state.number_parameters([])
    found += steps(8)
    state.load_state_dict(saved)
    state.rescale_errors(0.5)
    state.keep_undo = True
    found += steps(12)
    with mode():
        state.undo_step()
    norms = [torch.tensor([row["relative_error"] or 0.0 for row in recorder.rows()])]
    return found + steps(16) + norms


def in_local_steps(rank, mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 30), nn.Linear(30, 4))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with mode():
        state = QuantizationState(None, 4, start_iter=2)
        local_steps = LocalSteps(model, None, 2, quantization_hook, state, delay=1)
    for number in range(10):
        model.zero_grad()
        model(drawn((6, 12), number, rank)).square().mean().backward()
        inner.step()
        with mode() if number % 3 else nullcontext():
            local_steps.step()
            if number % 3 == 2:
                local_steps.load_state_dict(local_steps.state_dict())
    with mode():
        local_steps.join()
    return [each.detach().clone() for each in model.parameters()]


def on_fsdp(shape, rank, mode):
    torch.manual_seed(0)
    model, grid = nn.Sequential(nn.Linear(12, 30), nn.Linear(30, 4)), new_grid(*shape)
    for layer in (*model, model):
        fully_shard(layer, mesh=grid.shards)
    with mode():
        state = QuantizationState(None, 4, start_iter=2)
        if shape == (1, 2):
            compress_reduce_scatter(model, state)
        else:
            compress_replicas(model, grid.replicas, state)
    return trained(model, model, rank)


CASES = {
    **{f"average_, {name}": partial(in_average, name) for name in HOOKS},
    "the wrapper": partial(wrapped, {}),
    "the wrapper, views": partial(wrapped, {"gradient_as_bucket_view": True, "static_graph": True}),
    "the Reducer": partial(on_reducer, {}),
    "the Reducer, views": partial(on_reducer, {"gradient_as_bucket_view": True}),
    **{f"changes, {name}": partial(with_changes_between_steps, name) for name in ("int4", "PowerSGD")},
    "LocalSteps": in_local_steps,
    "compress_reduce_scatter": partial(on_fsdp, (1, 2)),
    "compress_replicas": partial(on_fsdp, (2, 1)),
}


@pytest.mark.ranks(2)
def test_what_is_made_in_inference_mode_works_outside(rank):
    for name, case in CASES.items():
        assert all(map(torch.equal, case(rank, torch.inference_mode), case(rank, nullcontext))), name


@pytest.mark.ranks(1)
def test_refusals(rank):
    """Parameters made in inference mode, and hooks in it or on its buckets, are refused by name."""
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(3, 3))
        buffer = torch.ones(9)
    bucket = GradBucket(4, torch.ones(9), [nn.Parameter(torch.zeros(9))], is_last=True)
    made = GradBucket(4, buffer, bucket.parameters(), is_last=True)
    state, hook = QuantizationState(), quantization_hook
    for construct in (
        lambda: Reducer(model.named_parameters()),
        lambda: gradcomp.DistributedDataParallel(model),
    ):
        with pytest.raises(
            RuntimeError, match=r"parameter 0.weight was made in torch.inference_mode\(\), so"
        ):
            construct()
    for call in (
        lambda: torch.inference_mode()(hook)(state, bucket),
        lambda: hook(state, made),
        lambda: bf16_compress_hook(None, made),
    ):
        with pytest.raises(
            RuntimeError, match=r"_hook can't average bucket 4 in torch.inference_mode\(\), or"
        ):
            call()
