"""The blocks in which a bucket is quantized, and the shards that the ranks own: arithmetic on shapes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .flat import FlatLayout

ALIGNMENT_BYTES = 16  # of each section of a payload
SCALE_BYTES = 2
MAX_BLOCK_SIZE = 4096  # elements; a program of the kernels holds a block in its registers


@dataclass(frozen=True)
class Part:
    """A tensor of a bucket, and where it is stored.

    position: its position among the bucket's tensors. in_bucket: its elements there. stored: its elements
    among the padded blocks for a quantized tensor, among the exact elements for another.
    """

    position: int
    in_bucket: slice
    stored: slice


class BlockLayout:
    """The blocks of a bucket's tensors, divided among world_size shards.

    A tensor of two or more dimensions with at least block_size elements is quantized: it is cut into blocks,
    the last of which is padded with zeros, so no block has elements of two tensors. The other tensors are
    sent exactly.

    shapes: the tensors' shapes. quantized, exact: the tensors of either sort. runs: the quantized ones, those
    that follow one another without padding as one.
    num_blocks, exact_numel: of a shard; shards are of one size, so the last ones may be padded.
    """

    def __init__(self, shapes: Iterable[Sequence[int]], block_size: int, world_size: int):
        flat = FlatLayout(shapes)
        quantized, exact = [], []
        num_blocks = exact_numel = 0
        sizes = zip(flat.shapes, flat.offsets, flat.numels, strict=True)
        for position, (shape, offset, numel) in enumerate(sizes):
            in_bucket = slice(offset, offset + numel)
            if len(shape) > 1 and numel >= block_size:
                start = num_blocks * block_size
                quantized.append(Part(position, in_bucket, slice(start, start + numel)))
                num_blocks += -(-numel // block_size)
            elif numel:
                exact.append(Part(position, in_bucket, slice(exact_numel, exact_numel + numel)))
                exact_numel += numel
        self.numel, self.block_size, self.world_size = flat.numel, block_size, world_size
        self.quantized, self.exact = tuple(quantized), tuple(exact)
        self.runs = tuple(_merged(quantized))
        self._run_starts = [run.stored.start for run in self.runs]
        self.num_blocks = -(-num_blocks // world_size)
        self.exact_numel = -(-exact_numel // world_size)

    @property
    def shard_numel(self) -> int:
        """The number of elements in a shard's blocks."""
        return self.num_blocks * self.block_size

    def shard(self, rank: int) -> slice:
        """Return the elements of the padded blocks that a rank owns."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def runs_between(self, start: int, stop: int) -> Iterator[Part]:
        """Yield the runs that have elements in this range of the padded blocks."""
        for run in self.runs[max(0, bisect_right(self._run_starts, start) - 1) :]:
            if run.stored.start >= stop:
                return
            if run.stored.stop > start:
                yield run

    @property
    def padding(self) -> list[slice]:
        """The elements of the padded blocks that no tensor has."""
        ends = [0, *(run.stored.stop for run in self.runs)]
        starts = [*self._run_starts, self.world_size * self.shard_numel]
        return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def code_bytes(self, bits: int) -> int:
        """Return the bytes that the codes of a block have."""
        return self.block_size * bits // 8

    def sections(self, bits: int, exact_bytes: int) -> tuple[list[slice], int]:
        """Return where a shard's payload has its codes, scales and exact elements, and its length in bytes.

        bits: of a code. exact_bytes: of an exact element.
        """
        sizes = [
            self.num_blocks * self.code_bytes(bits),
            self.num_blocks * SCALE_BYTES,
            self.exact_numel * exact_bytes,
        ]
        sections, start = [], 0
        for size in sizes:
            sections.append(slice(start, start + size))
            start += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return sections, start


def _merged(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield parts, those that follow one another both in the bucket and in the blocks as one."""
    run: Part | None = None
    for part in parts:
        if run and run.stored.stop == part.stored.start and run.in_bucket.stop == part.in_bucket.start:
            in_bucket, stored = (
                slice(run.in_bucket.start, part.in_bucket.stop),
                slice(run.stored.start, part.stored.stop),
            )
            run = Part(run.position, in_bucket, stored)
        else:
            if run:
                yield run
            run = part
    if run:
        yield run
