"""Test that PowerSGD continues when buckets are rearranged; tests/compress has resumed runs of all states."""

import copy

import pytest
import torch

from gradcomp.comm.bucket import GradBucket
from gradcomp.hooks import powerSGD_hook
from tests.hooks.powersgd_oracle import random_gradient
from tests.hooks.powersgd_runs import FEW_SHAPES, HOOKS, OTHER_SHAPES, START, Messages, new_state, run_steps
from tests.kept import error_in


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
