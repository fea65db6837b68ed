"""Test that PowerSGD continues from a state of torch's hook."""

import copy
import pickle

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

from gradcomp.hooks import powerSGD_hook
from tests.hooks.powersgd_oracle import (
    Bucket,
    compressed,
    positions,
    random_gradient,
    relative,
)
from tests.hooks.powersgd_runs import (
    COMMON,
    FEW_SHAPES,
    SHAPES,
    START,
    Messages,
    equal,
    new_state,
    reload,
    run_steps,
    step_of_both,
)
from tests.hooks.test_default_hooks import backward
from tests.hooks.test_powersgd_resume import Alike
from tests.tolerances import (
    MEAN_ERROR,
    ONE_STEP,
)


def test_from_torch_without_warm_start_keeps_the_errors(run_ranks):
    """There are no factors to continue from: the next projections differ, but the errors are equal."""
    options = {"matrix_approximation_rank": 2, "warm_start": False}
    mask = positions(SHAPES, compressed(SHAPES, 2))
    ranks = run_ranks(step_of_both, 2, options, SHAPES, 3)
    outputs = torch.stack([ours[0].double() for _, ours, _ in ranks]).mean(0)
    after = torch.stack([ours[1].double() for _, ours, _ in ranks]).mean(0)
    owed = torch.stack([gradient.double() + theirs[1].double() for gradient, _, theirs in ranks]).mean(0)
    assert relative((outputs + after)[mask], owed[mask]) <= ONE_STEP


def test_from_torch_without_error_feedback_keeps_the_factors(run_ranks):
    options = {"matrix_approximation_rank": 2, "use_error_feedback": False}
    for _, (our_output, our_error, _), (their_output, _, _) in run_ranks(step_of_both, 2, options, SHAPES, 3):
        assert relative(our_output, their_output) <= ONE_STEP
        assert not our_error.any()


def test_from_torch_that_compressed_vectors(run_ranks):
    """With min_compression_rate below 1 torch "compresses" vectors too. gradcomp averages them."""
    options = {"matrix_approximation_rank": 2, "min_compression_rate": 0.5}
    mask = positions(SHAPES, compressed(SHAPES, 2, 0.5))
    for _, (ours, _, _), (theirs, _, _) in run_ranks(step_of_both, 2, options, SHAPES, 3):
        assert relative(ours[mask], theirs[mask]) <= ONE_STEP


def take_over(rank, saved):
    """Convert torch's state, or a file of it; return hyperparameters, progress, and the next steps."""
    theirs = torch_powersgd.PowerSGDState(
        None, 2, START, min_compression_rate=1.5, orthogonalization_epsilon=1e-9
    )
    for step in range(START + 3):
        bucket = Bucket(random_gradient(FEW_SHAPES, rank, step), FEW_SHAPES)
        torch_powersgd.powerSGD_hook(theirs, bucket).wait()
    ours = powerSGD_hook.from_torch(pickle.loads(pickle.dumps(theirs)) if saved else copy.deepcopy(theirs))
    facts = [(getattr(ours, name), getattr(theirs, name)) for name in COMMON]
    again, later = new_state(), new_state()
    again.load_state_dict(reload(ours.state_dict()))
    once_more = powerSGD_hook.from_torch(copy.deepcopy(theirs))
    run_steps(once_more, rank, [48])
    later.load_state_dict(reload(once_more.state_dict()))
    with Messages():
        whole = reload(ours)
    with Messages() as said:
        # The first step is a plain all-reduce.
        outputs = [run_steps(each, rank, [49, 50, 51])[1:] for each in (ours, again, later, whole)]
    gradient = random_gradient(FEW_SHAPES, rank, 50)
    expected = torch_powersgd.powerSGD_hook(theirs, Bucket(gradient, FEW_SHAPES)).wait()
    return facts, said, outputs, expected


@pytest.mark.parametrize("saved", [False, True])
def test_from_torch(run_ranks, saved):
    for facts, said, outputs, expected in run_ranks(take_over, 2, saved):
        assert all(ours == theirs for ours, theirs in facts)
        assert said == []
        assert all(equal(each, outputs[0]) for each in outputs), "not the same through a state_dict"
        assert relative(outputs[0][0], expected) <= 10 * MEAN_ERROR


def consolidate_torchs(rank):
    """Return the errors of torch's state, the converted state's state_dict, and the consolidated one."""
    theirs = torch_powersgd.PowerSGDState(None, 2, START)
    for step in range(START + 3):
        bucket = Bucket(random_gradient(FEW_SHAPES, rank, step), FEW_SHAPES)
        torch_powersgd.powerSGD_hook(theirs, bucket).wait()
    ours = powerSGD_hook.from_torch(theirs)
    consolidated = powerSGD_hook.consolidated_state_dict(ours)
    return theirs.error_dict[0], ours.state_dict(), consolidated


def test_torchs_errors_are_averaged_before_their_first_compressed_step(run_ranks):
    ranks = run_ranks(consolidate_torchs, 2)
    mean = torch.stack([error.double() for error, *_ in ranks]).mean(0)
    averaged = powerSGD_hook.average_errors([state_dict for _, state_dict, _ in ranks])
    for merged in (averaged, *(consolidated for *_, consolidated in ranks)):
        assert relative(merged["from_torch"][0]["error"], mean) <= MEAN_ERROR
        directions = ranks[0][1]["from_torch"][0]["directions"]
        assert equal(merged["from_torch"][0]["directions"], directions)


def from_torch_twice(rank):
    """Convert a state twice. torch overwrites its Q in place; the converted state must not change."""
    theirs = torch_powersgd.PowerSGDState(None, 2, START)
    for step in range(START + 3):
        torch_powersgd.powerSGD_hook(
            theirs, Bucket(random_gradient(FEW_SHAPES, rank, step), FEW_SHAPES)
        ).wait()
    alone = powerSGD_hook.from_torch(copy.deepcopy(theirs))
    shared = powerSGD_hook.from_torch(theirs)
    torch_powersgd.powerSGD_hook(theirs, Bucket(random_gradient(FEW_SHAPES, rank, 77), FEW_SHAPES)).wait()
    return [run_steps(each, rank, [49, 50]) for each in (alone, shared)]


def test_from_torch_copies(run_ranks):
    for alone, shared in run_ranks(from_torch_twice, 1):
        assert equal(alone, shared)


def unused_layer(rank, factor_rank, bad):
    """Convert torch's state after gradients of zero or NaN in the second matrix; return our next output."""
    options = {"process_group": None, "matrix_approximation_rank": factor_rank, "start_powerSGD_iter": START}
    theirs, shapes = (
        torch_powersgd.PowerSGDState(**options, orthogonalization_epsilon=1e-8),
        [(64, 48), (30, 20)],
    )
    for step in range(START + 3):
        gradient = random_gradient(shapes, rank, step)
        gradient[64 * 48 :] = bad
        torch_powersgd.powerSGD_hook(theirs, Bucket(gradient, shapes)).wait()
    ours = powerSGD_hook.from_torch(theirs, wait_for_buckets=False)
    return powerSGD_hook.powerSGD_hook(ours, Bucket(random_gradient(shapes, rank, 50), shapes)).wait()


@pytest.mark.parametrize("factor_rank", [1, 4])
@pytest.mark.parametrize("bad", [0.0, float("nan")])
def test_from_torch_where_factors_are_no_use(run_ranks, factor_rank, bad):
    for output in run_ranks(unused_layer, 1, factor_rank, bad):
        assert output[: 64 * 48].isfinite().all()
        # With NaN, torch's error is NaN, and so is the first output.
        assert bad or output[64 * 48 :].isfinite().all()
        assert output[: 64 * 48].any()


def continue_in_ddp(rank):
    """Train a model with torch's hook, and a new model that continues from its state.

    Returns each model's gradients in one step, and the log lines about layouts.
    """

    def gradients(model, step):
        model.zero_grad(set_to_none=True)
        backward(model, rank, step)
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    def make(state, hook):
        torch.manual_seed(1)
        model = DistributedDataParallel(Alike(False))
        model.register_comm_hook(state, hook)
        return model

    theirs = torch_powersgd.PowerSGDState(None, 2, START, orthogonalization_epsilon=1e-8)
    model = make(theirs, torch_powersgd.powerSGD_hook)
    for step in range(START + 3):
        gradients(model, step)
    with Messages() as said:
        resumed = make(powerSGD_hook.from_torch(copy.deepcopy(theirs)), powerSGD_hook.powerSGD_hook)
        gradients(resumed, 50)
        return gradients(model, 51), gradients(resumed, 51), [line for line in said if "layout" in line]


def test_from_torch_in_a_new_model(run_ranks):
    """The model's layers have one shape and one bucket. DDP reverses their order after the first step."""
    for expected, found, said in run_ranks(continue_in_ddp, 2):
        assert relative(found, expected) <= 10 * MEAN_ERROR
        assert said == []


@pytest.mark.parametrize("wrong", [{}, None])
def test_from_torch_of_something_else(wrong):
    with pytest.raises(TypeError, match="from_torch takes a PowerSGDState of torch's, got"):
        powerSGD_hook.from_torch(wrong)
