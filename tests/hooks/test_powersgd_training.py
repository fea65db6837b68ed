"""Test PowerSGD on torch's DDP: replicas get equal averages with many buckets in flight."""

import hashlib

import pytest
import torch

from gradcomp.hooks import powerSGD_hook
from tests.depth import everyday, mixed
from tests.hooks.powersgd_oracle import Bucket, random_gradient
from tests.hooks.powersgd_runs import HOOKS, START
from tests.hooks.test_default_hooks import assert_in_order, local_and_averaged
from tests.ranks import simulate
from tests.reducer.models import run_cases


def digest(tensor):
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def averaged(rank, hook_name, options, state_options, dtype=torch.float32):
    """Return [(the averages' digest, whether they are finite)] by step, and the buckets' indices in order."""
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=START, **state_options)
    steps, order = local_and_averaged(rank, HOOKS[hook_name], options, dtype, state, STEPS)
    return [(digest(average), bool(average.isfinite().all())) for _, average in steps], order


def options_of(**options):
    return {"matrix_approximation_rank": 2, **options}


BOTH = ("powerSGD", "batched")
STEPS = everyday(8, 40)
VIEW, UNUSED = {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}
# By world size, averaged's arguments: hook, DDP's options, the state's options, dtype.
CASES = {
    2: [
        *((hook, {}, options_of(matrix_approximation_rank=4)) for hook in BOTH),
        *(
            (hook, options, options_of())
            for hook, options in mixed(BOTH, (VIEW, UNUSED, UNUSED | VIEW, {"static_graph": True}))
        ),
        *((f"{dtype} around {hook}", {}, options_of()) for dtype, hook in mixed(("fp16", "bf16"), BOTH)),
        *(
            (hook, {}, options_of(), dtype)
            for hook, dtype in mixed(BOTH, (torch.bfloat16, torch.float16, torch.float64))
        ),
    ],
    3: [
        *((hook, {}, options_of(matrix_approximation_rank=4)) for hook in BOTH),
        ("powerSGD", {}, options_of(warm_start=False, min_compression_rate=0.5)),
    ],
}


@pytest.mark.device
@pytest.mark.parametrize("world_size", CASES)
def test_replicas_stay_equal(run_ranks, world_size):
    """Replicas stay equal with many buckets in flight; torch's hook dies with two."""
    cases = CASES[world_size]
    ranks = run_ranks(run_cases, world_size, averaged, cases, timeout_s=240)
    for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
        for digests, order in results:
            assert_in_order(order)
            assert all(finite for _, finite in digests), case
            assert digests == results[0][0], case


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
