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
from tests.hooks.powersgd_runs import FEW_SHAPES, HOOKS, START, equal, new_state, reload
from tests.hooks.test_default_hooks import flat_grads
from tests.kept import directions_in, error_in
from tests.tolerances import ONE_STEP


def memory_of(state):
    """Return a bucket's error and directions from a checkpoint."""
    return error_in(state).cpu(), [direction.cpu() for direction in directions_in(state)]


def steps_on_kernels(rank, num_steps):
    """Return (gradient, output, memory) after every compressed step, and whether kernels computed it."""
    state, results = new_state(), []
    for step in range(START + num_steps):
        gradient = random_gradient(FEW_SHAPES, rank, step)
        bucket = Bucket(gradient.clone().to(device_of_rank()), FEW_SHAPES)
        output = powerSGD_hook.powerSGD_hook(state, bucket).wait()
        if step >= START:
            results.append((gradient, output.cpu(), memory_of(state)))
    (known,) = state._states._buckets
    return results, isinstance(known.compressor.plan, powersgd_plan.PowerSGDPlan)


def test_steps_as_the_oracles(run_ranks):
    ranks = run_ranks(steps_on_kernels, 2, 3, interpret=True)
    assert [is_on_kernels for _, is_on_kernels in ranks] == [True, True]
    order = compressed(FEW_SHAPES, 2)
    for step in range(1, 3):
        gradients = [results[step][0] for results, _ in ranks]
        before = [results[step - 1][2] for results, _ in ranks]
        errors, directions = [error for error, _ in before], before[0][1]
        expected = powersgd_step(FEW_SHAPES, gradients, errors, directions, order)
        for (results, _), error in zip(ranks, expected.errors, strict=True):
            assert torch.equal(results[step][1], ranks[0][0][step][1])
            assert relative(results[step][1], expected.output) <= ONE_STEP
            assert relative(results[step][2][0], error) <= ONE_STEP


def train_on_kernels(rank, hook, steps):
    torch.manual_seed(0)
    layers = [nn.Linear(40, 40) for _ in range(5)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device_of_rank()), bucket_cap_mb=0.006)
    state, indices, grads = new_state(), [], []

    def recorded(state, bucket):
        indices.append(bucket.index())
        return HOOKS[hook](state, bucket)

    model.register_comm_hook(state, recorded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(3, 40, generator=torch.Generator().manual_seed(100 * rank + step))
        model(x.to(device_of_rank())).square().mean().backward()
        grads.append(flat_grads(model))
        optimizer.step()
    return grads, max(indices) + 1


@pytest.mark.parametrize("hook", everyday(["bf16 around batched"], ["powerSGD", "bf16 around batched"]))
def test_replicas_stay_equal(run_ranks, hook):
    first, second = run_ranks(train_on_kernels, 2, hook, START + 3, interpret=True)
    assert first[1] >= 5
    assert equal(first, second)
    assert all(grads.isfinite().all() and grads.any() for grads in first[0])


def one_bad_step(rank):
    state, outputs = new_state(), []
    for step in range(START + 4):
        gradient = random_gradient(FEW_SHAPES, rank, step).to(device_of_rank())
        if step == START + 1 and rank == 1:
            gradient[5] = math.inf
        outputs.append(powerSGD_hook.powerSGD_hook(state, Bucket(gradient, FEW_SHAPES)).wait().cpu())
    return outputs[START:]


def test_one_step_that_is_not_finite(run_ranks):
    first, second = run_ranks(one_bad_step, 2, interpret=True)
    for outputs in (first, second):
        finite = [bool(output.isfinite().all()) for output in outputs]
        assert finite == [True, False, True, True]
    assert equal(first[2:], second[2:])


def save_and_load(rank):
    """Save and load the kernels' state, and take a step with both; return both outputs and errors."""
    state = new_state()
    for step in range(START + 2):
        bucket = Bucket(random_gradient(FEW_SHAPES, rank, step).to(device_of_rank()), FEW_SHAPES)
        powerSGD_hook.powerSGD_hook(state, bucket).wait()
    del bucket  # the state then takes the next buckets for a new model's
    loaded = reload(state)
    gradient = random_gradient(FEW_SHAPES, rank, 9)
    buckets = [Bucket(gradient.clone().to(device_of_rank()), FEW_SHAPES) for _ in range(2)]
    outputs = [
        powerSGD_hook.powerSGD_hook(each, bucket).wait().cpu()
        for each, bucket in zip((state, loaded), buckets, strict=True)
    ]
    return outputs, [memory_of(each)[0] for each in (state, loaded)]


def test_a_checkpoint_continues(run_ranks):
    for outputs, errors in run_ranks(save_and_load, 1, interpret=True):
        assert relative(*outputs) <= ONE_STEP
        assert relative(*errors) <= ONE_STEP
