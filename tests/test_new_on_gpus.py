"""Test on the ranks' devices what no GPU has run yet: gpu-check begins here."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import powersgd
from benchmarks.harness import check
from benchmarks.hooks import join_group_of_one
from gradcomp.comm.bucket import GradBucket
from gradcomp.fsdp import compress_fsdp
from gradcomp.hooks import default_hooks
from gradcomp.hooks.quantization_hooks import QuantizationState
from gradcomp.local_steps import LocalSteps
from tests.compress.test_undo_step import KINDS, STEPS, assert_same
from tests.compress.test_undo_step import train as train_and_undo
from tests.devices import device_of_rank
from tests.fsdp.gathered import round_all_gathers
from tests.fsdp.models import batch_of, new_grid, sharded, weights
from tests.local_steps.runs import hooked
from tests.reducer.models import run_cases
from tests.training import Layers, drawn, parameters_of

NUM_STEPS, NUM_WARM_UP_STEPS = 200 if torch.cuda.is_available() else 20, 20


def on_a_stream(rank, name):
    """Average three buckets per step on a stream of the caller's.

    A bucket is freed after its step, and the next tensors of its size are filled with NaN at once: what still
    reads its memory would see that.

    Returns (the number of wrong elements, bytes of memory after the first steps and at the end).
    """
    device, hook = device_of_rank(), getattr(default_hooks, name)
    is_cuda, size = device.type == "cuda", dist.get_world_size()
    numel = 2**20 if is_cuda else 2**10
    parameters = [nn.Parameter(torch.empty(numel, device=device))]
    wrong, memory = torch.zeros((), dtype=torch.int64, device=device), []
    with torch.cuda.stream(torch.cuda.Stream()) if is_cuda else nullcontext():
        mine = (torch.arange(numel, device=device) % 16).float()
        for step in range(NUM_STEPS):
            buckets = [
                GradBucket(index, mine + 2 * rank + step % 8 + index, parameters, index == 2)
                for index in range(3)
            ]
            averages = [future.wait() for future in [hook(None, bucket) for bucket in buckets]]
            for index, average in enumerate(averages):
                expected = mine + (size - 1) + step % 8 + index
                wrong += (~((average - expected).abs() <= 0.01 * expected)).sum()
            del buckets, averages, average
            for _ in range(6):
                mine.new_full((numel,), torch.nan)
            if is_cuda and step + 1 in (NUM_WARM_UP_STEPS, NUM_STEPS):
                torch.cuda.synchronize()
                memory.append(torch.cuda.memory_reserved())
    return wrong.item(), memory


@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"])
def test_hooks_on_the_current_stream(run_group, name):
    for num_wrong, memory in run_group(on_a_stream, name):
        assert num_wrong == 0
        assert not memory or memory[1] <= memory[0]


def train_sharded(rank):
    """Train with compress_fsdp, and with torch's all-gather of rounded weights and exact gradients.

    Returns (this rank's weights, torch's).
    """
    device, results = device_of_rank(), []
    grid = new_grid(1, dist.get_world_size(), device.type)
    for is_ours in (True, False):
        torch.manual_seed(0)
        model = sharded(grid.shards)
        if is_ours:
            compress_fsdp(model, QuantizationState(bits=16, block_size=16))
        else:
            round_all_gathers(model, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for number in range(4):
            optimizer.zero_grad()
            model(batch_of(rank, number).to(device)).square().mean().backward()
            optimizer.step()
        results.append(weights(model))
    return results


def test_sharded_models(run_ranks):
    for ours, theirs in run_ranks(train_sharded, torch.cuda.device_count() or 2, backend="nccl"):
        ours, theirs = (torch.cat([each.flatten() for each in of_one]) for of_one in (ours, theirs))
        assert (ours - theirs).abs().max() <= 1e-3


def train_local_steps(rank, hook):
    """Return the distances from the ranks' mean after each exchange, of its own, and the last weights."""
    torch.manual_seed(0)
    model, distances = Layers(16, 64, 64, 8).to(device_of_rank()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = LocalSteps(model, every=2, **hooked(hook, dist.group.WORLD))
    for step in range(8):
        optimizer.zero_grad()
        model(drawn(32, 16, rank=rank, step=step).to(device_of_rank())).square().mean().backward()
        optimizer.step()
        own = parameters_of(model)
        mean = own.to(device_of_rank())
        dist.all_reduce(mean)
        mean = mean.cpu() / dist.get_world_size()
        local.step()
        if step % 2:
            distances.append(((parameters_of(model) - mean).norm(), (own - mean).norm()))
    return distances, parameters_of(model)


def test_local_steps(run_group):
    cases = {"none": 1e-5, "bf16": 0.05, "int4": 0.5}  # hooks, and the distance allowed, of the first own one
    ranks = run_group(run_cases, train_local_steps, [(hook,) for hook in cases])
    for results in ranks:
        for hook, (distances, last), (_, others) in zip(cases, results, ranks[0], strict=True):
            assert torch.equal(last, others), hook
            for distance, own in distances if len(ranks) > 1 else ():
                assert distance <= cases[hook] * own, hook


def undo(rank, kind):
    """Return what test_undo_step's training gives with steps that are undone, and without."""
    group, device = dist.group.WORLD, device_of_rank()
    return [
        train_and_undo(rank, group, KINDS[kind], torch.float32, STEPS, refuses, device)
        for refuses in (True, False)
    ]


def test_undone_steps(run_group):
    kinds = ["int4", "PowerSGD", "int8 factors after 4 bits"]
    for results in run_group(run_cases, undo, [(kind,) for kind in kinds]):
        for (averages, kept), (expected_averages, expected_kept) in results:
            assert all(map(torch.equal, averages, expected_averages))
            assert_same(kept, expected_kept, rtol=0, atol=0)


def test_gpt2_mediums_buckets_and_int8_factors(plain_torch, device, request):
    """On a CPU they are the quick benchmarks' buckets."""
    join_group_of_one(device)
    request.addfinalizer(dist.destroy_process_group)
    wanted = ("gpt2-medium, 37 buckets, r=4", "bert-large, 38 buckets, r=4, int8 factors")
    cases = list(powersgd.cases(device, quick=device.type == "cpu"))
    found = [case for case in cases if case.name == "powerSGD_hook"]
    if device.type == "cuda":
        found = [case for case in found if case.label in wanted]
    assert len(found) == 2 + (device.type == "cpu")
    for case in found:
        setup = case.build()
        setup.providers = {"gradcomp": setup.providers["gradcomp"]}
        assert 0 < check(case, setup)["gradcomp"] <= case.max_error
