"""The quantized all-reduce of one bucket: flat, or hierarchical, each in one exchange or in two.

Flat, see quantized.py. Hierarchical, it is exact within each node, and in codes between nodes:

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

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradcomp import ops
from gradcomp.device import has_streams
from gradcomp.layout import BlockLayout, Part

from ..comm.exchange import Works, all_gather, all_to_all, reduce_scatter, takes_one_exchange
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


class Codes:
    """A buffer's codes on their way between the ranks of a group, and the operations on them.

    layout, dtype, device: of the buffer.
    error: see ops.encoder; None without error feedback.
    num_senders: see Form.
    of_row: for a reduce-scatter, the layout of a shard.
    divisor, bits, uncompressed_dtype, averages_dtype: see ops.adder.

    payload: this rank's codes, a row per shard; after two exchanges the codes of the means.
    received: the codes of this rank's shard from all ranks; in one exchange of the whole buffer.
    """

    def __init__(
        self,
        layout: BlockLayout,
        dtype: torch.dtype,
        device: torch.device,
        error: Tensor | None,
        *,
        num_senders: int | None = None,
        of_row: BlockLayout | None = None,
        divisor: float | None = None,
        **options: Any,
    ):
        _, num_bytes = layout.sections(options["bits"], (options["uncompressed_dtype"] or dtype).itemsize)
        bytes_of = partial(torch.zeros, dtype=torch.uint8, device=device)
        self.layout, self.error, self._has_own = layout, error, num_senders is None
        self.payload = bytes_of((layout.world_size, num_bytes))
        self.received = bytes_of((num_senders or layout.world_size, num_bytes))
        self.mean = bytes_of(num_bytes) if self._has_own and of_row is None else None
        # This rank's own values until the sum.
        self._own = zeros_of(layout, dtype, device, int(self._has_own and error is None))
        options["error_feedback"] = error is not None
        self._encode = ops.encoder(layout, dtype, device, **options)
        self._add = ops.adder(
            of_row or layout.piece(1) if self._has_own else layout, dtype, device, divisor=divisor,
            num_payloads=len(self.received), in_codes=self.mean is not None, has_own=self._has_own, **options,
        )  # fmt: skip
        self.operations = [self._encode, self._add]

    def encode(self, flat: Tensor, rank: int, stays: Iterable[tuple[slice, Tensor]] = ()) -> None:
        """Quantize a buffer plus errors into payload.

        stays: (a slice of the errors, a mask of the elements that stay) pairs. Zeros are taken for them.
        """
        kept = self._own if self.error is None else self.error
        waiting = [(kept[own], mask, kept[own].clone()) for own, mask in stays if self.error is not None]
        for error, mask, _ in waiting:
            error.masked_fill_(mask, 0.0)
        self._encode(buffer=flat, payload=self.payload, kept=kept, rank=rank if self._has_own else -1)
        for error, mask, before in waiting:
            error.copy_(torch.where(mask, before, error))  # without waiting for a GPU, unlike error[mask]

    def add(self, out: Tensor, rank: int, received: Tensor | None = None) -> None:
        """Sum what has been received, or other payloads, into out."""
        kept, rank = self._own if self.error is None else self.error, rank if self._has_own else -1
        self._add(received=self.received if received is None else received, out=out, kept=kept, rank=rank)

    def exchange(
        self, flat: Tensor, group: ProcessGroup, stays: Iterable[tuple[slice, Tensor]] = ()
    ) -> Works:
        """Quantize a buffer plus errors, see encode, and exchange the codes. Yields each collective."""
        self.encode(flat, group.rank(), stays)
        if not self._has_own:
            yield all_gather(self.received, self.payload[0], group)
            return
        yield all_to_all(self.received, self.payload, group)
        if self.mean is not None:
            self.add(self.mean, group.rank())
            yield all_gather(self.payload, self.mean, group)


def zeros_of(layout: BlockLayout, dtype: torch.dtype, device: torch.device, num_shards: int) -> Tensor:
    """Return zeros in the precision of errors, for the blocks of some shards of a buffer of this dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return torch.zeros(num_shards * layout.shard_numel, dtype=wide, device=device)


class QuantizedAllReduce:
    """A bucket's quantized all-reduce between all ranks: flat, or with nodes hierarchical.

    layout_for: returns the blocks of the buffer in a number of shards.
    dtype: the buffer's dtype.
    spec: what the bucket is made for.
    bits, error_feedback, uncompressed_dtype: see ops.encoder.

    layout, num_bytes: see Form.
    codes: what this rank quantizes: the buffer; with nodes this place's piece of the node's sum.
    unit: a power of two, at most 1 / ranks per node. Gradients are multiplied by it before they are summed
        within the node, so that no sum overflows.
    error: the errors of what this rank quantizes, times unit; None without error feedback.
    kept: (elements of the bucket, their errors in `error`) pairs.
    """

    def __init__(
        self,
        layout_for: LayoutFor,
        dtype: torch.dtype,
        spec: BucketSpec,
        *,
        bits: int = 8,
        error_feedback: bool,
        uncompressed_dtype: torch.dtype | None = None,
    ):
        self._dtype, self._ranks_per_node, self._place = dtype, spec.ranks_per_node, spec.place
        coded = dtype
        if self._ranks_per_node > 1:
            # A node's sums of exact elements are sent in fp32 (fp64), so that they aren't rounded.
            coded = torch.promote_types(dtype, torch.float32)
            uncompressed_dtype = uncompressed_dtype or coded
        form = Form.of(layout_for, spec, bits, (uncompressed_dtype or dtype).itemsize)
        self.layout, self.num_bytes, layout = form.layout, form.num_bytes, form.layout
        if self._ranks_per_node > 1:
            layout = layout.piece(layout.world_size // self._ranks_per_node)
        self.unit = unit_within(self._ranks_per_node)
        self.error = zeros_of(layout, coded, spec.device, layout.world_size) if error_feedback else None
        options: dict[str, Any] = {"bits": bits, "uncompressed_dtype": uncompressed_dtype}
        self.codes = Codes(
            layout, coded, spec.device, self.error, num_senders=form.num_senders,
            divisor=spec.world_size * self.unit, averages_dtype=dtype, **options,
        )  # fmt: skip
        self._decode = None if form.num_senders else ops.decoder(form.layout, dtype, spec.device, **options)
        self.operations = [*self.codes.operations, self._decode]
        self.kept = self._in_piece(form.layout.runs)
        if self._ranks_per_node > 1:
            self._make_pieces(layout.numel, coded, spec.device)

    def _make_pieces(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the whole bucket, padded, in fp32 (fp64), and a g-th of it; and all pieces' codes."""
        self._pieces = torch.zeros(self._ranks_per_node, numel, dtype=dtype, device=device)
        self._piece = torch.zeros_like(self._pieces[0])
        copies = list(self._copies())
        self._copy = ops.PartsCopy(copies, device)
        self._gathered = self.codes.payload if self._decode else self.codes.received
        self._codes = self._gathered.new_zeros(self._ranks_per_node, *self._gathered.shape)
        if not self._decode:
            # Not the pieces: a NaN block leaves NaN in its padding.
            self._means = self._pieces.to(self._dtype, copy=True)
            self._copy_back = ops.PartsCopy([pair[::-1] for pair in copies], device)

    def _in_piece(self, parts: Iterable[Part]) -> list[tuple[slice, slice]]:
        """Return (elements of the bucket, the same elements of this place's piece) of quantized parts."""
        numel = self.codes.layout.world_size * self.layout.shard_numel
        return [(source, target) for piece, source, target in _cut(parts, numel) if piece == self._place]

    def reduce(
        self, flat: Tensor, group: ProcessGroup, *, out: Tensor | None = None, unused: Collection[int] = (),
        rest: Tensor | None = None,
    ) -> Works:  # fmt: skip
        """Write the mean of a buffer over the ranks to out. Yields each collective in progress.

        flat: [numel]. It may be changed.
        out: [numel], another tensor in its dtype; None for flat itself.
        unused: the positions of tensors that this rank's backward did not use. Zeros are sent for them, and
            their errors stay.
        rest: [numel], values to add to the gradients where other ranks of the node keep errors, or None.
        """
        if not self.num_bytes:
            return
        out = flat if out is None else out
        parts = [part for part in self.layout.quantized if part.position in unused] if unused else []
        for part in parts:
            flat[part.in_bucket] = 0.0
        if self._ranks_per_node > 1:
            yield from self._reduce_in_nodes(flat, out, group, parts, rest)
            return
        stays = [(part.stored, flat.new_ones((), dtype=torch.bool)) for part in parts]
        yield from self.codes.exchange(flat, group, stays)
        if self._decode is None:
            self.codes.add(out, group.rank())
        else:
            self._decode(payload=self.codes.payload, buffer=out)

    def _reduce_in_nodes(
        self, flat: Tensor, out: Tensor, group: ProcessGroup, unused: list[Part], rest: Tensor | None
    ) -> Works:
        nodes, codes = nodes_of(group, self._ranks_per_node), self.codes
        self._copy(flat, self._pieces.view(-1), self.unit)
        if rest is not None:
            for source, target in self._copies():
                self._pieces.view(-1)[target] += rest[source] * self.unit
        yield from reduce_scatter(self._piece, self._pieces, nodes.within)
        # If another rank of the node has used a tensor that this rank has not, the tensor's error is sent.
        size = self.layout.block_size
        stays = [(own, _is_in_zero_block(self._piece[own], size)) for _, own in self._in_piece(unused)]
        yield from codes.exchange(self._piece, nodes.between, stays)
        yield all_gather(self._codes.flatten(1), self._gathered.view(-1), nodes.within)
        if self._decode:
            self._decode(payload=self._codes.flatten(0, 1), buffer=out)
            return
        for received, mean in zip(self._codes, self._means, strict=True):
            codes.add(mean, nodes.between.rank(), received)
        self._copy_back(self._means.view(-1), out, 1.0)

    def _copies(self) -> Iterator[tuple[slice, slice]]:
        """Yield (a slice of the bucket, its slice of the pieces): all tensors, cut between the pieces."""
        piece_numel, quantized = self._pieces.shape[1], self.codes.layout.world_size * self.layout.shard_numel
        for parts, numel, first in (
            (self.layout.runs, quantized, 0),
            (self.layout.exact, piece_numel - quantized, quantized),
        ):
            for piece, source, target in _cut(parts, numel):
                start = piece * piece_numel + first
                yield source, slice(start + target.start, start + target.stop)


def _cut(parts: Iterable[Part], numel: int) -> Iterator[tuple[int, slice, slice]]:
    """Cut parts every numel stored elements. Yields (piece, elements of the bucket, and of the piece)."""
    for part in parts:
        start, shift = part.stored.start, part.in_bucket.start - part.stored.start
        while start < part.stored.stop:
            piece, within = divmod(start, numel)
            length = min(part.stored.stop - start, numel - within)
            yield piece, slice(start + shift, start + shift + length), slice(within, within + length)
            start += length


def compile_operations(form_of: Callable[[BucketSpec], Any], spec: BucketSpec) -> None:
    """Compile the kernels of a bucket's form for its device. form_of: returns the form of a bucket."""
    if has_streams(spec.device):
        for operation in form_of(replace(spec, device=torch.device("meta"))).operations:
            if operation is not None:
                operation.compile(spec.device)


def collectives_of_all_reduce(
    layout_for: LayoutFor, dtype: torch.dtype, spec: BucketSpec, **options: Any
) -> list[Collective]:
    """Return the collectives of a QuantizedAllReduce with these arguments, in the order of its reduce."""
    is_flat, wide = spec.ranks_per_node == 1, torch.promote_types(dtype, torch.float32)
    exact = options.get("uncompressed_dtype") or (dtype if is_flat else wide)
    form = Form.of(layout_for, spec, options.get("bits", 8), exact.itemsize)
    if not form.num_bytes:
        return []
    # Every sender's payload goes to all others; the form counts half, for an all-reduce sends twice.
    num_bytes = form.num_bytes if form.num_senders is None else 2 * form.num_bytes
    exchanged = spec.exchanges(num_bytes // (form.num_senders or 1), form.num_senders)
    if is_flat:
        return exchanged
    piece = form.layout.piece(form.layout.world_size // spec.ranks_per_node)
    first = Collective("reduce-scatter", spec.ranks_per_node * piece.numel * wide.itemsize, "within")
    return [first, *exchanged, Collective("all-gather", num_bytes, "within")]


def unit_within(ranks_per_node: int) -> float:
    """Return the largest power of two that is at most 1 / ranks_per_node."""
    return 0.5 ** (ranks_per_node - 1).bit_length()


def _is_in_zero_block(gradients: Tensor, block_size: int) -> Tensor:
    """Return for each element whether its block's gradients, [numel], are all zero."""
    numel = len(gradients)
    blocks = torch.nn.functional.pad(gradients, (0, -numel % block_size)).view(-1, block_size)
    return (blocks == 0).all(1).repeat_interleave(block_size)[:numel]
