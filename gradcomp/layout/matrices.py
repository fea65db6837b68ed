"""The matrices of a bucket that PowerSGD compresses, and their factors' positions, computed from shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .flat import FlatLayout


@dataclass(frozen=True)
class Matrix:
    """A compressed tensor, seen as a matrix M [rows, cols].

    offset: the matrix's first element in the bucket.
    numel: the number of the matrix's elements in the bucket. For the square view of a whole bucket this is
        less than rows · cols, because the padding is not in the bucket.
    rank: the rank of its factors P [rows, rank] and Q [cols, rank].
    draw: seed + draw is the seed of its random directions.
    """

    offset: int
    rows: int
    cols: int
    numel: int
    rank: int = 1
    draw: int = 0


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
        for shape, offset, numel, draw in zip(flat.shapes, flat.offsets, flat.numels, draws, strict=True):
            if is_compressed(shape, rank, min_compression_rate):
                rows, cols = shape[0], numel // shape[0]
                matrices.append(Matrix(offset, rows, cols, numel, min(rows, cols, rank), draw))
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

    def __repr__(self) -> str:
        return f"PowerSGDLayout({len(self.matrices)} matrices, {len(self.uncompressed)} uncompressed tensors)"
