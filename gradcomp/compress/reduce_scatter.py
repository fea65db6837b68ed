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
from collections.abc import Callable, Collection, Sequence
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
from .quantized_all_reduce import Codes, unit_within, zeros_of


class ReduceScatter:
    """The quantized reduce-scatter of one bucket, with the methods and attributes of QuantizedAllReduce.

    layout_of: returns the blocks of tensors of these shapes in a number of shards.
    spec: what the bucket is made for; its is_shard is true.

    layout: the blocks of the rows that this rank quantizes.
    num_bytes: the bytes of a reduce-scatter that sends as much per rank; with nodes, per node.
    """

    def __init__(
        self,
        layout_of: Callable[[Sequence[Sequence[int]], int], BlockLayout],
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
            self._factor = torch.full((1,), self.unit, dtype=self._dtype, device=spec.device)
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
        self.kept: list[tuple[slice, slice]] = []
        for part in self.layout.quantized:
            node, position = divmod(part.position, len(shapes))
            shard = self._shards.shard(node * spec.ranks_per_node + spec.place, position)
            self.kept.append((shard, slice(part.stored.start, part.stored.start + shard.stop - shard.start)))

    @property
    def operations(self) -> list[ops.Operation]:
        return self._make_codes().operations

    def reduce(
        self, flat: Tensor, group: ProcessGroup, *, out: Tensor, unused: Collection[int] = (),
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
        rows = flat.view(-1, self._ranks_per_node, self._shards.row_numel)  # by node and place
        if self._ranks_per_node > 1:
            nodes = nodes_of(group, self._ranks_per_node)
            pieces = flat.new_empty(nodes.within.size(), self.layout.numel, dtype=self._dtype)
            by_place = pieces.view(nodes.within.size(), -1, self._shards.row_numel)
            rows = torch.mul(rows.transpose(0, 1), self._factor, out=by_place).transpose(0, 1)
        if rest is not None:
            for row, in_tensors, in_row in self._shards.shards():
                rows[divmod(row, self._ranks_per_node)][in_row] += rest[in_tensors] * self.unit
        if self._ranks_per_node > 1:
            flat, group = torch.empty_like(pieces[0]), nodes.between
            yield from reduce_scatter(flat, pieces, nodes.within)
        key = threading.get_ident(), self._key
        self.codes = codes = _free.pop(key, None) or self._make_codes()
        codes.error = self.error
        yield from codes.exchange(flat, group)
        codes.add(out, group.rank())
        _free[key] = codes


# Codes that no bucket uses, by thread and by what they depend on. Buckets of equal shapes take them in turns,
# so a model of many equal layers has one, or two if two are under way. They go with their last compressor.
_free: WeakValueDictionary[Any, Codes] = WeakValueDictionary()
