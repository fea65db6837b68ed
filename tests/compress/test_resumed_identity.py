"""Test that a resumed run gives every layer its own error, or warns that it can't."""

import re
from functools import partial
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradcomp
from gradcomp.comm.bucket import GradBucket
from gradcomp.frameworks import CommHook
from gradcomp.hooks import DDPCommHookType
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.hooks.powersgd_runs import Messages, reload
from tests.kept import entry_of
from tests.training import Given

NUM_LAYERS, SIZE, STEPS = 8, 24, 6
HOOKS = {
    "PowerSGD": (lambda: PowerSGDState(None, 2, start_powerSGD_iter=2), powerSGD_hook),
    "int4": (lambda: QuantizationState(bits=4, block_size=32), quantization_hook),
}
SMALL, LARGE = 0.005, 25  # MB: two layers per bucket, or all layers in one


def register(model, how, state, hook, cap, find_unused):
    """Wrap the model, and register the hook. how: the wrapper, and who names the parameters."""
    if how == "Reducer":
        reducer = gradcomp.Reducer(model.named_parameters(), bucket_cap_mb=cap)
        reducer.register_comm_hook(state, hook)
        return model, reducer
    library = gradcomp.DistributedDataParallel if how == "gradcomp" else nn.parallel.DistributedDataParallel
    ddp = library(model, bucket_cap_mb=cap, find_unused_parameters=find_unused)
    if how == "torch, named":
        state.number_parameters(ddp.named_parameters())
    if how == "torch, CommHook":
        CommHook(state, hook).register(ddp)
    else:
        ddp.register_comm_hook(state, hook)
    return ddp, None


def train(rank, state, hook, steps, run):
    """Train with zero weights; return, by layer, Σ mean gradients, Σ averages, and this rank's errors."""
    model = Given(*[(SIZE, SIZE)] * NUM_LAYERS)
    for i, weight in enumerate(model.weights if run[1] == SMALL else ()):  # by columns, every other with gaps
        weight.data = torch.zeros(SIZE, SIZE + i % 2).t()[:SIZE]
    ddp, _reducer = register(model, run[0], state, hook, *run[1:])
    given, out = torch.zeros(2, NUM_LAYERS, SIZE, SIZE, dtype=torch.float64)
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        gradients = torch.randn(NUM_LAYERS, SIZE, SIZE, generator=generator)
        model.zero_grad()
        ddp(gradients).backward()
        given += gradients.double()
        out += torch.stack([weight.grad for weight in model.weights]).double()
    return given, out, torch.stack([entry_of(state, weight)["error"].double() for weight in model.weights])


def resumed(rank, first, second):
    """Resume a run with each hook. Returns, by hook, (each layer's loss, each layer's error, warnings)."""
    return [resumed_with(rank, make, hook, first, second) for make, hook in HOOKS.values()]


def resumed_with(rank, make, hook, first, second):
    state, later = make(), make()
    one = train(rank, state, hook, range(STEPS), first)
    with Messages("gradcomp") as said:
        later.load_state_dict(reload(state.state_dict()))
        two = train(rank, later, hook, range(STEPS, 2 * STEPS), second)
    lost = one[0] + two[0] - one[1] - two[1] - two[2]  # ours, summed over the ranks below
    held = one[2]
    for each in (lost, held):
        dist.all_reduce(each)
    warnings = [line for line in said if line.startswith("WARNING")]
    return lost.flatten(1).norm(dim=1), held.flatten(1).norm(dim=1), warnings


TORCH, NAMED, OURS = "torch", "torch, named", "gradcomp"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((TORCH, SMALL, True), (TORCH, SMALL, True)),
        ((TORCH, SMALL, False), (TORCH, LARGE, False)),
        ((NAMED, SMALL, True), (NAMED, LARGE, True)),
        ((NAMED, LARGE, True), ("torch, CommHook", SMALL, False)),
        ((OURS, SMALL, True), (NAMED, LARGE, False)),
        ((NAMED, LARGE, False), (OURS, LARGE, False)),
        ((OURS, SMALL, False), ("Reducer", LARGE, False)),
    ],
    ids=str,
)
def test_every_layer_gets_its_own_error(run_ranks, first, second):
    for lost, held, warnings in chain(*run_ranks(resumed, 2, first, second)):
        assert held.min() > 0.1
        assert lost.max() < 1e-4 * held.max()
        assert warnings == []


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((TORCH, SMALL, True), (TORCH, LARGE, True), "). They wait"),
        ((TORCH, LARGE, True), (TORCH, SMALL, True), "). They wait"),
        ((TORCH, SMALL, True), (TORCH, SMALL, False), "). They wait"),
        ((TORCH, LARGE, False), (OURS, LARGE, False), "first bucket 0"),
        ((OURS, LARGE, False), (TORCH, LARGE, False), "did not bring: weights."),
    ],
    ids=str,
)
def test_what_nobody_can_identify_is_dropped_with_a_warning(run_ranks, first, second, message):
    """Every layer loses its own error, and no layer gets another layer's error."""
    for lost, held, warnings in chain(*run_ranks(resumed, 2, first, second)):
        torch.testing.assert_close(lost, held, rtol=1e-4, atol=1e-4)
        (line,) = warnings
        assert message in line
        assert "state.number_parameters(model.named_parameters())" in line


@pytest.mark.usefixtures("group_of_one")
def test_a_power_sgd_type_knows_its_models_names():
    ddp, states = nn.parallel.DistributedDataParallel(nn.Linear(4, 4)), []
    ddp.register_comm_hook = lambda state, hook: states.append(state)
    DDPCommHookType.POWER_SGD.value(model=ddp, start_powerSGD_iter=2)
    assert states[0]._states.keys.known() == {"weight", "bias"}


def named_on_one_rank(rank):
    state = QuantizationState(bits=8)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(40, 40))
    if rank:
        state.number_parameters(ddp.named_parameters())
    ddp.register_comm_hook(state, quantization_hook)
    with pytest.raises(RuntimeError) as caught:
        ddp(torch.ones(2, 40)).sum().backward()
    return str(caught.value)


def test_names_on_one_rank_only_are_refused_on_every_rank(run_ranks):
    for message in run_ranks(named_on_one_rank, 2):
        assert "names of parameters (number_parameters gives them)[0] is null on rank 0 and " in message


def warned(saved, *steps, names=()):
    """Load a checkpoint into a new state, take steps, and return the keys of errors that a warning names.

    steps: called with the state.
    """
    state = HOOKS["int4"][0]()
    state.number_parameters(names)
    with Messages("gradcomp") as said:
        state.load_state_dict(reload(saved))
        for step in steps:
            step(state)
    lines = [line.partition("They wait")[0] for line in said if "the checkpoint" in line]
    return [
        key for line in lines for key in re.findall(r"average_\('.'\)|one|two|gone|first bucket \d", line)
    ]


def with_error(saved, name, error):
    """Return the state_dict with one more parameter."""
    parameters = {**saved["parameters"], name: {"error": error}}
    return saved | {"parameters": parameters, "num_parameters": len(parameters)}


def claimed_later(rank):
    """Resume where some entries have no parameter in the first step; return the warnings, by case."""

    def average(key, state):
        gradcomp.average_([random(SIZE, SIZE)], quantization_hook, state, keys=[key])

    def bring(parameter, state):
        quantization_hook(state, GradBucket(0, random(parameter.numel()), [parameter], is_last=True)).wait()

    def random(*shape):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))

    def saved_after(steps, names=()):
        state = HOOKS["int4"][0]()
        state.number_parameters(names)
        for step in steps:
            step(state)
        return state.state_dict()

    one, two = torch.zeros(SIZE, SIZE), torch.zeros(SIZE + 1, SIZE)
    names = [("one", one), ("two", two)]
    by_key = saved_after([partial(average, key) for key in "abab"])
    unnamed = saved_after([partial(bring, each) for each in (one, two, one)])
    named = saved_after([partial(bring, each) for each in (one, two)], names)
    found = {
        "keys in their own time": warned(by_key, *(partial(average, key) for key in "bbab")),
        "other keys": warned(by_key, *(partial(average, key) for key in "xxy")),
        "a part of an unnamed model": warned(unnamed, *(partial(bring, each) for each in (one, two, one))),
        "another unnamed model": warned(unnamed, partial(bring, two), partial(bring, two)),
        "a layer that isn't used": warned(named, partial(bring, one), names=names),
    }
    gone = {"zeros of a layer that is gone": torch.zeros(3), "a layer that is gone": torch.ones(3)}
    for name, error in gone.items():
        found[name] = warned(with_error(named, "gone", error), partial(bring, one), names=names)
    other_shape = with_error(saved_after([]), "one", torch.zeros(5))
    found["zeros of another shape"] = warned(other_shape, *[partial(bring, one)] * 2, names=names[:1])
    return found


def test_only_what_is_lost_is_warned_of(run_ranks):
    for found in run_ranks(claimed_later, 2):
        lost = {"other keys": 2, "another unnamed model": 2, "a layer that is gone": 1}
        for name, keys in found.items():
            assert len(keys) == lost.get(name, 0), (name, keys)
