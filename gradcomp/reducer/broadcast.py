"""Copy one rank's tensors to all ranks: a broadcast of bytes, with a copy per dtype before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.comm.process_group import Explaining

BROADCAST_BYTES = 250 << 20
ALIGNMENT_BYTES = 16  # of each dtype's part: the size of the largest element


def broadcast_coalesced(tensors: Iterable[torch.Tensor], src: int, group: dist.ProcessGroup) -> None:
    """Copy the tensors of the group's rank src to all its ranks, in place, in few broadcasts."""
    for chunk in list(_chunks(tensors)):
        _Chunk(chunk).broadcast(chunk, src, group)


class RepeatedBroadcast:
    """Copies like broadcast_coalesced, and keeps its buffers for the next call with the same shapes.

    Dispatches one operator per chunk and dtype, and one for the broadcast, for any number of tensors.

    compare: called before tensors of another number, dtype or shape than in the last call are copied.
    """

    def __init__(self) -> None:
        self.kept: list[_Chunk] = []
        self._described: list[Any] = []

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        src: int,
        group: dist.ProcessGroup,
        compare: Callable[[], None] = lambda: None,
    ) -> None:
        chunks = list(_chunks(tensors))
        described = [(each.dtype, each.device, each.shape) for each in tensors]
        if described != self._described:
            compare()
            with torch.inference_mode(False):
                self.kept, self._described = [_Chunk(chunk) for chunk in chunks], described
        for kept, chunk in zip(self.kept, chunks, strict=True):
            kept.broadcast(chunk, src, group)


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut a list into chunks: of one device, with at most BROADCAST_BYTES or one longer tensor."""
    chunk: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if tensor.layout != torch.strided or 0 in tensor.stride():
            _require_writable(tensor)
        if chunk and (num_bytes + tensor.nbytes > BROADCAST_BYTES or tensor.device != chunk[0].device):
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(tensor)
        num_bytes += tensor.nbytes
    if chunk:
        yield chunk


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether a dense tensor repeats elements, as after expand(): no copy can fill it."""
    strides = tensor.stride() if tensor.layout == torch.strided else [1] * tensor.dim()
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, strides, strict=True))


def _require_writable(tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor that no copy can fill: a sparse one, or one that repeats elements."""
    is_dense = tensor.layout == torch.strided
    if is_dense and not is_expanded(tensor):
        return
    kind = f"expanded, with strides {list(tensor.stride())}" if is_dense else tensor.layout
    raise ValueError(
        f"a parameter or buffer of shape {list(tensor.shape)} in {tensor.dtype} is {kind}: gradcomp can't "
        "copy one rank's values into it. Give the model a dense tensor: .contiguous() or .to_dense()"
    )


class _Chunk:
    """The wire of some tensors: one buffer of bytes with a part for every dtype."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        of_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            of_dtype.setdefault(tensor.dtype, []).append(index)
        sizes = [sum(tensors[index].nbytes for index in indices) for indices in of_dtype.values()]
        lengths = [-(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for num_bytes in sizes]
        self._wire = torch.empty(sum(lengths), dtype=torch.uint8, device=tensors[0].device)
        self._parts: list[tuple[list[int], list[torch.Tensor]]] = []  # (tensors' indices, their views)
        for (dtype, indices), part in zip(of_dtype.items(), self._wire.split(lengths), strict=True):
            shapes = [tensors[index].shape for index in indices]
            numels = [shape.numel() for shape in shapes]
            parts = part.view(dtype)[: sum(numels)].split(numels)
            views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
            self._parts.append((indices, views))

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[torch.Tensor], src: int, group: dist.ProcessGroup) -> None:
        is_source = group.rank() == src
        if is_source:
            for indices, views in self._parts:
                torch._foreach_copy_(views, [tensors[index] for index in indices])
        with Explaining.of(f"copy the parameters or buffers of rank {src} to all ranks", group):
            dist.broadcast(self._wire, group_src=src, group=group)
        if not is_source:
            # Inference tensors, such as buffers that a validation has made, change in inference mode alone.
            with torch.inference_mode(any(each.is_inference() for each in tensors)), torch.no_grad():
                for indices, views in self._parts:
                    torch._foreach_copy_([tensors[index] for index in indices], views)
