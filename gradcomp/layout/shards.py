"""The shards of tensors that a reduce-scatter divides among ranks, computed from shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .flat import FlatLayout


class ShardLayout:
    """The order of tensors in a buffer that is reduce-scattered: one row per rank.

    A tensor is cut along its first dimension into world_size shards of equal length. The last shards may be
    padded with zeros, or be padding alone. Row r has shard r of every tensor:

        row 0: shard 0 of tensor 0, shard 0 of tensor 1, …    row 1: shard 1 of tensor 0, …

    shapes: the tensors' shapes.
    world_size: the number of ranks.

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

    def __repr__(self) -> str:
        return f"ShardLayout({len(self.shard_shapes)} tensors, {self.world_size} rows of {self.row_numel})"
