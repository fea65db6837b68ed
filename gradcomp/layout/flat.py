"""The positions of tensors in a flat buffer, and how the buffer is cut into tiles: arithmetic on shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate


class FlatLayout:
    """The positions of a list of tensors in one flat buffer, one after another without padding.

    shapes: the tensors' shapes. Tensor i, in row-major order, occupies the elements
    offsets[i] .. offsets[i] + numels[i] of a buffer of numel elements.

    A layout stands for one list of tensors: ops keeps its tables for as long as the layout lives.
    """

    def __init__(self, shapes: Iterable[Sequence[int]]):
        self.shapes = tuple(tuple(shape) for shape in shapes)
        self.numels = tuple(math.prod(shape) for shape in self.shapes)
        *offsets, self.numel = accumulate(self.numels, initial=0)
        self.offsets = tuple(offsets)

    def __len__(self) -> int:
        return len(self.shapes)

    def __repr__(self) -> str:
        return f"FlatLayout({len(self)} tensors, {self.numel} elements)"

    def tiles(self, block: int) -> Iterator[tuple[int, int, int, int]]:
        """Cut every tensor into tiles of at most `block` elements.

        Yields (tensor index, first element within the tensor, first element within the buffer,
        number of elements). Empty tensors have no tile.
        """
        for index, (numel, offset) in enumerate(zip(self.numels, self.offsets, strict=True)):
            for start in range(0, numel, block):
                yield index, start, offset + start, min(block, numel - start)
