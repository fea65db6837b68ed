"""The quantized all-reduce of one bucket: flat, or hierarchical, each in one exchange or in two.

Flat, see quantized.py. Hierarchical, it is exact within each node (or 16 bits), and in codes between nodes:

    node i, place j    bucket ──copy──▶ piece 0 │ piece 1 │ … │ piece g−1
    reduce-scatter within the node: the rank of place j gets the node's sum of piece j
    quantized all-reduce of piece j between the n ranks of place j: a shard of the piece per node
    all-gather within the node: every rank gets the codes of all pieces, and dequantizes the same bytes

There are W = n · g ranks and W shards, as in the flat form. Place j has shards j · n … j · n + n − 1, and
its rank on node i owns shard j · n + i. A node sends about two buckets of codes, as one rank does in the flat
form. A rank quantizes, and keeps errors for, one piece: a g-th of the bucket.

In one exchange between nodes a piece is one shard, which every node sends to all others. Then all nodes'
codes of a piece go round within the node, and every rank sums them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradcomp import ops
from gradcomp.layout.blocks import BlockLayout, Part

from ..comm.exchange import Gather, Works, all_gather, all_to_all, reduce_scatter, takes_one_exchange
from ..comm.nodes import nodes_of
from .compressor import BucketSpec, Collective

# Returns the blocks of a bucket in a number of shards.
LayoutFor = Callable[[int], BlockLayout]


@dataclass(frozen=True)
class Form:
    """How a bucket's codes are exchanged, the same on all ranks.

    layout: the bucket's blocks, with a shard per rank; in one exchange with one; with nodes, one per place.
    num_senders: in one exchange, the number of ranks or nodes between which the codes go; None in two.
    num_bytes: the bytes of an all-reduce that sends as much per rank; with nodes, per node.
    """

    layout: BlockLayout
    num_senders: int | None
    num_bytes: int

    @classmethod
    def of(cls, layout_for: LayoutFor, spec: BucketSpec, bits: int, exact_itemsize: int) -> Form:
        """Return the form of a bucket's codes. exact_itemsize: the bytes of an exact element."""
        num_places, num_senders = spec.ranks_per_node, spec.world_size // spec.ranks_per_node
        layout = layout_for(num_places)
        _, num_bytes = layout.sections(bits, exact_itemsize)
        if takes_one_exchange(num_bytes, num_senders, has_delay=spec.has_delay):
            return cls(layout, num_senders, num_places * num_bytes * num_senders // 2)
        layout = layout_for(spec.world_size)
        _, num_bytes = layout.sections(bits, exact_itemsize)
        return cls(layout, None, spec.world_size * num_bytes)


class FlatAllReduce:
    """A bucket's quantized all-reduce between all ranks.

    layout_for: returns the blocks of the buffer in a number of shards.
    dtype: the buffer's dtype.
    spec: what the bucket is made for.
    bits, error_feedback, uncompressed_dtype: see ops.quantized_plan.

    layout, num_bytes: see Form.
    plan: the plan of what this rank quantizes.
    """

    unit = 1.0  # the plan's errors are multiplied by it

    def __init__(self, layout_for: LayoutFor, dtype: torch.dtype, spec: BucketSpec, **options: Any):
        form, [(layout, _, options)] = _plans(layout_for, dtype, spec, is_flat=True, **options)
        self.layout, self.num_bytes = layout, form.num_bytes
        self.plan = ops.quantized_plan(layout, dtype, spec.device, **options)
        self._is_one_exchange = form.num_senders is not None

    @property
    def error(self) -> Tensor | None:
        """The errors that this rank keeps, times unit; None without error feedback."""
        return self.plan.error

    def kept(self, place: int) -> Iterator[tuple[slice, slice]]:
        """Yield (elements of the bucket, their errors in `error`) that the rank of this place keeps."""
        for run in self.layout.runs:
            yield run.in_bucket, run.stored

    def reduce(
        self, flat: Tensor, out: Tensor, group: ProcessGroup, unused: Collection[int], rest: Tensor | None
    ) -> Works:
        """Write the mean of a buffer over the ranks to out. Yields each collective in progress.

        flat: [numel]. It may be changed.
        out: [numel], flat or another tensor in its dtype.
        unused: the positions of tensors that this rank's backward did not use. Zeros are sent for them, and
            their errors stay.
        rest: [numel], values to add to the gradients where other ranks of the node keep errors, or None.

        The call posts the receives that it can (exchange.gather); flat is read when the result is iterated.
        """
        if not self.plan.payload.numel():
            return (None for _ in ())
        gather = Gather(self.plan.received if self._is_one_exchange else self.plan.payload, group)
        return self._stages(flat, out, group, _parts(self.layout, unused) if unused else (), gather)

    def _stages(
        self, flat: Tensor, out: Tensor, group: ProcessGroup, unused: Sequence[Part], gather: Gather
    ) -> Works:
        plan = self.plan
        plan.quantize(flat, group.rank(), unused)
        if self._is_one_exchange:
            yield gather(plan.payload[0])
            plan.sum(out, group.rank())
        else:
            yield from _average_codes(plan, group, gather)
            plan.dequantize(out)


def _parts(layout: BlockLayout, positions: Collection[int]) -> list[Part]:
    """Return the quantized parts of the tensors at these positions of the bucket."""
    return [part for part in layout.quantized if part.position in positions]


def _average_codes(plan: ops.QuantizedPlan, group: ProcessGroup, gather: Gather) -> Works:
    """Replace this rank's codes in plan.payload by the codes of the means, in two exchanges.

    gather: to plan.payload. No rank sends its mean of a shard before it has got this rank's codes of it.
    """
    yield all_to_all(plan.received, plan.payload, group)
    plan.average(group.rank())
    yield gather(plan.mean)


class HierarchicalAllReduce:
    """A bucket's hierarchical quantized all-reduce, with the attributes and methods of FlatAllReduce.

    within_dtype: the dtype in which the ranks of a node exchange gradients to sum them; None for fp32 (fp64
        for fp64). Errors are in fp32 (fp64) all the same, and don't include that rounding.

    plan: the plan of this rank's piece.
    unit: a power of two, 1 / g or less. Gradients are multiplied by it before they are summed within the
        node, so that no sum overflows.

    Allocates the whole bucket, padded, in within_dtype, and a g-th of it in within_dtype and for errors.
    """

    def __init__(
        self,
        layout_for: LayoutFor,
        dtype: torch.dtype,
        spec: BucketSpec,
        *,
        within_dtype: torch.dtype | None = None,
        **options: Any,
    ):
        form, plans = _plans(layout_for, dtype, spec, is_flat=False, within_dtype=within_dtype, **options)
        (piece_layout, self._piece_dtype, piece_options), *others = plans
        self.layout, self.num_bytes = form.layout, form.num_bytes
        self.unit = unit_within(spec.ranks_per_node)
        self._ranks_per_node, self._num_senders = spec.ranks_per_node, form.num_senders
        within_dtype, _ = piece_dtypes(dtype, within_dtype)
        zeros = partial(torch.zeros, device=spec.device)
        self.plan = ops.quantized_plan(piece_layout, self._piece_dtype, spec.device, **piece_options)
        self._pieces = zeros(spec.ranks_per_node, piece_layout.numel, dtype=within_dtype)
        self._piece = torch.zeros_like(self._pieces[0])
        copies = list(self._copies())
        self._copy = ops.PartsCopy(copies, spec.device)
        if form.num_senders is None:
            self._whole = ops.quantized_plan(form.layout, dtype, spec.device, **others[0][2])
            return
        self._codes = self.plan.received.new_empty(spec.ranks_per_node, *self.plan.received.shape)
        self._means = self._pieces if within_dtype == dtype else zeros(self._pieces.shape, dtype=dtype)
        self._copy_back = ops.PartsCopy([pair[::-1] for pair in copies], spec.device)

    @property
    def error(self) -> Tensor | None:
        """The errors of the node's sum of the piece, times unit; None without error feedback."""
        return self.plan.error

    def kept(self, place: int) -> Iterator[tuple[slice, slice]]:
        """Yield (elements of the bucket, their errors in `error`) of this place's piece."""
        return self._in_piece(self.layout.runs, place)

    def _in_piece(self, parts: Iterable[Part], place: int) -> Iterator[tuple[slice, slice]]:
        """Yield (elements of the bucket, the same elements of the place's piece) of the parts in it."""
        numel = self.layout.world_size // self._ranks_per_node * self.layout.shard_numel
        first = place * numel
        for part in parts:
            start, stop = max(part.stored.start, first), min(part.stored.stop, first + numel)
            if start < stop:
                shift = part.in_bucket.start - part.stored.start
                yield slice(start + shift, stop + shift), slice(start - first, stop - first)

    def reduce(
        self, flat: Tensor, out: Tensor, group: ProcessGroup, unused: Collection[int], rest: Tensor | None
    ) -> Works:
        """Write the mean of a buffer over all ranks to out. For the arguments see FlatAllReduce.reduce."""
        if not self.num_bytes:
            return
        nodes, plan = nodes_of(group, self._ranks_per_node), self.plan
        gather = Gather(plan.received if self._num_senders else plan.payload, nodes.between)
        parts = _parts(self.layout, unused)
        for part in parts:
            flat[part.in_bucket] = 0.0
        self._copy(flat, self._pieces.view(-1), self.unit)
        if rest is not None:
            add_to_pieces(rest, self._pieces, self._copies(), self.unit)
        yield from reduce_scatter(self._piece, self._pieces, nodes.within)
        # If another rank of the node has used a tensor that this rank has not, the tensor's error is sent.
        slices = [own for _, own in self._in_piece(parts, nodes.within.rank())]
        stays = [_is_in_zero_block(self._piece[own], self.layout.block_size) for own in slices]
        in_piece = [Part(0, own, own) for own in slices]
        plan.quantize(self._piece.to(self._piece_dtype), nodes.between.rank(), in_piece, stays)
        if self._num_senders is None:
            yield from _average_codes(plan, nodes.between, gather)
            codes = self._whole.payload.view(nodes.ranks_per_node, -1)
            yield all_gather(codes, plan.payload.view(-1), nodes.within)
            self._whole.dequantize(out)
            return
        yield gather(plan.payload[0])
        yield all_gather(self._codes.view(nodes.ranks_per_node, -1), plan.received.view(-1), nodes.within)
        for received, mean in zip(self._codes, self._means, strict=True):
            plan.sum(mean, nodes.between.rank(), received)
        self._copy_back(self._means.view(-1), out, 1.0)

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


def all_reduce_for(
    layout_for: LayoutFor, dtype: torch.dtype, spec: BucketSpec, **options: Any
) -> FlatAllReduce | HierarchicalAllReduce:
    """Return a bucket's all-reduce, flat or hierarchical. For the arguments see the classes."""
    kind = FlatAllReduce if spec.ranks_per_node == 1 else HierarchicalAllReduce
    return kind(layout_for, dtype, spec, **options)


def compile_all_reduce(layout_for: LayoutFor, dtype: torch.dtype, spec: BucketSpec, **options: Any) -> None:
    """Compile the kernels that all_reduce_for with these arguments launches."""
    _, plans = _plans(layout_for, dtype, spec, is_flat=spec.ranks_per_node == 1, **options)
    for layout, dtype_of_plan, plan_options in plans:
        ops.compile_quantized(layout, dtype_of_plan, spec.device, **plan_options)


def collectives_of_all_reduce(
    layout_for: LayoutFor, dtype: torch.dtype, spec: BucketSpec, **options: Any
) -> list[Collective]:
    """Return the collectives of all_reduce_for with these arguments, in the order of its reduce."""
    is_flat = spec.ranks_per_node == 1
    form, [(layout, _, _), *_] = _plans(layout_for, dtype, spec, is_flat=is_flat, **options)
    if not form.num_bytes:
        return []
    # Every sender's payload goes to all others; the form counts half, for an all-reduce sends twice.
    num_bytes = form.num_bytes if form.num_senders is None else 2 * form.num_bytes
    exchanged = spec.exchanges(num_bytes // (form.num_senders or 1), form.num_senders)
    if is_flat:
        return exchanged
    summed, _ = piece_dtypes(dtype, options.get("within_dtype"))
    first = Collective("reduce-scatter", spec.ranks_per_node * layout.numel * summed.itemsize, "within")
    return [first, *exchanged, Collective("all-gather", num_bytes, "within")]


def add_to_pieces(rest: Tensor, pieces: Tensor, copies: Iterable[tuple[slice, slice]], unit: float) -> None:
    """Add unit times rest to pieces, which another dtype may round. copies: (slices of rest, of pieces)."""
    for source, target in copies:
        pieces.view(-1)[target] += rest[source] * unit


def unit_within(ranks_per_node: int) -> float:
    """Return the largest power of two that is at most 1 / ranks_per_node."""
    return 0.5 ** (ranks_per_node - 1).bit_length()


def piece_dtypes(dtype: torch.dtype, within_dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype]:
    """Return (the dtype in which pieces are summed within a node, the dtype in which a plan takes a sum).

    dtype: the bucket's dtype.
    within_dtype: see HierarchicalAllReduce.
    """
    wide = torch.promote_types(dtype, torch.float32)
    summed = within_dtype or wide
    # A plan's errors have the bucket's precision, also in checkpoints: they are in fp64 for fp64 input only.
    return summed, torch.float64 if wide == torch.float64 else summed


def _is_in_zero_block(gradients: Tensor, block_size: int) -> Tensor:
    """Return for each element whether its block's gradients, [numel], are all zero."""
    numel = len(gradients)
    blocks = torch.nn.functional.pad(gradients, (0, -numel % block_size)).view(-1, block_size)
    return (blocks == 0).all(1).repeat_interleave(block_size)[:numel]


def _plans(
    layout_for: LayoutFor,
    dtype: torch.dtype,
    spec: BucketSpec,
    *,
    is_flat: bool,
    bits: int = 8,
    error_feedback: bool,
    uncompressed_dtype: torch.dtype | None = None,
    within_dtype: torch.dtype | None = None,
) -> tuple[Form, list[tuple[BlockLayout, torch.dtype, dict[str, Any]]]]:
    """Return the form, and the arguments of ops.quantized_plan: (layout, dtype, options) of each plan.

    Flat there is one plan. With nodes the first is of a piece; in two exchanges a second is of the bucket.
    """
    shared: dict[str, Any] = {"bits": bits, "uncompressed_dtype": uncompressed_dtype}
    if is_flat:
        form = Form.of(layout_for, spec, bits, (uncompressed_dtype or dtype).itemsize)
        options = {**shared, "error_feedback": error_feedback, "num_senders": form.num_senders}
        return form, [(form.layout, dtype, options)]
    # A node's sums of exact elements are sent in fp32 (fp64), so that they aren't rounded.
    wide = torch.promote_types(dtype, torch.float32)
    uncompressed_dtype = shared["uncompressed_dtype"] = uncompressed_dtype or wide
    form = Form.of(layout_for, spec, bits, uncompressed_dtype.itemsize)
    layout = form.layout
    # The same blocks and exact elements per shard as in the bucket, without padding between them.
    num_shards = layout.world_size // spec.ranks_per_node
    shapes = (num_shards * layout.num_blocks, layout.block_size), (num_shards * layout.exact_numel,)
    options = {
        **shared,
        "error_feedback": error_feedback,
        "divisor": spec.world_size * unit_within(spec.ranks_per_node),
        "averages_dtype": dtype,
        "num_senders": form.num_senders,
    }
    _, piece_dtype = piece_dtypes(dtype, within_dtype)
    plans = [(BlockLayout(shapes, layout.block_size, num_shards), piece_dtype, options)]
    if form.num_senders is None:
        plans.append((layout, dtype, {**shared, "error_feedback": False, "only_dequantizes": True}))
    return form, plans
