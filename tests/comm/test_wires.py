"""Test 16-bit wire buffers: buckets in flight share none, and they take at most half the gradients' size."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp.comm.bucket import GradBucket, _wires, take_wire
from gradcomp.hooks import default_hooks
from gradcomp.hooks.default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from gradcomp.hooks.quantization_hooks import quantization_perchannel_hook, quantization_pertensor_hook
from gradcomp.testing import run_ranks as run_simulated_ranks


def wrapped(state, bucket):
    """Average with a hook that the wrappers don't know, and so don't replace by a compress hook."""
    return allreduce_hook(state, bucket)


HOOKS = [
    fp16_compress_hook,
    bf16_compress_hook,
    default_hooks.fp16_compress_wrapper(wrapped),
    default_hooks.bf16_compress_wrapper(wrapped),
]
OF_CODES = [quantization_pertensor_hook, quantization_perchannel_hook]


def two_buckets_of_one_parameter(rank, process_group, hook):
    """Start the averaging of both buckets before waiting for either. Codes of these values are exact."""
    parameter = nn.Parameter(torch.zeros(4096))
    buckets = [
        GradBucket(0, torch.full((4096,), 127.0 * (1 + i) * rank), [parameter], True) for i in range(2)
    ]
    futures = [hook(process_group, bucket) for bucket in buckets]
    return [future.wait().unique().tolist() for future in futures]


@pytest.mark.parametrize("hook", [*HOOKS, *OF_CODES], ids=lambda hook: hook.__qualname__)
def test_a_hook_called_again_before_anyone_waits_has_another_wire_or_plan(hook):
    """Ranks in one process share neither."""
    for averages in run_simulated_ranks(two_buckets_of_one_parameter, 2, hook):
        assert averages == [[63.5], [127.0]]


@pytest.mark.ranks(2)
def test_half_of_the_gradients_bytes_are_kept_after_buckets_are_rebuilt(rank):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.03)
    ddp.register_comm_hook(None, fp16_compress_hook)
    kept = []
    for _ in range(3):
        ddp(torch.randn(4, 64)).sum().backward()
        kept.append(sum(wire.nbytes for wires in _wires.by_parameter.values() for _, wire in wires.values()))
    assert kept == [sum(p.nbytes for p in model.parameters()) // 2] * 3


def test_a_wire_is_kept_for_the_next_step_of_its_bucket_alone():
    first, other = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(2))
    bucket = GradBucket(0, torch.zeros(6), [first], True)
    wire, keep = take_wire(bucket, torch.float16)
    keep()
    assert take_wire(bucket, torch.float16)[0] is wire
    assert take_wire(bucket, torch.float16)[0] is not wire  # it is in flight
    keep()
    assert take_wire(GradBucket(0, torch.zeros(8), [other, first], True), torch.float16)[0].numel() == 8
    assert not _wires.by_parameter[first]
    keep()
    bucket.set_buffer(torch.zeros(6, device="meta"))  # the model has moved
    assert take_wire(bucket, torch.float16)[0].device.type == "meta"
