"""The 16-bit buffers that cross the wire, kept from step to step on a CPU."""

from collections.abc import MutableMapping

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from gradcomp import ops

_wires: MutableMapping[torch.Tensor, dict[str, torch.Tensor]] = WeakIdKeyDictionary()


def take_wire(bucket: dist.GradBucket, hook_name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a buffer of this dtype, as long as the bucket, to be handed to keep_wire after the bucket's
    averaging.

    Two buckets in flight never have the same one: a buffer that is taken is not kept any more. On a CPU,
    where new memory costs a page fault per 4 KiB, it is kept from step to step with the bucket's first
    parameter, until the parameters are arranged in other buckets. On CUDA the caching allocator of torch
    keeps it, for the stream that is current here.
    """
    buffer = bucket.buffer()
    wire = _wires.get(bucket.parameters()[0], {}).pop(hook_name, None)
    if wire is None or wire.numel() != buffer.numel() or wire.device != buffer.device:
        # What other buckets of these parameters have left: the first step's one bucket, say.
        for parameter in bucket.parameters():
            _wires.get(parameter, {}).pop(hook_name, None)
        wire = torch.empty(buffer.numel(), dtype=dtype, device=buffer.device)
    return wire


def keep_wire(first_parameter: torch.Tensor, hook_name: str, wire: torch.Tensor) -> None:
    """Keep a buffer of take_wire's, which nothing reads any more, for the bucket's next step."""
    if not ops.has_streams(wire.device):
        _wires.setdefault(first_parameter, {})[hook_name] = wire
