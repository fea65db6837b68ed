"""Test that torch's default dtype and device change nothing that gradcomp computes.

Models and inputs name their dtype and device. "meta" stands for a GPU beside CPU tensors.
"""

from contextlib import contextmanager
from functools import partial
from itertools import cycle

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

import gradcomp
from gradcomp.compress import Recorder
from gradcomp.fsdp import compress_reduce_scatter, compress_replicas
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradcomp.local_steps import LocalSteps
from tests.depth import everyday
from tests.fsdp.models import new_grid
from tests.hooks.checked import HOOKS
from tests.reducer.models import make_reducer

EXACTLY = {"dtype": torch.float32, "device": "cpu"}
NUM_STEPS = 4  # two of them plain


@contextmanager
def default(value):
    """Make this dtype or device the default; None changes nothing."""
    if isinstance(value, torch.dtype):
        torch.set_default_dtype(value)
    elif value is not None:
        torch.set_default_device(value)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def drawn(shape, *key):
    seed = sum(part * 101**place for place, part in enumerate(key))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **EXACTLY)


def net(rank):
    """Return a model with buffers of two dtypes. Ranks begin with other weights."""
    layers = [nn.Linear(n, m, **EXACTLY) for n, m in [(24, 40), (40, 33), (33, 8)]]
    model = nn.Sequential(*layers, nn.BatchNorm1d(8, **EXACTLY))
    with torch.no_grad():
        for index, each in enumerate(model.parameters()):
            each.copy_(drawn(each.shape, index, rank) / 8)
    return model


def steps_of(model, forward, rank, defaults, after=lambda number: None):
    """Return the gradients of some steps. defaults: of each step."""
    found = []
    for number in range(NUM_STEPS):
        with default(defaults[number]):
            model.zero_grad()
            forward(drawn((6, 24), number, rank)).square().mean().backward()
            after(number)
        found += [getattr(each.grad, "_local_tensor", each.grad).clone() for each in model.parameters()]
    return found


def with_hook(check, wrap, rank, defaults):
    with default(defaults[0]):
        model = net(rank)
        averager = wrap(model)
        if hook := check.make():
            averager.register_comm_hook(check.make_state and check.make_state(), hook)
    return steps_of(model, averager if isinstance(averager, nn.Module) else model, rank, defaults)


def on_torch(model):
    return TorchsDDP(model, bucket_cap_mb=0.005)


def on_wrapper(model):
    return gradcomp.DistributedDataParallel(model, bucket_cap_mb=0.005, find_unused_parameters=True)


def with_sparse_gradients(rank, defaults):
    """A sparse gradient, and parameters that one rank leaves out."""
    table = nn.Embedding(30, 33, sparse=True, _weight=drawn((30, 33)))
    head, found = net(0)[2], []
    model = nn.ModuleList([table, head])
    with default(defaults[0]):
        reducer = make_reducer(model, find_unused_parameters=True, sparse_params=[table.weight])
    for number in range(NUM_STEPS):
        with default(defaults[number]):
            model.zero_grad()
            tokens = torch.tensor([number, rank], dtype=torch.int64, device="cpu")
            outputs = table(tokens) if rank and number % 2 else head(table(tokens))
            reducer.prepare_for_backward(outputs)
            outputs.square().sum().backward()
        found += [each.grad.to_dense().clone() for each in model.parameters() if each.grad is not None]
    return found


def with_recorder(rank, defaults):
    model = net(0)
    with default(defaults[0]):
        state = QuantizationState(None, 4, start_iter=2)
        recorder, reducer = Recorder(state), make_reducer(model)
        reducer.register_comm_hook(state, quantization_hook)
    steps_of(model, model, rank, defaults)
    with default(defaults[1]):
        recorder.complete()
        rows = recorder.rows()
    return [[row[name] for name in ("error_norm", "relative_error", "mean_norm")] for row in rows]


def with_local_steps(rank, defaults):
    model = net(rank)
    with default(defaults[0]):
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        state = PowerSGDState(None, 2, start_powerSGD_iter=2)
        local_steps = LocalSteps(model, outer, 1, powerSGD_hook, state)

    def after(number):
        inner.step()
        local_steps.step()

    steps_of(model, model, rank, defaults, after)
    return [each.detach() for each in model.parameters()]


def on_fsdp(shape, rank, defaults):
    model = net(rank)[:3]
    with default(defaults[0]):
        grid = new_grid(*shape)
        for layer in (*model, model):
            fully_shard(layer, mesh=grid.shards)
        state = QuantizationState(None, 4, start_iter=2)
        if shape == (1, 2):
            compress_reduce_scatter(model, state)
        else:
            compress_replicas(model, grid.replicas, state)
    return steps_of(model, model, rank, defaults)


AVERAGERS = {"torch's DDP": on_torch, "the Reducer": make_reducer, "the wrapper": on_wrapper}
CASES = {
    # In turns: each hook computes alike on all of them.
    **{
        f"{name} on {averager}": partial(with_hook, check, AVERAGERS[averager])
        for (name, check), averager in zip(HOOKS.items(), cycle(AVERAGERS))
    },
    "compress_reduce_scatter": partial(on_fsdp, (1, 2)),
    "compress_replicas": partial(on_fsdp, (2, 1)),
    "sparse gradients": with_sparse_gradients,
    "Recorder": with_recorder,
    "LocalSteps": with_local_steps,
}


def changed_by(rank, one, other):
    """Return the cases that two defaults in turns change: from the first step on, or from the second on."""
    changed = []
    for name, case in CASES.items():
        # In the new process, the first run makes all that is kept per process.
        always = case(rank, [one, other, one, other])
        later = case(rank, [None, one, other, None])
        never = case(rank, [None] * NUM_STEPS)
        changed += [f"{name}, always"] * (not are_equal(always, never))
        changed += [f"{name}, later"] * (not are_equal(later, never))
    return changed


def are_equal(found, expected):
    def is_equal(one, other):
        is_tensor = isinstance(one, torch.Tensor)
        return one.dtype == other.dtype and torch.equal(one, other) if is_tensor else one == other

    return len(found) == len(expected) and all(map(is_equal, found, expected))


@pytest.mark.parametrize(
    "defaults",
    everyday(
        [(torch.float64, torch.float16), ("meta", "meta")],
        [(torch.float64, torch.float64), (torch.bfloat16, torch.float16), ("meta", "meta")],
    ),
    ids=str,
)
def test_defaults_change_nothing(run_ranks, defaults):
    assert run_ranks(changed_by, 2, *defaults) == [[], []]
