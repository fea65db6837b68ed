"""Test PowerSGD's hooks on the Triton kernels (on a GPU, or interpreted), with real processes."""

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp.hooks import powerSGD_hook
from gradcomp.kernels.powersgd import plan as powersgd_plan
from tests.depth import everyday
from tests.devices import device_of_rank
from tests.hooks.powersgd_oracle import Bucket, compressed, powersgd_step, random_gradient, relative
from tests.hooks.powersgd_runs import HOOKS, START, equal, new_state, reload
from tests.kept import directions_in, error_in
from tests.ranks import of_all_ranks
from tests.tolerances import ONE_STEP
from tests.training import drawn, gradients_of, train

SMALL_SHAPES = ((24, 18), (7,), (20, 30), (24, 18), (3, 3))  # the interpreter is slow


def memory_of(state):
    """Return a bucket's error and directions from a checkpoint."""
    return error_in(state).cpu(), [direction.cpu() for direction in directions_in(state)]


@pytest.mark.ranks(2, interpret=True)
def test_steps_as_the_oracles(rank):
    num_steps = 3
    state, results = new_state(), []
    for step in range(START + num_steps):
        gradient = random_gradient(SMALL_SHAPES, rank, step)
        bucket = Bucket(gradient.clone().to(device_of_rank()), SMALL_SHAPES)
        output = powerSGD_hook.powerSGD_hook(state, bucket).wait()
        if step >= START:
            results.append((gradient, output.cpu(), memory_of(state)))
    (known,) = state._states._buckets
    ranks = of_all_ranks((results, isinstance(known.compressor.plan, powersgd_plan.PowerSGDPlan)))
    assert [is_on_kernels for _, is_on_kernels in ranks] == [True, True]
    order = compressed(SMALL_SHAPES, 2)
    for step in range(1, 3):
        gradients = [results[step][0] for results, _ in ranks]
        before = [results[step - 1][2] for results, _ in ranks]
        errors, directions = [error for error, _ in before], before[0][1]
        expected = powersgd_step(SMALL_SHAPES, gradients, errors, directions, order)
        for (results, _), error in zip(ranks, expected.errors, strict=True):
            assert torch.equal(results[step][1], ranks[0][0][step][1])
            assert relative(results[step][1], expected.output) <= ONE_STEP
            assert relative(results[step][2][0], error) <= ONE_STEP


@pytest.mark.ranks(2, interpret=True)
@pytest.mark.parametrize("hook", everyday(["bf16 around batched"], ["powerSGD", "bf16 around batched"]))
def test_replicas_stay_equal(rank, hook):
    steps = START + 2
    torch.manual_seed(0)
    layers = [nn.Linear(24, 24) for _ in range(5)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device_of_rank()), bucket_cap_mb=0.002)
    state, indices, grads = new_state(), [], []

    def recorded(state, bucket):
        indices.append(bucket.index())
        return HOOKS[hook](state, bucket)

    model.register_comm_hook(state, recorded)

    def loss(model, step):
        return model(drawn(3, 24, rank=rank, step=step).to(device_of_rank())).square().mean()

    train(model, loss, range(steps), 0.05, before_update=lambda step: grads.append(gradients_of(model)))
    first, second = of_all_ranks((grads, max(indices) + 1))
    assert first[1] >= 5
    assert equal(first, second)
    assert all(grads.isfinite().all() and grads.any() for grads in first[0])


@pytest.mark.ranks(2, interpret=True)
def test_one_step_that_is_not_finite(rank):
    state, outputs = new_state(), []
    for step in range(START + 4):
        gradient = random_gradient(SMALL_SHAPES, rank, step).to(device_of_rank())
        if step == START + 1 and rank == 1:
            gradient[5] = math.inf
        outputs.append(powerSGD_hook.powerSGD_hook(state, Bucket(gradient, SMALL_SHAPES)).wait().cpu())
    first, second = of_all_ranks(outputs[START:])
    for outputs in (first, second):
        finite = [bool(output.isfinite().all()) for output in outputs]
        assert finite == [True, False, True, True]
    assert equal(first[2:], second[2:])


@pytest.mark.ranks(1, interpret=True)
def test_a_checkpoint_continues(rank):
    """Save and load the kernels' state, and take a step with both."""
    state = new_state()
    for step in range(START + 2):
        bucket = Bucket(random_gradient(SMALL_SHAPES, rank, step).to(device_of_rank()), SMALL_SHAPES)
        powerSGD_hook.powerSGD_hook(state, bucket).wait()
    del bucket  # the state then takes the next buckets for a new model's
    loaded = reload(state)
    gradient = random_gradient(SMALL_SHAPES, rank, 9)
    buckets = [Bucket(gradient.clone().to(device_of_rank()), SMALL_SHAPES) for _ in range(2)]
    outputs = [
        powerSGD_hook.powerSGD_hook(each, bucket).wait().cpu()
        for each, bucket in zip((state, loaded), buckets, strict=True)
    ]
    errors = [memory_of(each)[0] for each in (state, loaded)]
    assert relative(*outputs) <= ONE_STEP
    assert relative(*errors) <= ONE_STEP
