"""The quantized all-reduce of one bucket: flat, or by nodes.

Flat, see quantized.py. By nodes it is exact within each node (or in 16 bits), and in codes between nodes:

    node i, place j    bucket ──copy──▶ piece 0 │ piece 1 │ … │ piece g−1
    reduce-scatter within the node: the rank of place j gets the node's sum of piece j
    quantized all-reduce of piece j between the n ranks of place j: a shard of the piece per node
    all-gather within the node: every rank gets the codes of all pieces, and dequantizes the same bytes

There are W = n · g ranks and W shards, as in the flat form. Place j has shards j · n … j · n + n − 1, and
its rank on node i owns shard j · n + i. A node sends about two buckets of codes, as one rank does in the flat
form. A rank quantizes, and keeps errors for, one piece: a g-th of the bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.layout.blocks import BlockLayout, Part

from ..comm.exchange import Works, all_gather, all_to_all, reduce_scatter

if TYPE_CHECKING:
    from ..comm.nodes import Nodes


def quantized_all_reduce(
    plan: ops.QuantizedPlan, flat: torch.Tensor, group: dist.ProcessGroup, unused: Sequence[Part] = ()
) -> Works:
    """Replace a bucket by its mean over the ranks. Yields each of the two collectives in progress.

    unused: the layout's parts that this rank's backward has not used; see ops.quantized_plan.
    """
    if plan.payload.numel():
        plan.quantize(flat, group.rank(), unused)
        yield from _average_codes(plan, group)
        plan.dequantize(flat)


def _average_codes(plan: ops.QuantizedPlan, group: dist.ProcessGroup) -> Works:
    """Replace this rank's codes in plan.payload by the codes of the means."""
    yield all_to_all(plan.received, plan.payload, group)
    plan.average(group.rank())
    yield all_gather(plan.payload, plan.mean, group)


class NodesAllReduce:
    """A bucket's quantized all-reduce by nodes.

    layout: the bucket's blocks, in one shard per rank.
    dtype: the bucket's dtype.
    device: the bucket's device.
    ranks_per_node: g; it divides the layout's number of shards.
    bits, error_feedback, exact_dtype: see ops.quantized_plan.
    within_dtype: the dtype in which the ranks of a node exchange gradients to sum them; None for fp32 (fp64
        for fp64). Errors are in fp32 (fp64) all the same, and don't include that rounding.

    plan: the plan of this rank's piece. It keeps the errors of the node's sum of the piece, times unit.
    unit: a power of two, 1 / g or less. Gradients are multiplied by it before they are summed within the
        node, so that no sum overflows.

    Allocates the whole bucket, padded, in within_dtype, and a g-th of it in within_dtype and for errors.
    """

    def __init__(
        self,
        layout: BlockLayout,
        dtype: torch.dtype,
        device: torch.device,
        ranks_per_node: int,
        *,
        bits: int,
        error_feedback: bool,
        exact_dtype: torch.dtype | None = None,
        within_dtype: torch.dtype | None = None,
    ):
        self.layout = layout
        self.unit = unit_within(ranks_per_node)
        piece_layout, piece_options, whole_options = _plans(
            layout,
            dtype,
            ranks_per_node,
            bits=bits,
            error_feedback=error_feedback,
            exact_dtype=exact_dtype,
        )
        within_dtype, self._piece_dtype = piece_dtypes(dtype, within_dtype)
        self.plan = ops.quantized_plan(piece_layout, self._piece_dtype, device, **piece_options)
        self._whole = ops.quantized_plan(layout, dtype, device, **whole_options)
        self._pieces = torch.zeros(ranks_per_node, piece_layout.numel, dtype=within_dtype, device=device)
        self._piece = torch.zeros(piece_layout.numel, dtype=within_dtype, device=device)
        self._copy = ops.PartsCopy(list(self._copies()), device)

    @staticmethod
    def compile(
        layout: BlockLayout,
        dtype: torch.dtype,
        device: torch.device,
        ranks_per_node: int,
        *,
        within_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        """Compile the kernels that a NodesAllReduce with these arguments launches."""
        piece_layout, piece_options, whole_options = _plans(layout, dtype, ranks_per_node, **options)
        _, piece_dtype = piece_dtypes(dtype, within_dtype)
        ops.compile_quantized(piece_layout, piece_dtype, device, **piece_options)
        ops.compile_quantized(layout, dtype, device, **whole_options)

    @property
    def num_bytes(self) -> int:
        """The bytes of all shards' payloads."""
        return self._whole.payload.numel()

    def piece(self, nodes: Nodes) -> slice:
        """Return the slice of the layout's padded blocks that this rank's piece has."""
        numel = nodes.num_nodes * self.layout.shard_numel
        return slice(nodes.within.rank() * numel, (nodes.within.rank() + 1) * numel)

    def average(
        self, flat: torch.Tensor, nodes: Nodes, unused: Sequence[Part] = (), extra: torch.Tensor | None = None
    ) -> Works:
        """Replace a bucket by its mean over all ranks. Yields each of the four collectives in progress.

        unused: the layout's parts that this rank's backward has not used.
        extra: values to add to this rank's gradients, in the order of the padded blocks.
        """
        if not self.num_bytes:
            return
        for part in unused:
            flat[part.in_bucket] = 0.0
        self._copy(flat, self._pieces.view(-1), self.unit)
        if extra is not None:
            blocks = self._pieces[:, : extra.numel() // len(self._pieces)]
            blocks += extra.view(len(self._pieces), -1) * self.unit
        yield from reduce_scatter(self._piece, self._pieces, nodes.within)
        plan = self.plan
        # If another rank of the node has used a tensor that this rank has not, the tensor's error is sent.
        parts = self._parts_of_piece(unused, nodes)
        stays = [_is_in_zero_block(self._piece[part.in_bucket], self.layout.block_size) for part in parts]
        plan.quantize(self._piece.to(self._piece_dtype), nodes.between.rank(), parts, stays)
        yield from _average_codes(plan, nodes.between)
        codes = self._whole.payload.view(nodes.ranks_per_node, -1)
        yield all_gather(codes, plan.payload.view(-1), nodes.within)
        self._whole.dequantize(flat)

    def _parts_of_piece(self, parts: Sequence[Part], nodes: Nodes) -> list[Part]:
        """Return the layout's parts in this rank's piece, by element of the piece."""
        piece, found = self.piece(nodes), []
        for part in parts:
            start, stop = max(part.stored.start, piece.start), min(part.stored.stop, piece.stop)
            if start < stop:
                own = slice(start - piece.start, stop - piece.start)
                found.append(Part(part.position, own, own))
        return found

    def _copies(self) -> Iterator[tuple[slice, slice]]:
        """Yield (a slice of the bucket, its slice of the pieces): all tensors, cut between the pieces."""
        num_pieces, piece_numel = self._pieces.shape
        block_numel = self.layout.world_size * self.layout.shard_numel // num_pieces
        exact_numel = piece_numel - block_numel
        for parts, numel, offset in (
            (self.layout.runs, block_numel, 0),
            (self.layout.exact, exact_numel, block_numel),
        ):
            for part in parts:
                start = part.stored.start
                while start < part.stored.stop:
                    piece, within = divmod(start, numel)
                    length = min(part.stored.stop - start, numel - within)
                    source = part.in_bucket.start + start - part.stored.start
                    target = piece * piece_numel + offset + within
                    yield slice(source, source + length), slice(target, target + length)
                    start += length


def unit_within(ranks_per_node: int) -> float:
    """Return the largest power of two that is at most 1 / ranks_per_node."""
    return 0.5 ** (ranks_per_node - 1).bit_length()


def piece_dtypes(dtype: torch.dtype, within_dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype]:
    """Return (the dtype in which pieces are summed within a node, the dtype in which a plan takes a sum).

    dtype: the bucket's dtype.
    within_dtype: see NodesAllReduce.
    """
    wide = torch.promote_types(dtype, torch.float32)
    summed = within_dtype or wide
    # A plan's errors have the bucket's precision, also in checkpoints: they are in fp64 for fp64 input only.
    return summed, torch.float64 if wide == torch.float64 else summed


def _is_in_zero_block(gradients: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return for each element whether its block's gradients are all zero.

    gradients: [numel], from the first element of a block on.
    """
    numel = len(gradients)
    blocks = torch.nn.functional.pad(gradients, (0, -numel % block_size)).view(-1, block_size)
    return (blocks == 0).all(1).repeat_interleave(block_size)[:numel]


def _plans(
    layout: BlockLayout,
    dtype: torch.dtype,
    ranks_per_node: int,
    *,
    bits: int,
    error_feedback: bool,
    exact_dtype: torch.dtype | None,
) -> tuple[BlockLayout, dict[str, Any], dict[str, Any]]:
    """Return the layout of a piece, and the options of the plans of the piece and of the whole bucket."""
    num_nodes = layout.world_size // ranks_per_node
    # The same blocks and exact elements per shard as in the bucket, without padding between them.
    blocks, exact = (num_nodes * layout.num_blocks, layout.block_size), (num_nodes * layout.exact_numel,)
    # A node's sums of exact elements are sent in fp32 (fp64), so that they aren't rounded.
    wide = torch.promote_types(dtype, torch.float32)
    shared = {"bits": bits, "exact_dtype": exact_dtype or wide}
    piece = {
        **shared,
        "error_feedback": error_feedback,
        "divisor": layout.world_size * unit_within(ranks_per_node),
        "averages_dtype": dtype,
    }
    whole = {**shared, "error_feedback": False, "only_dequantizes": True}
    return BlockLayout([blocks, exact], layout.block_size, num_nodes), piece, whole
