"""The layout of tensors in a flat buffer, and its division into tiles, computed from shapes."""

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
        self.are_row_major = tuple(map(_is_row_major, self.shapes, self.strides))
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


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that torch gives a contiguous tensor of this shape."""
    steps = accumulate(reversed([max(length, 1) for length in shape[1:]]), operator.mul, initial=1)
    return tuple(reversed(list(steps)))[len(shape) == 0 :]


def _is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether strides without gaps are row-major; strides of dimensions of length 1 don't matter."""
    pairs = zip(shape, strides, _row_major(shape), strict=True)
    return all(length == 1 or stride == expected for length, stride, expected in pairs)
