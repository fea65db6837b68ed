"""Quantized reduce-scatter as a compressor: the first half of a quantized all-reduce, with one collective.

    rank r    bucket + error ──quantize──▶ row 0 │ row 1 │ … │ row W−1
    all-to-all: every rank gets its own row from all ranks
    owner     its own row + Σ dequantized, in fp32: the shard

Nothing is quantized twice, and a rank's own row not at all. By nodes, it is exact within each node (or in 16
bits):

    node i, place j    rows j, g + j, 2g + j, … of the bucket are piece j
    reduce-scatter within the node: the rank of place j gets the node's sum of piece j
    quantized reduce-scatter of piece j between the n ranks of place j: a row per node

A rank then quantizes, and keeps errors for, one piece: a g-th of the bucket.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.layout.blocks import BlockLayout
from gradcomp.layout.flat import ShardLayout

from ..comm.exchange import Works, all_to_all, reduce_scatter
from ..comm.nodes import nodes_of
from .compressor import BucketSpec, ShardCompressor, State
from .quantized_all_reduce import piece_dtypes, unit_within

if TYPE_CHECKING:
    from .quantized import QuantizedOptions


class QuantizedReduceScatter(ShardCompressor):
    """The quantized reduce-scatter of one bucket, with error feedback on the senders. Its state:

    "error": [numel], the values that the sums still lack from this rank.
    """

    is_same_on_all_processors = True

    def __init__(self, bucket: BucketSpec, options: "QuantizedOptions"):
        self._shards = ShardLayout(bucket.shapes, bucket.world_size)
        self._ranks_per_node = bucket.ranks_per_node
        self._layout, self._dtype, self._plan_options = _plan_arguments(bucket, options)
        self._key = (*map(tuple, self._shards.shard_shapes), replace(bucket, shapes=(), seed=0), options)
        self._device = bucket.device
        self._plan: ops.QuantizedPlan | None = None
        self._unit, self._within_dtype = 1.0, self._dtype
        if bucket.ranks_per_node > 1:
            self._unit = unit_within(bucket.ranks_per_node)
            self._within_dtype, _ = piece_dtypes(bucket.dtype, options.within_dtype)
            self._copy = ops.PartsCopy(list(self._copies()), bucket.device)
        # The errors of the blocks that this rank quantizes, times unit.
        self._error: torch.Tensor | None = None
        if options.error_feedback:
            numel = self._layout.world_size * self._layout.shard_numel
            wide = torch.promote_types(self._dtype, torch.float32)
            self._error = torch.zeros(numel, dtype=wide, device=bucket.device)
        self._place: int | None = None  # in the node, known from the first step on
        self._loaded: torch.Tensor | None = None  # until the next step
        # On CUDA the side stream may read it until the step ends, so it is freed in the step after.
        self._just_loaded: torch.Tensor | None = None
        exact_bytes = (self._plan_options["exact_dtype"] or self._dtype).itemsize
        _, num_bytes = self._layout.sections(self._plan_options["bits"], exact_bytes)
        # The number of elements in a reduce-scatter that sends as many bytes.
        self.sent_numel = -(-bucket.world_size * num_bytes // bucket.dtype.itemsize)

    @classmethod
    def warm_up(cls, bucket: BucketSpec, options: "QuantizedOptions") -> None:
        """Compile the kernels that the bucket's steps will launch."""
        layout, dtype, plan_options = _plan_arguments(bucket, options)
        ops.compile_quantized(layout, dtype, bucket.device, **plan_options)

    def reduce_scatter(self, flat: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Works:
        """Sum this rank's row in two stages; by nodes, in three. Yields each collective in progress."""
        if not flat.numel():
            return
        if self._ranks_per_node == 1:
            self._take_place(0)
            yield from self._sum(flat, shard, group)
            return
        nodes = nodes_of(group, self._ranks_per_node)
        rest = self._take_place(nodes.within.rank())
        pieces = flat.new_empty(nodes.ranks_per_node, self._layout.numel, dtype=self._within_dtype)
        self._copy(flat, pieces.view(-1), self._unit)
        if rest is not None:
            self._add(rest, pieces)
        piece = torch.empty_like(pieces[0])
        yield from reduce_scatter(piece, pieces, nodes.within)
        yield from self._sum(piece.to(self._dtype), shard, nodes.between)

    def _sum(self, flat: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Works:
        """Write the sum over the ranks of this rank's row, divided by unit, to shard."""
        plan = self._plan = _plans.free.pop(self._key, None) or ops.quantized_plan(
            self._layout, self._dtype, self._device, **self._plan_options
        )
        if self._error is not None:
            plan.error = self._error
        plan.quantize(flat, group.rank())
        yield all_to_all(plan.received, plan.payload, group)
        plan.sum(shard, group.rank())
        _plans.free[self._key] = plan

    # --- errors ---

    def state(self) -> State:
        if self._error is None:
            return {}
        if self._loaded is not None:
            return {"error": self._loaded.clone()}
        whole = self._error.new_zeros(self._shards.numel)
        for in_tensors, kept in self._kept():
            whole[in_tensors] = self._error[kept] / self._unit
        return {"error": whole}

    def load(self, state: State) -> None:
        if self._error is not None and "error" in state:
            like = {"device": self._error.device, "dtype": self._error.dtype}
            self._loaded = state["error"].to(**like, copy=True)

    def _take_place(self, place: int) -> torch.Tensor | None:
        """Take this rank's place in its node, and continue from the loaded errors.

        Returns the loaded errors of other places' rows, to be added to the gradients; None if nothing was
        loaded.
        """
        if self._place not in (None, place) and self._loaded is None and self._error is not None:
            self._loaded = self.state()["error"]  # the nodes have changed
        self._place = place
        rest = self._just_loaded = self._loaded
        self._loaded = None
        if rest is None or self._error is None:
            return None
        self._error.zero_()
        for in_tensors, kept in self._kept():
            self._error[kept] = rest[in_tensors] * self._unit
            rest[in_tensors] = 0.0
        return rest

    def _kept(self) -> Iterator[tuple[slice, slice]]:
        """Yield (elements among all tensors' elements, their errors among the blocks of this rank's rows)."""
        num_tensors, place = len(self._shards.shard_shapes), self._place or 0
        for part in self._layout.quantized:
            node, position = divmod(part.position, num_tensors)
            shard = self._shards.shard(node * self._ranks_per_node + place, position)
            yield shard, slice(part.stored.start, part.stored.start + shard.stop - shard.start)

    # --- by nodes ---

    def _piece_start(self, row: int) -> int:
        """Return where a row begins among the pieces of all places."""
        node, place = divmod(row, self._ranks_per_node)
        return place * self._layout.numel + node * self._shards.row_numel

    def _copies(self) -> Iterator[tuple[slice, slice]]:
        """Yield (a row's slice of the bucket, its slice of the pieces)."""
        numel = self._shards.row_numel
        for row in range(self._shards.world_size):
            start = self._piece_start(row)
            yield slice(row * numel, (row + 1) * numel), slice(start, start + numel)

    def _add(self, rest: torch.Tensor, pieces: torch.Tensor) -> None:
        """Add values in the order of whole tensors to the pieces."""
        for row, in_tensors, in_row in self._shards.shards():
            start = self._piece_start(row) + in_row.start
            pieces.view(-1)[start : start + in_row.stop - in_row.start] += rest[in_tensors] * self._unit


def _plan_arguments(
    bucket: BucketSpec, options: "QuantizedOptions"
) -> tuple[BlockLayout, torch.dtype, dict[str, Any]]:
    """Return the arguments of ops.quantized_plan: the layout, the dtype, and the options by name."""
    num_rows = bucket.world_size // bucket.ranks_per_node
    shapes = ShardLayout(bucket.shapes, bucket.world_size).shard_shapes
    layout = options.layout(shapes * num_rows, num_rows)
    plan_options = {
        **options.plan_options(),
        "averages_dtype": bucket.dtype,
        "only_sums": True,
        "divisor": 1.0,
    }
    if bucket.ranks_per_node == 1:
        return layout, bucket.dtype, plan_options
    _, dtype = piece_dtypes(bucket.dtype, options.within_dtype)
    # A node's sums of exact elements are sent in fp32 (fp64), so that they aren't rounded.
    exact_dtype = plan_options["exact_dtype"] or torch.promote_types(bucket.dtype, torch.float32)
    return (
        layout,
        dtype,
        {**plan_options, "divisor": unit_within(bucket.ranks_per_node), "exact_dtype": exact_dtype},
    )


class _Plans(threading.local):
    """A thread's plans that no bucket uses, by what they depend on.

    Buckets of equal shapes take one plan in turns, so a model of many equal layers has one. Two buckets under
    way have two. A plan goes with the last compressor that has used it.
    """

    def __init__(self) -> None:
        self.free: WeakValueDictionary[Any, ops.QuantizedPlan] = WeakValueDictionary()


_plans = _Plans()
