"""Buffers and plans that are kept from step to step beside a bucket's first parameter.

While its bucket is in flight, a buffer is taken out: two buckets in flight never share one.
"""

from collections.abc import Hashable, MutableMapping, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from gradcomp.device import has_streams

Kept = TypeVar("Kept")


class KeptBuffers(Generic[Kept]):
    """What hooks keep from step to step: one object per hook and bucket.

    An object goes with its parameter, or when the parameters are arranged in other buckets.

    by_parameter: a bucket's first parameter -> hook name -> (key, object).
    """

    def __init__(self) -> None:
        self.by_parameter: MutableMapping[torch.Tensor, dict[str, tuple[Hashable, Kept]]] = (
            WeakIdKeyDictionary()
        )

    def take(self, parameters: Sequence[torch.Tensor], hook_name: str, key: Hashable) -> Kept | None:
        """Take out the object of the bucket with these parameters; None if there is none with this key.

        key: the size, device and so on that the object was made for.
        """
        if parameters:
            kept = self.by_parameter.get(parameters[0], {}).pop(hook_name, None)
            if kept is not None and kept[0] == key:
                return kept[1]
        # Other buckets of these parameters may have left objects: the first step's one bucket, say.
        for parameter in parameters:
            self.by_parameter.get(parameter, {}).pop(hook_name, None)
        return None

    def keep(self, first_parameter: torch.Tensor, hook_name: str, key: Hashable, kept: Kept) -> None:
        """Keep an object that nothing reads any more for the bucket's next step."""
        self.by_parameter.setdefault(first_parameter, {})[hook_name] = key, kept


_wires: KeptBuffers[torch.Tensor] = KeptBuffers()


def take_wire(bucket: dist.GradBucket, hook_name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a buffer of this dtype, as long as the bucket. Hand it to keep_wire after the averaging.

    On a CPU new memory costs a page fault per 4 KiB, so the buffer is kept from step to step. On CUDA torch's
    caching allocator keeps it, for the stream that is current here.
    """
    buffer = bucket.buffer()
    wire = _wires.take(bucket.parameters(), hook_name, (buffer.numel(), buffer.device))
    return torch.empty(buffer.numel(), dtype=dtype, device=buffer.device) if wire is None else wire


def keep_wire(first_parameter: torch.Tensor, hook_name: str, wire: torch.Tensor) -> None:
    """Keep a buffer of take_wire for its bucket's next step. first_parameter: the bucket's."""
    if not has_streams(wire.device):
        _wires.keep(first_parameter, hook_name, (wire.numel(), wire.device), wire)
