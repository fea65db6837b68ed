"""Test the default hooks on torch's DDP with real processes: averages, replicas, options, a lost peer."""

import copy
import os

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default
from torch.nn.parallel import DistributedDataParallel

from gradcomp.hooks import debugging_hooks, default_hooks
from tests.depth import mixed
from tests.devices import device_of_rank
from tests.ranks import RankError
from tests.reducer.models import run_cases
from tests.tolerances import average
from tests.training import drawn, gradients_of

STEPS = 4
HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16 around torch's allreduce": default_hooks.fp16_compress_wrapper(torch_default.allreduce_hook),
    "bf16 around fp16": default_hooks.bf16_compress_wrapper(default_hooks.fp16_compress_hook),
    "noop": debugging_hooks.noop_hook,
    "torch's allreduce": torch_default.allreduce_hook,
    "torch's fp16": torch_default.fp16_compress_hook,
    "none": None,
}
# hook -> the dtypes that it rounds a gradient to
ROUNDED_TO = {
    "allreduce": [torch.float32],
    "fp16": [torch.float16],
    "bf16": [torch.bfloat16],
    "fp16 around torch's allreduce": [torch.float16],
    "bf16 around fp16": [torch.bfloat16, torch.float16],
}


class Net(nn.Module):
    """Linear and conv layers of odd sizes. unused: add a layer that no rank uses."""

    def __init__(self, unused: bool = False):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(108, 108), nn.Tanh()) for _ in range(5)))
        self.head = nn.Linear(108, 7)
        self.unused = nn.Linear(11, 5) if unused else None

    def forward(self, x):
        return self.head(self.body(self.conv(x).flatten(1)))


def loss_of(model: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return model(drawn(5, 1, 8, 8, rank=rank, step=step).to(device_of_rank(), dtype)).square().mean()


def backward(model: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float32) -> None:
    loss_of(model, rank, step, dtype).backward()


def local_and_averaged(rank, hook_name, options, dtype=torch.float32):
    """Return [(local gradients, DDP's gradients)] by step, and the buckets' indices in averaging order."""
    torch.manual_seed(0)
    local = Net(options.get("find_unused_parameters", False)).to(device_of_rank(), dtype)
    model = DistributedDataParallel(copy.deepcopy(local), bucket_cap_mb=0.02, **options)
    order = []
    if (hook := HOOKS[hook_name]) is not None:

        def recorded(state, bucket):
            order.append(bucket.index())
            return hook(state, bucket)

        model.register_comm_hook(None, recorded)
    results = []
    for step in range(STEPS):
        local.zero_grad(set_to_none=True)
        model.zero_grad(set_to_none=True)
        backward(local, rank, step, dtype)
        backward(model, rank, step, dtype)
        assert all(p.grad.dtype == dtype for p in model.parameters() if p.grad is not None)
        results.append((gradients_of(local), gradients_of(model)))
    return results, order


def assert_averages(ranks, rounded_to):
    """Assert that the ranks have the same bits at every step: the float64 mean, within rounding."""
    for step in range(STEPS):
        locals_ = torch.stack([results[step][0].double() for results, _ in ranks])
        averaged = [results[step][1] for results, _ in ranks]
        assert all(torch.equal(averaged[0], other) for other in averaged[1:]), (
            f"replicas differ at step {step}"
        )
        bound = sum(average(dtype, len(ranks), locals_.abs().amax(0)) for dtype in rounded_to)
        error = (averaged[0].double() - locals_.mean(0)).abs()
        assert bool((error <= bound).all()), f"step {step}: off by {(error / bound).max():.2f} × the bound"


OPTIONS = [
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    {"static_graph": True},
]
# local_and_averaged's arguments.
CASES = [
    *((hook, {}) for hook in ROUNDED_TO),
    *mixed(("allreduce", "fp16", "bf16"), OPTIONS),
    # Ranks check that results have the bucket's dtype. They have the precision of the bucket or the wire.
    *mixed(("allreduce", "fp16", "bf16 around fp16"), ({},), (torch.float64, torch.bfloat16, torch.float16)),
]


def assert_in_order(order):
    buckets = max(order) + 1
    assert buckets >= 5, "too few buckets to have several in flight"
    assert order[-buckets:] == list(range(buckets))


def assert_all_average(ranks, cases):
    for (hook, _, *dtype), results in zip(cases, zip(*ranks, strict=True), strict=True):
        rounded_to = ROUNDED_TO[hook] if dtype in ([], [torch.float32]) else [*dtype, *ROUNDED_TO[hook]]
        assert_averages(results, rounded_to)
        for _, order in results:
            assert_in_order(order)


def test_hooks_average(run_group):
    assert_all_average(run_group(run_cases, local_and_averaged, CASES), CASES)


def test_hooks_average_on_three_ranks(run_ranks):
    cases = [(hook, {}) for hook in ROUNDED_TO]
    assert_all_average(run_ranks(run_cases, 3, local_and_averaged, cases), cases)


def test_the_same_as_torchs_hooks(run_ranks):
    """allreduce's results are equal to the bit; fp16's within rounding, since our hook rounds only once."""
    names = ("allreduce", "torch's allreduce", "none", "fp16", "torch's fp16")
    ranks = run_ranks(run_cases, 2, local_and_averaged, [(name, {}) for name in names])
    for steps in zip(*(results for results, _ in ranks[0]), strict=True):
        (local, exact), (_, torchs_exact), (_, without), (_, fp16), (_, torchs_fp16) = steps
        assert torch.equal(exact, torchs_exact)
        assert torch.equal(exact, without)
        assert (fp16 - torchs_fp16).abs().max() <= 2 * average(torch.float16, 2, local.abs().max())


def test_noop_hook_keeps_each_ranks_own_gradients(run_ranks):
    for results, _ in run_ranks(local_and_averaged, 2, "noop", {}):
        for local, result in results:
            assert torch.equal(local, result)


def test_hooks_run_the_triton_kernels_too(run_ranks):
    """Interpreted kernels, called from backward and communication threads, compute the same averages."""
    cases = [(hook, {}) for hook in ("allreduce", "fp16", "bf16 around fp16")]
    assert_all_average(run_ranks(run_cases, 2, local_and_averaged, cases, interpret=True), cases)


def lose_the_peer(rank, hook_name):
    model = DistributedDataParallel(nn.Linear(3, 2).to(device_of_rank()))
    model.register_comm_hook(None, HOOKS[hook_name])
    if rank == 1:
        os._exit(0)
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(1, 3, device=device_of_rank())).sum().backward()
    raise AssertionError(f"backward raised: {error.value}")


@pytest.mark.parametrize("hook", ["allreduce", "fp16", "bf16 around fp16"])
def test_a_lost_peer_surfaces_from_backward(run_ranks, hook):
    """Rank 1 dies before its backward; rank 0's backward raises instead of hanging."""
    with pytest.raises(RankError, match=r"backward raised: .*Connection (reset|closed) by peer"):
        run_ranks(lose_the_peer, 2, hook, timeout_s=30)
