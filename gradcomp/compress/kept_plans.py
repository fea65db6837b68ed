"""The plans of quantized all-reduces without error feedback, kept from step to step with the parameters."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.layout.blocks import BlockLayout

from ..comm.kept_buffers import KeptBuffers
from ..comm.pipeline import Stages, explained, run_through
from ..comm.process_group import Operation
from ..comm.streams import Future, completed, run_on_side_stream
from .quantized import quantized_all_reduce

BITS = 8
BlockSize = Callable[[int, int], int]  # (the bucket's number of elements, world size) → a block's


@dataclass(frozen=True)
class _Key:
    """What a plan depends on."""

    numel: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    world_size: int


_plans: KeptBuffers[ops.QuantizedPlan] = KeptBuffers()


def average_in_8_bits(
    hook_name: str, bucket: dist.GradBucket, group: dist.ProcessGroup, block_size_of: BlockSize
) -> Future:
    """Average the whole bucket, cut into blocks without regard to its tensors, in 8 bits per element.

    hook_name: the name under which the plan is kept.
    block_size_of(numel, world_size): the size of a block. A bucket smaller than a block is sent exactly.

    A plan holds no gradients between steps. It is kept because it takes long to make; it is as large as two
    buckets of codes.
    """
    buffer = bucket.buffer()
    numel, size = buffer.numel(), group.size()
    if not numel:
        return completed(buffer.device, lambda: buffer)
    key = _Key(numel, block_size_of(numel, size), buffer.dtype, buffer.device, size)
    parameters = bucket.parameters()

    def stages() -> Stages:
        plan = _plans.take(parameters, hook_name, key) or _make(key)
        yield from quantized_all_reduce(plan, buffer, group)
        if parameters:
            _plans.keep(parameters[0], hook_name, key, plan)
        return buffer

    # A plan is made in the sequence, so that on CUDA its memory is the side stream's.
    operation = Operation.averaging(bucket.index(), hook_name, group)
    return run_on_side_stream(buffer.device, lambda: run_through(explained(stages(), operation)))


def _make(key: _Key) -> ops.QuantizedPlan:
    layout = BlockLayout([(1, key.numel)], key.block_size, key.world_size)
    return ops.quantized_plan(layout, key.dtype, key.device, bits=BITS, error_feedback=False)
