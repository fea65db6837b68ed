"""Test that PowerSGD resumes bitwise in a new DDP model, and continues when buckets are rearranged."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.comm.bucket import GradBucket
from gradcomp.hooks import powerSGD_hook
from tests.depth import mixed
from tests.devices import device_of_rank
from tests.hooks.powersgd_oracle import random_gradient
from tests.hooks.powersgd_runs import (
    FEW_SHAPES,
    HOOKS,
    OTHER_SHAPES,
    RESUMED,
    START,
    Messages,
    new_state,
    run_steps,
)
from tests.hooks.test_default_hooks import Net, backward
from tests.kept import error_in
from tests.reducer.models import run_cases
from tests.training import parameters_of


class Alike(nn.Sequential):
    """This model's layers have one shape and one bucket. DDP reverses their order after the first step."""

    def __init__(self, unused):
        super().__init__(nn.Flatten(), *(nn.Linear(64, 64, bias=False) for _ in range(5)))


def make_trainer(rank, hook, state, net, options, wrapper=DistributedDataParallel):
    torch.manual_seed(1)
    unused = options.get("find_unused_parameters", False)
    cap = 0.02 if net is Net else 1
    model = wrapper(net(unused).to(device_of_rank()), bucket_cap_mb=cap, **options)
    indices = []

    def recorded(state, bucket):
        indices.append(bucket.index())
        return HOOKS[hook](state, bucket)

    model.register_comm_hook(state, recorded)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), indices


def continue_training(rank, model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad(set_to_none=True)
        backward(model, rank, step)
        optimizer.step()


def interrupt(rank, hook, options, warm_up, net=Net, after=6, wrapper=DistributedDataParallel):
    """Train 12 steps, then the steps from `after` on again, from this rank's checkpoint.

    warm_up: load the state after a step of the new model, not before.
    Returns (number of buckets, log lines with "afresh", the parameters of both runs).
    """
    state = new_state()
    model, optimizer, indices = make_trainer(rank, hook, state, net, options, wrapper)
    continue_training(rank, model, optimizer, range(after))
    with Messages():
        checkpoint = {
            "model": copy.deepcopy(model.state_dict()),
            "optimizer": copy.deepcopy(optimizer.state_dict()),
            "comm_hook_state": state,
        }
        file = io.BytesIO()
        torch.save(checkpoint, file)
    continue_training(rank, model, optimizer, range(after, 12))
    with Messages():
        file.seek(0)
        checkpoint = torch.load(file)
    resumed_state = checkpoint["comm_hook_state"]
    if warm_up:
        saved, resumed_state = resumed_state.state_dict(), new_state()
    resumed, resumed_optimizer, _ = make_trainer(rank, hook, resumed_state, net, options, wrapper)
    if warm_up:
        # DDP arranges its buckets once, in this step.
        continue_training(rank, resumed, resumed_optimizer, [0])
        resumed(torch.zeros(1, 1, 8, 8, device=device_of_rank()))
        resumed_state.load_state_dict(saved)
    resumed.load_state_dict(checkpoint["model"])
    resumed_optimizer.load_state_dict(checkpoint["optimizer"])
    with Messages() as said:
        continue_training(rank, resumed, resumed_optimizer, range(after, 12))
    afresh = [line for line in said if "at zero" in line]
    return max(indices) + 1, afresh, parameters_of(model), parameters_of(resumed)


UNUSED = {"find_unused_parameters": True}
# interrupt's arguments: in a new model's first step, DDP puts all gradients in one bucket.
CASES = [
    *((hook, {}, False) for hook in RESUMED),
    # A state remembers its buckets before there are errors in them.
    *(("powerSGD", {}, False, Net, after) for after in (1, START, START + 1)),
    # In the first step the gradients of layers of one shape come in another order. Shapes don't show it.
    ("powerSGD", {}, False, Alike),
    # With find_unused_parameters DDP never rearranges its buckets. load_state_dict is called after DDP has
    # arranged its buckets.
    *((hook, *case) for hook, case in mixed(RESUMED, ((UNUSED, False), ({}, True)))),
    *(("powerSGD", {}, warm_up, Net, 6, gradcomp.DistributedDataParallel) for warm_up in (False, True)),
]


def assert_resumed(ranks, case):
    for buckets, afresh, uninterrupted, resumed in ranks:
        assert buckets >= (1 if Alike in case else 5), case
        assert afresh == [], case
        assert torch.equal(uninterrupted, ranks[0][2]), case
        assert torch.equal(resumed, ranks[0][3]), case
        # A new model's first step has one bucket: its sums have another order than several buckets' sums,
        # which 16 bits make larger; a square of other tensors has other directions.
        is_near = UNUSED in case or Alike in case or case[0] == "powerSGD"
        assert torch.allclose(resumed, uninterrupted, atol=1e-5 if is_near else 5e-3), case


def test_a_resumed_run_goes_on_where_it_was(run_ranks):
    ranks = run_ranks(run_cases, 2, interrupt, CASES)
    for case, results in zip(CASES, zip(*ranks, strict=True), strict=True):
        assert_resumed(results, case)


def resume_in_other_buckets(rank, hook, options, first):
    """Resume a run of three named matrices. first: the buckets of a run's first step.

    Returns the averages of both runs' later steps.
    """
    shapes = dict(zip("abc", [(16, 12), (12, 16), (17, 10)], strict=True))

    def run(state, steps):
        parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
        state.number_parameters(parameters.items())
        averages, saved = {}, {}
        for step in steps:
            saved[step] = copy.deepcopy(state.state_dict())
            order = first if step == steps[0] else ["cab"]
            for index, names in enumerate(order):
                parts = [random_gradient([shapes[name]], rank, 10 * step + ord(name)) for name in names]
                own = [parameters[name] for name in names]
                given = GradBucket(index, torch.cat(parts), own, is_last=names == order[-1])
                parts = HOOKS[hook](state, given).wait().split([each.numel() for each in parts])
                averages |= {(step, name): part for name, part in zip(names, parts, strict=True)}
        return torch.cat([averages[step, name] for step in range(3, 5) for name in shapes]), saved

    expected, saved = run(new_state(**options), range(5))
    resumed = new_state(**options)
    resumed.load_state_dict(saved[3])
    return expected, run(resumed, range(3, 5))[0]


RANDOM = {"warm_start": False}


@pytest.mark.parametrize(
    ("hook", "options", "first", "interpret"),
    [("powerSGD", RANDOM, ["ba", "c"], False), ("powerSGD", RANDOM, ["ba", "c"], True)],
)
def test_directions_belong_to_names(run_ranks, hook, options, first, interpret):
    """Neither the first step's buckets of a resumed run nor their order change directions."""
    for expected, found in run_ranks(resume_in_other_buckets, 2, hook, options, first, interpret=interpret):
        assert expected.any()
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("is_named", "messages"),
    [
        (
            True,
            [
                "has other shapes of parameter 2, whose",  # vectors have no errors
                "did not bring: parameter 3.",
            ],
        ),
        (
            False,
            ["the checkpoint has errors of parameters that the first step did not bring: #0 of first bucket"],
        ),
    ],
)
def test_a_checkpoint_of_another_layout_starts_afresh(rank, is_named, messages):
    """Load a checkpoint of another layout."""

    def average(state, shapes, steps):
        parameters = [torch.zeros(shape) for shape in shapes]
        if is_named:
            state.number_parameters((f"parameter {i}", each) for i, each in enumerate(parameters))
        buffers = [random_gradient(shapes, rank, step) for step in steps]
        buckets = [GradBucket(0, buffer, parameters, is_last=True) for buffer in buffers]
        return [powerSGD_hook.powerSGD_hook(state, bucket).wait() for bucket in buckets]

    state, other = new_state(), new_state()
    average(state, FEW_SHAPES, range(START + 2))
    other.load_state_dict(state.state_dict())
    with Messages() as said:
        outputs = average(other, OTHER_SHAPES, [50, 51])
    error = error_in(other)
    assert all(message in line for message, line in zip(messages, said, strict=True)), said
    assert all(output.any() and output.isfinite().all() for output in outputs)
    assert error.numel() > outputs[0].numel(), "the errors without a parameter wait"


@pytest.mark.simulated_ranks(1)
def test_a_changed_rank_has_new_directions(rank):
    """Raise the rank between steps, so that the factors no longer fit."""
    state = new_state()
    run_steps(state, rank, range(START + 2))
    state.matrix_approximation_rank = 4
    with Messages() as said:
        (output,) = run_steps(state, rank, [50])
    said, found = list(said), torch.linalg.matrix_rank(output[: 64 * 48].view(64, 48))
    assert not any("zero" in line for line in said)
    assert found == 4
