"""The quantized reduce-scatter of one bucket: the first half of a quantized all-reduce, with one collective.

    rank r    bucket + error ──quantize──▶ row 0 │ row 1 │ … │ row W−1
    all-to-all: every rank gets its own row from all ranks
    owner     its own row + Σ dequantized, in fp32: the shard

Nothing is quantized twice, and a rank's own row not at all. Hierarchical, it is exact within each node:

    node i, place j    rows j, g + j, 2g + j, … of the bucket are piece j
    reduce-scatter within the node: the rank of place j gets the node's sum of piece j
    quantized reduce-scatter of piece j between the n ranks of place j: a row per node

A rank then quantizes, and keeps errors for, one piece: a g-th of the bucket.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradcomp import ops
from gradcomp.layout import BlockLayout, ShardLayout

from ..comm.exchange import Works, reduce_scatter
from ..comm.nodes import nodes_of
from .compressor import BucketSpec
from .quantized_all_reduce import Codes, add_to_pieces, unit_within, zeros_of

# Returns the blocks of tensors of these shapes in a number of shards.
LayoutOf = Callable[[Sequence[Sequence[int]], int], BlockLayout]


class ReduceScatter:
    """The quantized reduce-scatter of one bucket, with the methods of QuantizedAllReduce.

    layout_of: returns the blocks of tensors.
    spec: what the bucket is made for; its is_shard is true.
    bits, error_feedback, uncompressed_dtype: see ops.encoder.

    layout: the blocks of the rows that this rank quantizes.
    num_bytes: the bytes of a reduce-scatter that sends as much per rank; with nodes, per node.
    unit: the errors are multiplied by it; see QuantizedAllReduce.
    error: the errors of the blocks that this rank quantizes, times unit; None without error feedback.
    kept: (elements among all tensors' elements, their errors in `error`) pairs.
    """

    def __init__(
        self,
        layout_of: LayoutOf,
        spec: BucketSpec,
        *,
        bits: int = 8,
        error_feedback: bool,
        uncompressed_dtype: torch.dtype | None,
    ):
        self._shards, self._ranks_per_node = ShardLayout(spec.shapes, spec.world_size), spec.ranks_per_node
        shapes, num_rows = self._shards.shard_shapes, spec.world_size // spec.ranks_per_node
        self.layout, of_row = layout_of(shapes * num_rows, num_rows), layout_of(shapes, 1)
        self.unit, self._dtype = unit_within(spec.ranks_per_node), spec.dtype
        if spec.ranks_per_node > 1:
            # A node's sums of exact elements are sent in fp32 (fp64), so that they aren't rounded.
            self._dtype = torch.promote_types(spec.dtype, torch.float32)
            uncompressed_dtype = uncompressed_dtype or self._dtype
            self._copy = ops.PartsCopy(list(self._copies()), spec.device)
        options: dict[str, Any] = {"bits": bits, "uncompressed_dtype": uncompressed_dtype}
        like = replace(spec, shapes=tuple(map(tuple, shapes)), seed=0, draws=None)
        sizes = self.layout.block_size, self.layout.num_blocks
        self._key = (like, *sizes, error_feedback, *options.values())
        arguments = self.layout, self._dtype, spec.device
        self.error = zeros_of(*arguments, self.layout.world_size) if error_feedback else None
        options |= {"averages_dtype": spec.dtype, "divisor": self.unit}
        self._make_codes = partial(Codes, *arguments, self.error, of_row=of_row, **options)
        _, num_bytes = self.layout.sections(bits, (uncompressed_dtype or self._dtype).itemsize)
        self.num_bytes = spec.world_size * num_bytes
        self.kept = list(self._kept(spec.place))

    @property
    def operations(self) -> list[ops.Operation]:
        """The operations of a step."""
        return self._make_codes().operations

    def _kept(self, place: int) -> Iterator[tuple[slice, slice]]:
        num_tensors = len(self._shards.shard_shapes)
        for part in self.layout.quantized:
            node, position = divmod(part.position, num_tensors)
            shard = self._shards.shard(node * self._ranks_per_node + place, position)
            yield shard, slice(part.stored.start, part.stored.start + shard.stop - shard.start)

    def reduce(
        self, flat: Tensor, out: Tensor, group: ProcessGroup, unused: Collection[int] = (),
        rest: Tensor | None = None,
    ) -> Works:  # fmt: skip
        """Write the sum over the ranks of this rank's row to out. Yields each collective in progress.

        flat: [world size · n], a ShardBucket's buffer. It may be changed.
        out: [n], in flat's dtype.
        unused: the tensors are sent all the same.
        rest: [numel of all tensors], values to add to the gradients.
        """
        if not flat.numel():
            return
        if self._ranks_per_node > 1:
            nodes = nodes_of(group, self._ranks_per_node)
            pieces = flat.new_empty(nodes.ranks_per_node, self.layout.numel, dtype=self._dtype)
            self._copy(flat, pieces.view(-1), self.unit)
            if rest is not None:
                self._add(rest, pieces)
            flat, group = torch.empty_like(pieces[0]), nodes.between
            yield from reduce_scatter(flat, pieces, nodes.within)
        elif rest is not None:
            self._add(rest, flat)
        self.codes = codes = _shared.free.pop(self._key, None) or self._make_codes()
        codes.error = self.error
        yield from codes.exchange(flat, group)
        codes.add(out, group.rank())
        _shared.free[self._key] = codes

    def _copies(self) -> Iterator[tuple[slice, slice]]:
        """Yield (a row's slice of the bucket, its slice of the pieces)."""
        numel = self._shards.row_numel
        for row in range(self._shards.world_size):
            start = self._piece_start(row)
            yield slice(row * numel, (row + 1) * numel), slice(start, start + numel)

    def _piece_start(self, row: int) -> int:
        """Return where a row begins among the pieces of all places."""
        node, place = divmod(row, self._ranks_per_node)
        return place * self.layout.numel + node * self._shards.row_numel

    def _add(self, rest: Tensor, pieces: Tensor) -> None:
        """Add unit times values in the order of whole tensors to the pieces."""
        copies = []
        for row, in_tensors, in_row in self._shards.shards():
            start = self._piece_start(row)
            copies.append((in_tensors, slice(start + in_row.start, start + in_row.stop)))
        add_to_pieces(rest, pieces, copies, self.unit)


class _Shared(threading.local):
    """A thread's codes that no bucket uses, by what they depend on.

    Buckets of equal shapes take them in turns, so a model of many equal layers has one. Two buckets under way
    have two. They go with the last compressor that has used them.
    """

    def __init__(self) -> None:
        self.free: WeakValueDictionary[Any, Codes] = WeakValueDictionary()


_shared = _Shared()
