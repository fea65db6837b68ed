"""Copy one rank's tensors to all ranks: a broadcast of bytes, and a copy per dtype on either side of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

BROADCAST_BYTES = 250 << 20
ALIGNMENT_BYTES = 16  # of a dtype's part: the largest element's size


def broadcast_coalesced(tensors: Iterable[torch.Tensor], src: int, group: dist.ProcessGroup) -> None:
    """Copy the tensors of the group's rank src to all its ranks, in place, in few broadcasts."""
    for chunk in _chunks(tensors):
        _Chunk(chunk).broadcast(chunk, src, group)


class RepeatedBroadcast:
    """broadcast_coalesced for much the same tensors again and again: their memory on the wire is kept.

    Dispatches one operator per chunk and dtype, and one for the broadcast, however many tensors there are.
    """

    def __init__(self) -> None:
        self._kept: list[_Chunk] = []

    def __call__(self, tensors: Sequence[torch.Tensor], src: int, group: dist.ProcessGroup) -> None:
        chunks = list(_chunks(tensors))
        if [chunk.kinds for chunk in self._kept] != [_kinds(chunk) for chunk in chunks]:
            self._kept = [_Chunk(chunk) for chunk in chunks]
        for kept, chunk in zip(self._kept, chunks, strict=True):
            kept.broadcast(chunk, src, group)


class _Kind(NamedTuple):
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size


def _kinds(tensors: Sequence[torch.Tensor]) -> list[_Kind]:
    return [_Kind(tensor.dtype, tensor.device, tensor.shape) for tensor in tensors]


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours on one device that together are no longer than BROADCAST_BYTES, or one that is."""
    chunk: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if chunk and (num_bytes + tensor.nbytes > BROADCAST_BYTES or tensor.device != chunk[0].device):
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(tensor)
        num_bytes += tensor.nbytes
    if chunk:
        yield chunk


class _Chunk:
    """Memory for tensors of these kinds on the wire: the dtypes' parts one after another, in one buffer of bytes."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self.kinds = _kinds(tensors)
        self._places: dict[torch.dtype, list[int]] = {}
        for place, kind in enumerate(self.kinds):
            self._places.setdefault(kind.dtype, []).append(place)
        lengths = [
            sum(tensors[place].nbytes for place in places) + ALIGNMENT_BYTES - 1
            for places in self._places.values()
        ]
        lengths = [length - length % ALIGNMENT_BYTES for length in lengths]
        self._wire = torch.empty(sum(lengths), dtype=torch.uint8, device=tensors[0].device)
        self._views: dict[torch.dtype, list[torch.Tensor]] = {}
        for (dtype, places), part in zip(self._places.items(), self._wire.split(lengths), strict=True):
            shapes = [self.kinds[place].shape for place in places]
            numels = [shape.numel() for shape in shapes]
            pieces = part.view(dtype)[: sum(numels)].split(numels)
            self._views[dtype] = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[torch.Tensor], src: int, group: dist.ProcessGroup) -> None:
        is_source = group.rank() == src
        if is_source:
            for dtype, places in self._places.items():
                torch._foreach_copy_(self._views[dtype], [tensors[place] for place in places])
        dist.broadcast(self._wire, dist.get_global_rank(group, src), group=group)
        if not is_source:
            for dtype, places in self._places.items():
                torch._foreach_copy_([tensors[place] for place in places], self._views[dtype])
