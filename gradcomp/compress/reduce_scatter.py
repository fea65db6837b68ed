"""The quantized reduce-scatter of one bucket: the first half of a quantized all-reduce, with one collective.

    rank r    bucket + error ──quantize──▶ row 0 │ row 1 │ … │ row W−1
    all-to-all: every rank gets its own row from all ranks
    owner     its own row + Σ dequantized, in fp32: the shard

Nothing is quantized twice, and a rank's own row not at all. Hierarchical, it is exact within each node (or in
16 bits):

    node i, place j    rows j, g + j, 2g + j, … of the bucket are piece j
    reduce-scatter within the node: the rank of place j gets the node's sum of piece j
    quantized reduce-scatter of piece j between the n ranks of place j: a row per node

A rank then quantizes, and keeps errors for, one piece: a g-th of the bucket.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradcomp import ops
from gradcomp.layout.blocks import BlockLayout
from gradcomp.layout.flat import ShardLayout

from ..comm.exchange import Works, all_to_all, reduce_scatter
from ..comm.nodes import nodes_of
from .compressor import BucketSpec
from .quantized_all_reduce import add_to_pieces, piece_dtypes, unit_within

# Returns the blocks of tensors of these shapes in a number of shards.
LayoutOf = Callable[[Sequence[Sequence[int]], int], BlockLayout]


class ReduceScatter:
    """The quantized reduce-scatter of one bucket, with the methods of FlatAllReduce.

    layout_of: returns the blocks of tensors.
    spec: what the bucket is made for; its is_shard is true.
    bits, error_feedback, uncompressed_dtype, within_dtype: see ops.quantized_plan and HierarchicalAllReduce.

    layout: the blocks of the rows that this rank quantizes.
    num_bytes: the bytes of a reduce-scatter that sends as much per rank; with nodes, per node.
    unit: the errors are multiplied by it; see HierarchicalAllReduce.
    error: the errors of the blocks that this rank quantizes, times unit; None without error feedback.
    """

    def __init__(self, layout_of: LayoutOf, spec: BucketSpec, **options: Any):
        self._shards = ShardLayout(spec.shapes, spec.world_size)
        self._ranks_per_node, self._device = spec.ranks_per_node, spec.device
        self.layout, self._dtype, self._plan_options = _plan_arguments(layout_of, spec, **options)
        like = replace(spec, shapes=tuple(map(tuple, self._shards.shard_shapes)), seed=0, draws=None)
        self._key = (like, self.layout.block_size, self.layout.num_blocks, *options.items())
        self.unit, self._within_dtype = 1.0, self._dtype
        if spec.ranks_per_node > 1:
            self.unit = unit_within(spec.ranks_per_node)
            self._within_dtype, _ = piece_dtypes(spec.dtype, options["within_dtype"])
            self._copy = ops.PartsCopy(list(self._copies()), spec.device)
        self.error: Tensor | None = None
        if options["error_feedback"]:
            numel = self.layout.world_size * self.layout.shard_numel
            wide = torch.promote_types(self._dtype, torch.float32)
            self.error = torch.zeros(numel, dtype=wide, device=spec.device)
        exact_bytes = (self._plan_options["uncompressed_dtype"] or self._dtype).itemsize
        self.num_bytes = spec.world_size * self.layout.sections(self._plan_options["bits"], exact_bytes)[1]

    def kept(self, place: int) -> Iterator[tuple[slice, slice]]:
        """Yield (elements among all tensors' elements, their errors in `error`) of this place's rows."""
        num_tensors = len(self._shards.shard_shapes)
        for part in self.layout.quantized:
            node, position = divmod(part.position, num_tensors)
            shard = self._shards.shard(node * self._ranks_per_node + place, position)
            yield shard, slice(part.stored.start, part.stored.start + shard.stop - shard.start)

    def reduce(
        self, flat: Tensor, out: Tensor, group: ProcessGroup, unused: Collection[int], rest: Tensor | None
    ) -> Works:
        """Write the sum over the ranks of this rank's row to out. Yields each collective in progress.

        flat: [world size · n], a ShardBucket's buffer. It may be changed.
        out: [n], in flat's dtype.
        unused: the tensors are sent all the same.
        rest: [numel of all tensors], values to add to the gradients.
        """
        if not flat.numel():
            return
        if self._ranks_per_node == 1:
            if rest is not None:
                self._add(rest, flat)
            yield from self._sum(flat, out, group)
            return
        nodes = nodes_of(group, self._ranks_per_node)
        pieces = flat.new_empty(nodes.ranks_per_node, self.layout.numel, dtype=self._within_dtype)
        self._copy(flat, pieces.view(-1), self.unit)
        if rest is not None:
            self._add(rest, pieces)
        piece = torch.empty_like(pieces[0])
        yield from reduce_scatter(piece, pieces, nodes.within)
        yield from self._sum(piece.to(self._dtype), out, nodes.between)

    def _sum(self, flat: Tensor, out: Tensor, group: ProcessGroup) -> Works:
        """Write the sum over the ranks of this rank's row, divided by unit, to out."""
        plan = _plans.free.pop(self._key, None) or ops.quantized_plan(
            self.layout, self._dtype, self._device, **self._plan_options
        )
        self.plan = plan
        if self.error is not None:
            plan.error = self.error
        plan.quantize(flat, group.rank())
        yield all_to_all(plan.received, plan.payload, group)
        plan.sum(out, group.rank())
        _plans.free[self._key] = plan

    def _piece_start(self, row: int) -> int:
        """Return where a row begins among the pieces of all places."""
        node, place = divmod(row, self._ranks_per_node)
        return place * self.layout.numel + node * self._shards.row_numel

    def _copies(self) -> Iterator[tuple[slice, slice]]:
        """Yield (a row's slice of the bucket, its slice of the pieces)."""
        numel = self._shards.row_numel
        for row in range(self._shards.world_size):
            start = self._piece_start(row)
            yield slice(row * numel, (row + 1) * numel), slice(start, start + numel)

    def _add(self, rest: Tensor, pieces: Tensor) -> None:
        """Add unit times values in the order of whole tensors to the pieces."""
        copies = []
        for row, in_tensors, in_row in self._shards.shards():
            start = self._piece_start(row)
            copies.append((in_tensors, slice(start + in_row.start, start + in_row.stop)))
        add_to_pieces(rest, pieces, copies, self.unit)


def compile_reduce_scatter(layout_of: LayoutOf, spec: BucketSpec, **options: Any) -> None:
    """Compile the kernels that a ReduceScatter with these arguments launches."""
    layout, dtype, plan_options = _plan_arguments(layout_of, spec, **options)
    ops.compile_quantized(layout, dtype, spec.device, **plan_options)


def _plan_arguments(
    layout_of: LayoutOf, spec: BucketSpec, *, within_dtype: torch.dtype | None, bits: int = 8, **options: Any
) -> tuple[BlockLayout, torch.dtype, dict[str, Any]]:
    """Return the arguments of ops.quantized_plan: the layout, the dtype, and the options by name."""
    num_rows = spec.world_size // spec.ranks_per_node
    layout = layout_of(ShardLayout(spec.shapes, spec.world_size).shard_shapes * num_rows, num_rows)
    options |= {"bits": bits, "averages_dtype": spec.dtype, "only_sums": True}
    options["divisor"] = unit_within(spec.ranks_per_node)
    if spec.ranks_per_node == 1:
        return layout, spec.dtype, options
    _, dtype = piece_dtypes(spec.dtype, within_dtype)
    # A node's sums of exact elements are sent in fp32 (fp64), so that they aren't rounded.
    wide = torch.promote_types(spec.dtype, torch.float32)
    options["uncompressed_dtype"] = options["uncompressed_dtype"] or wide
    return layout, dtype, options


class _Plans(threading.local):
    """A thread's plans that no bucket uses, by what they depend on.

    Buckets of equal shapes take one plan in turns, so a model of many equal layers has one. Two buckets under
    way have two. A plan goes with the last compressor that has used it.
    """

    def __init__(self) -> None:
        self.free: WeakValueDictionary[Any, ops.QuantizedPlan] = WeakValueDictionary()


_plans = _Plans()
