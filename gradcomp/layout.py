"""The positions of tensors in a bucket, of ranks' shards, of quantized blocks, and of factors on the wire.

All are computed from shapes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

ALIGNMENT_BYTES = 16  # each section of a payload starts at a multiple
SCALE_BYTES = 2
MAX_BLOCK_SIZE = 4096  # elements; a kernel's program holds a whole block in registers


class FlatLayout:
    """The layout of a list of tensors in one flat buffer, one after another without padding.

    shapes: the tensors' shapes.
    strides: the order of each tensor's elements in the buffer, as strides without gaps (a channels-last
        tensor's, for example); None for row-major order.

    Tensor i has the elements offsets[i] .. offsets[i] + numels[i] of the buffer's numel elements.

    Use one layout for one list of tensors: ops keeps the tensors' addresses while the layout lives.
    """

    def __init__(self, shapes: Iterable[Sequence[int]], strides: Iterable[Sequence[int]] | None = None):
        self.shapes = tuple(tuple(shape) for shape in shapes)
        given = map(_row_major, self.shapes) if strides is None else strides
        self.strides = tuple(tuple(each) for each in given)
        self.numels = tuple(math.prod(shape) for shape in self.shapes)
        *offsets, self.numel = accumulate(self.numels, initial=0)
        self.offsets = tuple(offsets)

    def parts(self, flat: Any) -> list[Any]:
        """Return the tensors as views of a flat buffer."""
        start, described = flat.storage_offset(), zip(self.shapes, self.strides, self.offsets, strict=True)
        return [flat.as_strided(shape, strides, start + offset) for shape, strides, offset in described]


class ShardLayout:
    """The order of tensors in a buffer that is reduce-scattered: one row per rank.

    A tensor is cut along its first dimension into world_size shards of equal length. The last shards may be
    padded with zeros, or be padding alone. Row r has shard r of every tensor:

        row 0: shard 0 of tensor 0, shard 0 of tensor 1, …    row 1: shard 1 of tensor 0, …

    numel: the number of elements of all tensors, without padding.
    shard_shapes: the shape of each tensor's shards, padding included.
    row_numel: the number of elements in a row.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], world_size: int):
        self.world_size = world_size
        self.shard_shapes = [(-(-shape[0] // world_size), *shape[1:]) for shape in shapes]
        self._tensors, self._row = FlatLayout(shapes), FlatLayout(self.shard_shapes)
        self.numel, self.row_numel = self._tensors.numel, self._row.numel

    def shard(self, row: int, position: int) -> slice:
        """Return a shard of the tensor at this position, among all tensors' elements, without padding."""
        length, numel = self._row.numels[position], self._tensors.numels[position]
        offset = self._tensors.offsets[position]
        return slice(offset + min(row * length, numel), offset + min((row + 1) * length, numel))

    def shards(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield (row, a shard's elements among all tensors' elements, its elements in the row)."""
        for row in range(self.world_size):
            for position, start in enumerate(self._row.offsets):
                shard = self.shard(row, position)
                yield row, shard, slice(start, start + shard.stop - shard.start)


@dataclass(frozen=True)
class Matrix:
    """A compressed tensor, seen as a matrix M [rows, cols].

    offset: the matrix's first element in the bucket.
    numel: the number of the matrix's elements in the bucket. For the square view of a whole bucket this is
        less than rows · cols, because the padding is not in the bucket.
    rank: the rank of its factors P [rows, rank] and Q [cols, rank].
    draw: seed + draw is the seed of its random directions.
    tensor: the tensor's position among the bucket's tensors; −1 for a square view.
    """

    offset: int
    rows: int
    cols: int
    numel: int
    rank: int = 1
    draw: int = 0
    tensor: int = -1


def is_compressed(shape: Sequence[int], rank: int, min_compression_rate: float) -> bool:
    """Return whether PowerSGD compresses a tensor of this shape.

    A tensor of two or more dimensions is a matrix: rows = its first dimension, cols = the product of the
    others. It is compressed if that saves enough elements:
    (rows + cols) · min(rows, cols, rank) · min_compression_rate < rows · cols.
    """
    if len(shape) < 2:
        return False
    rows, cols = shape[0], math.prod(shape[1:])
    return (rows + cols) * min(rows, cols, rank) * min_compression_rate < rows * cols


class PowerSGDLayout:
    """The tensors of a bucket that PowerSGD compresses, and the positions of their factors on the wire.

    shapes: the shapes of the bucket's tensors, which are stored one after another. is_compressed decides
        which tensors are compressed. All other tensors are averaged uncompressed.
    rank: the largest rank of a matrix's factors.
    min_compression_rate: see is_compressed.
    draws: for each tensor, its Matrix.draw; None: its position.

    numel: the number of elements in the bucket.
    groups: the compressed matrices, grouped by shape.
    matrices: all compressed matrices, in the order of groups.
    uncompressed: (offset, numel) of every uncompressed tensor.
    p_numels, q_numels: the number of elements of each P and of each Q, in the order of `matrices`.
    p_numel, q_numel: their sums.
    wire_numel: the number of elements of all P and the uncompressed tensors, which are sent together. The
        kernels' wires also hold padding (kernels/powersgd/work.py).
    """

    def __init__(
        self,
        shapes: Iterable[Sequence[int]],
        rank: int,
        min_compression_rate: float,
        draws: Sequence[int] | None = None,
    ):
        matrices, uncompressed = [], []
        flat = FlatLayout(shapes)
        draws = range(len(flat.shapes)) if draws is None else draws
        described = zip(flat.shapes, flat.offsets, flat.numels, draws, strict=True)
        for index, (shape, offset, numel, draw) in enumerate(described):
            if is_compressed(shape, rank, min_compression_rate):
                rows, cols = shape[0], numel // shape[0]
                matrices.append(Matrix(offset, rows, cols, numel, min(rows, cols, rank), draw, index))
            else:
                uncompressed.append((offset, numel))
        self._set(flat.numel, matrices, uncompressed)

    @classmethod
    def square(cls, numel: int, rank: int) -> PowerSGDLayout:
        """Return the layout of a whole bucket as one square matrix, padded with zeros."""
        layout = cls.__new__(cls)
        side = math.isqrt(numel - 1) + 1 if numel else 0
        matrices = [Matrix(0, side, side, numel, min(side, rank))] if numel else []
        layout._set(numel, matrices, [])
        return layout

    def _set(self, numel: int, matrices: list[Matrix], uncompressed: list[tuple[int, int]]) -> None:
        self.numel = numel
        by_shape: dict[tuple[int, int], list[Matrix]] = {}
        for matrix in matrices:
            by_shape.setdefault((matrix.rows, matrix.cols), []).append(matrix)
        self.groups = tuple(tuple(group) for group in by_shape.values())
        self.matrices = tuple(matrix for group in self.groups for matrix in group)
        self.uncompressed = tuple(uncompressed)
        self.p_numels = [matrix.rows * matrix.rank for matrix in self.matrices]
        self.q_numels = [matrix.cols * matrix.rank for matrix in self.matrices]
        self.p_numel, self.q_numel = sum(self.p_numels), sum(self.q_numels)
        self.wire_numel = self.p_numel + sum(numel for _, numel in uncompressed)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that torch gives a contiguous tensor of this shape."""
    return tuple(math.prod(max(each, 1) for each in shape[dim + 1 :]) for dim in range(len(shape)))


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

    def piece(self, num_shards: int) -> BlockLayout:
        """Return the layout of this many shards, as one tensor of blocks and one of exact elements."""
        shapes = (num_shards * self.num_blocks, self.block_size), (num_shards * self.exact_numel,)
        return BlockLayout(shapes, self.block_size, num_shards)

    def runs_between(self, start: int, stop: int) -> tuple[Part, ...]:
        """Return the runs with elements between start and stop in the padded blocks."""
        first = bisect_right(self.runs, start, key=lambda run: run.stored.stop)
        return self.runs[first : bisect_left(self.runs, stop, key=lambda run: run.stored.start)]

    def code_bytes(self, bits: int) -> int:
        """Return the number of bytes of a block's codes."""
        return self.block_size * bits // 8

    def sections(self, bits: int, exact_bytes: int) -> tuple[list[slice], int]:
        """Return (slices of the codes, scales and exact elements in a shard's payload, payload's bytes).

        bits: the bits of a code.
        exact_bytes: the bytes of an exact element.
        """
        of_blocks = self.num_blocks * self.code_bytes(bits), self.num_blocks * SCALE_BYTES
        sections, start = [], 0
        for size in (*of_blocks, self.exact_numel * exact_bytes):
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
