"""The blocks in which a bucket is quantised, and the shards that the ranks own: arithmetic on shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .flat import FlatLayout

ALIGNMENT_BYTES = 16  # of each section of a payload


@dataclass(frozen=True)
class Part:
    """A tensor of a bucket, and where it is stored.

    position: its position among the bucket's tensors. in_bucket: its elements there. stored: its elements
    among the padded blocks for a quantised tensor, among the exact elements for another.
    """

    position: int
    in_bucket: slice
    stored: slice


class BlockLayout:
    """The blocks of a bucket's tensors, divided among world_size shards.

    A tensor of two or more dimensions with at least block_size elements is quantised: it is cut into blocks,
    the last of which is padded with zeros, so no block has elements of two tensors. The other tensors are
    sent exactly.

    shapes: the tensors' shapes. quantised, exact: the tensors of either sort.
    num_blocks, exact_numel: of a shard; shards are of one size, so the last ones may be padded.
    """

    def __init__(self, shapes: Iterable[Sequence[int]], block_size: int, world_size: int):
        flat = FlatLayout(shapes)
        quantised, exact = [], []
        num_blocks = exact_numel = 0
        sizes = zip(flat.shapes, flat.offsets, flat.numels, strict=True)
        for position, (shape, offset, numel) in enumerate(sizes):
            in_bucket = slice(offset, offset + numel)
            if len(shape) > 1 and numel >= block_size:
                start = num_blocks * block_size
                quantised.append(Part(position, in_bucket, slice(start, start + numel)))
                num_blocks += -(-numel // block_size)
            elif numel:
                exact.append(Part(position, in_bucket, slice(exact_numel, exact_numel + numel)))
                exact_numel += numel
        self.numel, self.block_size, self.world_size = flat.numel, block_size, world_size
        self.quantised, self.exact = tuple(quantised), tuple(exact)
        self.num_blocks = -(-num_blocks // world_size)
        self.exact_numel = -(-exact_numel // world_size)

    @property
    def padding(self) -> list[slice]:
        """The elements of the padded blocks that no tensor has."""
        if not self.quantised:
            return []
        ends = [part.stored.stop for part in self.quantised]
        starts = [*(part.stored.start for part in self.quantised[1:]), self.world_size * self.shard_numel]
        return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    @property
    def shard_numel(self) -> int:
        """The number of elements in a shard's blocks."""
        return self.num_blocks * self.block_size

    def sections(self, code_bytes: int, scale_bytes: int, exact_bytes: int) -> tuple[list[slice], int]:
        """Return where a shard's payload has its codes, scales and exact elements, and its length in bytes.

        code_bytes: per block. scale_bytes: per block. exact_bytes: per element.
        """
        sizes = [self.num_blocks * code_bytes, self.num_blocks * scale_bytes, self.exact_numel * exact_bytes]
        sections, start = [], 0
        for size in sizes:
            sections.append(slice(start, start + size))
            start += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return sections, start
