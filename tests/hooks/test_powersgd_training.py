"""Test training with PowerSGD on torch's DDP: replicas stay equal with many buckets in flight."""

import hashlib

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from gradcomp.hooks import powerSGD_hook
from tests.depth import everyday, mixed
from tests.devices import device_of_rank
from tests.hooks.powersgd_oracle import Bucket, random_gradient
from tests.hooks.powersgd_runs import HOOKS, START
from tests.hooks.test_default_hooks import Net, loss_of
from tests.ranks import simulate
from tests.reducer.models import run_cases
from tests.training import gradients_of, parameters_of
from tests.training import train as train_on


def digest(tensor):
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def train(rank, hook_name, options, state_options, steps, dtype=torch.float32):
    """Train with the hook.

    Returns ([(the gradients' digest, whether they are finite)] by step, the parameters' digest,
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
    optimizer, digests = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), []

    def note(step):
        gradients = gradients_of(model)
        digests.append((digest(gradients), bool(gradients.isfinite().all())))

    def loss(model, step):
        return loss_of(model, rank, step % 4, dtype)

    train_on(model, loss, range(steps), optimizer=optimizer, before_update=note)
    return digests, digest(parameters_of(model)), order


def options_of(**options):
    return {"matrix_approximation_rank": 2, **options}


BOTH = ("powerSGD", "batched")
STEPS = everyday(8, 40)
VIEW, UNUSED = {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}
# By world size, train's arguments: hook, DDP's options, the state's options, steps, dtype.
CASES = {
    2: [
        *((hook, {}, options_of(matrix_approximation_rank=4), STEPS) for hook in BOTH),
        *(
            (hook, options, options_of(), STEPS)
            for hook, options in mixed(BOTH, (VIEW, UNUSED, UNUSED | VIEW, {"static_graph": True}))
        ),
        *(
            (f"{dtype} around {hook}", {}, options_of(), STEPS)
            for dtype, hook in mixed(("fp16", "bf16"), BOTH)
        ),
        *(
            (hook, {}, options_of(), STEPS, dtype)
            for hook, dtype in mixed(BOTH, (torch.bfloat16, torch.float16, torch.float64))
        ),
    ],
    3: [
        *((hook, {}, options_of(matrix_approximation_rank=4), STEPS) for hook in BOTH),
        ("powerSGD", {}, options_of(warm_start=False, min_compression_rate=0.5), STEPS),
    ],
}


@pytest.mark.parametrize("world_size", CASES)
def test_replicas_stay_equal(run_ranks, world_size):
    """Replicas stay equal with many buckets in flight; torch's hook dies with two."""
    cases = CASES[world_size]
    ranks = run_ranks(run_cases, world_size, train, cases, timeout_s=240)
    for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
        for digests, parameters, order in results:
            buckets = max(order) + 1
            assert buckets >= 5, "too few buckets to have several in flight"
            assert order[-buckets:] == list(range(buckets)), case
            assert all(finite for _, finite in digests), case
            assert digests == results[0][0], case
            assert parameters == results[0][1], case


def test_without_warm_start_or_error_feedback_compression_may_start_at_once():
    options = {"warm_start": False, "use_error_feedback": False, "start_powerSGD_iter": 0}
    for rate, outputs in simulate(compress_from_the_first_step, 2, options):
        assert rate > 2
        assert all(torch.linalg.matrix_rank(output.view(64, 48)) == 1 for output in outputs)


def compress_from_the_first_step(rank, options):
    state = powerSGD_hook.PowerSGDState(None, **options)
    shape = [(64, 48)]
    buckets = [Bucket(random_gradient(shape, rank, step), shape) for step in range(3)]
    outputs = [powerSGD_hook.powerSGD_hook(state, bucket).wait() for bucket in buckets]
    return state.compression_stats()[0], outputs
