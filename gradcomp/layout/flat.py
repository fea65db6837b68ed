"""Tensors in a flat buffer, one after another, or by the shards of ranks: positions, computed from shapes."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate


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
        # Without gaps; strides of dimensions of length 1 don't matter.
        self.are_row_major = tuple(
            all(length == 1 or each == expected for length, each, expected in zip(*row, strict=True))
            for row in zip(self.shapes, self.strides, map(_row_major, self.shapes), strict=True)
        )
        self.numels = tuple(math.prod(shape) for shape in self.shapes)
        *offsets, self.numel = accumulate(self.numels, initial=0)
        self.offsets = tuple(offsets)

    def __len__(self) -> int:
        return len(self.shapes)

    def __repr__(self) -> str:
        return f"FlatLayout({len(self)} tensors, {self.numel} elements)"

    def tiles(self, block: int) -> Iterator[tuple[int, int, int, int]]:
        """Cut every tensor into tiles of at most `block` elements.

        Yields (tensor's index, first element in the tensor, first element in the buffer, number of elements).
        Empty tensors have no tile.
        """
        for index, (numel, offset) in enumerate(zip(self.numels, self.offsets, strict=True)):
            for start in range(0, numel, block):
                yield index, start, offset + start, min(block, numel - start)


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
        """Return a shard's elements among all tensors' elements, without padding.

        position: the tensor's position among the tensors.
        """
        length, numel = self._row.numels[position], self._tensors.numels[position]
        offset = self._tensors.offsets[position]
        return slice(offset + min(row * length, numel), offset + min((row + 1) * length, numel))

    def shards(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield (row, a shard's elements among all tensors' elements, its elements in the row)."""
        for row in range(self.world_size):
            for position, start in enumerate(self._row.offsets):
                shard = self.shard(row, position)
                yield row, shard, slice(start, start + shard.stop - shard.start)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that torch gives a contiguous tensor of this shape."""
    steps = accumulate(reversed([max(length, 1) for length in shape[1:]]), operator.mul, initial=1)
    return tuple(reversed(list(steps)))[len(shape) == 0 :]
