"""The blocks in which a bucket is quantized, and the shards that the ranks own, computed from shapes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .flat import FlatLayout

ALIGNMENT_BYTES = 16  # each section of a payload starts at a multiple
SCALE_BYTES = 2
MAX_BLOCK_SIZE = 4096  # elements; a kernel's program holds a whole block in registers


@dataclass(frozen=True)
class Part:
    """A tensor's positions in the bucket and in a BlockLayout.

    position: the tensor's position among the bucket's tensors.
    in_bucket: the tensor's elements in the bucket.
    stored: a quantized tensor's elements in the padded blocks, or an exact tensor's among the exact elements.
    """

    position: int
    in_bucket: slice
    stored: slice


class BlockLayout:
    """The blocks of a bucket's tensors, divided among world_size shards.

    A tensor of two or more dimensions with at least block_size elements is quantized. It is cut into blocks,
    and its last block is padded with zeros, so no block has elements of two tensors. All other tensors are
    exact: they are sent without quantization.

    shapes: the tensors' shapes.
    block_size: the number of elements in a block.
    world_size: the number of shards, one per rank.
    offsets: where each tensor begins in the bucket; None: one after another.

    numel: the number of elements in the bucket.
    quantized, exact: a Part for each quantized tensor and for each exact tensor.
    runs: the quantized parts, with adjacent parts merged if there is no padding between them.
    num_blocks: the number of blocks in a shard. All shards have equal size, so the last ones may be padded.
    exact_numel: the number of exact elements in a shard, padded in the same way.
    """

    def __init__(
        self,
        shapes: Iterable[Sequence[int]],
        block_size: int,
        world_size: int,
        offsets: Sequence[int] | None = None,
    ):
        flat = FlatLayout(shapes)
        quantized, exact = [], []
        num_blocks = exact_numel = 0
        sizes = zip(flat.shapes, offsets or flat.offsets, flat.numels, strict=True)
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

    @property
    def quantized_numel(self) -> int:
        """The number of elements that are quantized, in all shards, without padding."""
        return sum(part.stored.stop - part.stored.start for part in self.quantized)

    def shard(self, rank: int) -> slice:
        """Return the slice of the padded blocks that a rank owns."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def piece(self, num_shards: int) -> BlockLayout:
        """Return the layout of this many shards, as one tensor of blocks and one of exact elements."""
        shapes = (num_shards * self.num_blocks, self.block_size), (num_shards * self.exact_numel,)
        return BlockLayout(shapes, self.block_size, num_shards)

    def parts_of(self, positions: Collection[int]) -> list[Part]:
        """Return the quantized parts of the tensors at these positions of the bucket."""
        return [part for part in self.quantized if part.position in positions]

    def runs_between(self, start: int, stop: int) -> Iterator[Part]:
        """Yield the runs with elements between start and stop in the padded blocks."""
        for run in self.runs[max(0, bisect_right(self._run_starts, start) - 1) :]:
            if run.stored.start >= stop:
                return
            if run.stored.stop > start:
                yield run

    def code_bytes(self, bits: int) -> int:
        """Return the number of bytes of a block's codes."""
        return self.block_size * bits // 8

    def sections(self, bits: int, exact_bytes: int) -> tuple[list[slice], int]:
        """Return (slices of the codes, scales and exact elements in a shard's payload, payload's bytes).

        bits: the bits of a code; codes of 16 bits have no scales.
        exact_bytes: the bytes of an exact element.
        """
        sizes = [
            self.num_blocks * self.code_bytes(bits),
            self.num_blocks * (SCALE_BYTES if bits < 16 else 0),
            self.exact_numel * exact_bytes,
        ]
        sections, start = [], 0
        for size in sizes:
            sections.append(slice(start, start + size))
            start += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return sections, start


def _merged(parts: Iterable[Part]) -> list[Part]:
    """Return parts. Parts that are adjacent both in the bucket and in the blocks are merged."""
    runs: list[Part] = []
    for part in parts:
        last = runs[-1] if runs else None
        if last and last.stored.stop == part.stored.start and last.in_bucket.stop == part.in_bucket.start:
            in_bucket = slice(last.in_bucket.start, part.in_bucket.stop)
            runs[-1] = Part(last.position, in_bucket, slice(last.stored.start, part.stored.stop))
        else:
            runs.append(part)
    return runs
