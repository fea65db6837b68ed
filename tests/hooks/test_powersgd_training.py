"""Test training with PowerSGD on torch's DDP: replicas stay equal, losses fall, late layers learn."""

import hashlib

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp.hooks import powerSGD_hook
from tests.devices import device_of_rank
from tests.hooks.powersgd_oracle import (
    Bucket,
    random_gradient,
)
from tests.hooks.powersgd_runs import (
    HOOKS,
    START,
)
from tests.hooks.test_default_hooks import Net, backward, flat_grads


def digest(tensor):
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def train(rank, hook_name, options, state_options, steps, dtype=torch.float32, lr=0.1):
    """Train with the hook.

    Returns ([(the gradients' digest, whether they are finite)] by step, the parameters' digest, the losses,
    the buckets' indices in averaging order).
    """
    torch.manual_seed(0)
    unused = options.get("find_unused_parameters", False)
    model = DistributedDataParallel(Net(unused).to(device_of_rank(), dtype), bucket_cap_mb=0.02, **options)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=START, **state_options)
    hook, order = HOOKS[hook_name], []

    def recorded(state, bucket):
        order.append(bucket.index())
        return hook(state, bucket)

    if hook is not None:
        model.register_comm_hook(state, recorded)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    digests, losses = [], []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        losses.append(backward(model, rank, step % 4, dtype).item())
        gradients = flat_grads(model)
        digests.append((digest(gradients), bool(gradients.isfinite().all())))
        optimizer.step()
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return digests, digest(parameters), losses, order


def assert_replicas_equal(ranks):
    for digests, parameters, _, order in ranks:
        buckets = max(order) + 1
        assert buckets >= 5, "too few buckets to have several in flight"
        assert order[-buckets:] == list(range(buckets))
        assert all(finite for _, finite in digests)
        assert digests == ranks[0][0]
        assert parameters == ranks[0][1]


@pytest.mark.parametrize("hook", ["powerSGD", "batched"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_replicas_stay_equal(run_ranks, hook, world_size):
    """Replicas stay equal in 100 steps with many buckets in flight; torch's hook dies with two."""
    options = {"matrix_approximation_rank": 4}
    assert_replicas_equal(run_ranks(train, world_size, hook, {}, options, 100))


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"static_graph": True},
    ],
    ids="+".join,
)
@pytest.mark.parametrize("hook", ["powerSGD", "batched"])
def test_replicas_stay_equal_with_ddp_options(run_ranks, hook, options):
    assert_replicas_equal(run_ranks(train, 2, hook, options, {"matrix_approximation_rank": 2}, 100))


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if "around" in hook])
def test_replicas_stay_equal_under_the_wrappers(run_ranks, hook):
    assert_replicas_equal(run_ranks(train, 2, hook, {}, {"matrix_approximation_rank": 2}, 30))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("hook", ["powerSGD", "batched"])
def test_replicas_of_models_in_other_dtypes_stay_equal(run_ranks, hook, dtype):
    assert_replicas_equal(run_ranks(train, 2, hook, {}, {"matrix_approximation_rank": 2}, 30, dtype))


def test_state_options_keep_replicas_equal(run_ranks):
    for options in ({"warm_start": False}, {"use_error_feedback": False}, {"min_compression_rate": 0.5}):
        options = {"matrix_approximation_rank": 4, **options}
        assert_replicas_equal(run_ranks(train, 3, "powerSGD", {}, options, 20))


def test_without_warm_start_or_error_feedback_compression_may_start_at_once(run_ranks):
    options = {"warm_start": False, "use_error_feedback": False, "start_powerSGD_iter": 0}
    for rate, outputs in run_ranks(compress_from_the_first_step, 2, options):
        assert rate > 2
        assert all(torch.linalg.matrix_rank(output.view(64, 48)) == 1 for output in outputs)


def compress_from_the_first_step(rank, options):
    state = powerSGD_hook.PowerSGDState(None, **options)
    shape = [(64, 48)]
    buckets = [Bucket(random_gradient(shape, rank, step), shape) for step in range(3)]
    outputs = [powerSGD_hook.powerSGD_hook(state, bucket).wait() for bucket in buckets]
    return state.compression_stats()[0], outputs


@pytest.mark.parametrize("hook", ["powerSGD", "batched", "fp16 around powerSGD"])
def test_training_reaches_about_the_loss_of_no_compression(run_ranks, hook):
    steps = 150
    options = {"matrix_approximation_rank": 2}
    compressed_ranks = run_ranks(train, 2, hook, {}, options, steps)
    plain_ranks = run_ranks(train, 2, "none", {}, options, steps)
    for (_, _, mine, _), (_, _, other, _) in zip(compressed_ranks, plain_ranks, strict=True):
        assert other[-1] < 0.3 * other[0], "the training itself does not converge"
        # The losses differ by less than a tenth of the training's progress.
        assert abs(mine[-1] - other[-1]) < 0.1 * (other[0] - other[-1])


# Layers that a step does not use.


class Branches(nn.Module):
    """This model uses a layer in some steps only."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, both):
        return self.sometimes(self.always(x)) if both else self.always(x)


def use_a_layer_late(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    state = powerSGD_hook.PowerSGDState(None, 2, START)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(START + 6):
        model.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * rank + step))
        model(x, both=step >= START + 3).square().mean().backward()
    return float(model.module.sometimes.weight.grad.norm())


def test_a_layer_that_is_used_later_gets_gradients(run_ranks):
    """DDP fills an unused layer's part of the bucket with zeros. Later gradients must still come through."""
    assert all(norm > 0 for norm in run_ranks(use_a_layer_late, 2))
