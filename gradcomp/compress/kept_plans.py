"""The plans of quantized all-reduces without error feedback, kept from step to step with the parameters."""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from gradcomp import ops
from gradcomp.layout.blocks import BlockLayout

from ..comm.pipeline import Stages, explained, run_through
from ..comm.process_group import Operation
from ..comm.streams import Future, completed, in_order
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


_plans: MutableMapping[torch.Tensor, dict[str, tuple[_Key, ops.QuantizedPlan]]] = WeakIdKeyDictionary()


def average_in_8_bits(
    hook_name: str, bucket: dist.GradBucket, group: dist.ProcessGroup, block_size_of: BlockSize
) -> Future:
    """Average the whole bucket, cut into blocks without regard to its tensors, in 8 bits per element.

    hook_name: the name under which the plan is kept. block_size_of(numel, world_size): the size of a block; a
    bucket smaller than that is sent exactly.

    A plan holds no gradients between steps, but it is as large as two buckets of codes, and takes long to
    make. So it is kept with the bucket's first parameter, and dropped with it, or when that parameter is in
    another bucket. Two buckets in flight never have the same one: a plan that is taken is not kept any more.
    """
    buffer = bucket.buffer()
    numel, size = buffer.numel(), group.size()
    if not numel:
        return completed(buffer.device, lambda: buffer)
    key = _Key(numel, block_size_of(numel, size), buffer.dtype, buffer.device, size)
    parameters = bucket.parameters()

    def stages() -> Stages:
        plan = _take(hook_name, parameters, key)
        yield from quantized_all_reduce(plan, buffer, group)
        if parameters:
            _plans.setdefault(parameters[0], {})[hook_name] = key, plan
        return buffer

    # A plan is made in the sequence, so that on CUDA its memory is the side stream's.
    operation = Operation.averaging(bucket.index(), hook_name, group)
    return in_order(buffer.device, lambda: run_through(explained(stages(), operation)))


def _take(hook_name: str, parameters: list[torch.Tensor], key: _Key) -> ops.QuantizedPlan:
    """Return the plan kept for a bucket with these parameters, or make one."""
    if parameters:
        kept = _plans.get(parameters[0], {}).pop(hook_name, None)
        if kept is not None and kept[0] == key:
            return kept[1]
    # What other buckets of these parameters have left: the first step's one bucket, say.
    for parameter in parameters:
        _plans.get(parameter, {}).pop(hook_name, None)
    layout = BlockLayout([(1, key.numel)], key.block_size, key.world_size)
    return ops.quantized_plan(layout, key.dtype, key.device, bits=BITS, error_feedback=False)
