"""The quantized all-reduce's arithmetic in plain torch: to 8 or 4 bits, with one bf16 scale for each block.

    scale = the block's largest absolute value / L, rounded up to bf16        L = 127 at 8 bits, 7 at 4
    code  = round(value / scale), an integer from −L to L
    decoded = scale · code, limited to ±top, the largest number of the bucket's dtype

So no element is off by more than its block's largest value / 2L, plus the scale's rounding, and a zero stays
exactly zero. A block gets the scale NaN, and so becomes NaN, if it has a value that isn't finite, or an fp64
value beyond L times bf16's largest.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gradcomp.layout import BlockLayout

LARGEST_CODE = {8: 127, 4: 7}  # L by bits
LARGEST_IN_BF16 = torch.finfo(torch.bfloat16).max
CHUNK_NUMEL = 1 << 19  # elements to quantize at a time: more don't fit the caches, fewer need more calls
# Below SMALL a scale's inverse could be infinite, so the scale and its values are multiplied by BOOST before.
SMALL, BOOST = 2.0**-100, 2.0**64
# With scales up to this, sums of decoded values and errors are far from overflow in fp32.
SMALL_SCALE = 1e30

_of_thread = threading.local()


def _scratch(shape: torch.Size, dtype: torch.dtype, name: str = "decoded") -> Tensor:
    """Return this thread's scratch buffer of a name and dtype. It grows to the size of the largest chunk."""
    buffers: dict[Any, Tensor] = _of_thread.__dict__
    buffer, numel = buffers.get((name, dtype)), shape.numel()
    if buffer is None or buffer.numel() < numel:
        buffer = buffers[name, dtype] = torch.empty(numel, dtype=dtype, device="cpu")
    return buffer[:numel].view(shape)


def quantize(
    values: Tensor,
    *,
    codes: Tensor | None,
    scales: Tensor,
    bits: int,
    top: float,
    gradients: Callable[[], Tensor] | None = None,
) -> None:
    """Quantize blocks, and leave the quantization errors in values.

    values: [blocks, size], fp32 or fp64, contiguous. CHUNK_NUMEL elements are quantized fastest. Afterwards
        values − decoded codes. In a block that isn't finite zeros, or with gradients values − gradients, up
        to rounding: the errors before them. They are zero in elements that aren't finite, because looking at
        all gradients first would take time in every step.
    codes: uint8 [blocks, size · bits / 8], written. At 4 bits a byte's lower half is the first one of a pair.
        None to find scales only: values of finite blocks stay.
    scales: bf16 [blocks], written.
    top: the largest number to decode to.
    gradients: returns the gradients alone, [blocks, size], which replace sums with errors that aren't finite.
    """
    if not len(values):
        return
    scale, least, largest = _exact_scales(values, bits)
    is_bad = errors = None
    if not largest <= LARGEST_IN_BF16:
        if gradients is not None:
            torch.where(values.isfinite(), values, gradients(), out=values)
            scale, _, _ = _exact_scales(values, bits)
            errors = (values - gradients()).nan_to_num_(0.0, 0.0, 0.0)
        is_bad = ~(scale <= LARGEST_IN_BF16)
        values.masked_fill_(is_bad, 0.0)
        scale, least, largest = _exact_scales(values, bits)
    # Rounded up: bf16 is the upper half of fp32's bits.
    scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
    scales.copy_(scale[:, 0])
    if codes is not None:
        scale = scale.to(values.dtype)
        inverse, boost = scale.reciprocal(), None
        if least < SMALL:
            inverse.masked_fill_(scale == 0, 0.0)
            is_small = (scale < SMALL) & (scale > 0)
            if is_small.any():
                boost = torch.ones_like(scale).masked_fill_(is_small, BOOST)
                inverse = torch.where(is_small, (scale * boost).reciprocal_(), inverse)
        decoded = torch.mul(values, inverse, out=_scratch(values.shape, values.dtype))
        if boost is not None:
            decoded *= boost
        signed = codes.view(torch.int8)
        if bits == 8:
            signed.copy_(decoded.round_())
        else:
            each = _scratch(values.shape, torch.int8).copy_(decoded.round_())
            pairs = each.bitwise_and_(15).view(torch.int16)
            signed.copy_((pairs >> 4).bitwise_or_(pairs))
        if largest * (1 + 2.0**-7) * LARGEST_CODE[bits] <= top:  # with the scale's rounding
            values.addcmul_(decoded, scale, value=-1)
        else:
            values -= decoded.mul_(scale).clamp_(-top, top)
    if is_bad is not None:
        scales.masked_fill_(is_bad[:, 0], torch.nan)
        if errors is not None:
            torch.where(is_bad, errors, values, out=values)


def _exact_scales(values: Tensor, bits: int) -> tuple[Tensor, float, float]:
    """Return the blocks' scales before they are rounded, [blocks, 1] in fp32, the least and the largest."""
    sizes = torch.maximum(values.amax(1, keepdim=True), values.amin(1, keepdim=True).neg_())
    scale = sizes.div_(LARGEST_CODE[bits]).to(torch.float32)
    least, largest = scale.aminmax()
    return scale, float(least), float(largest)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    *,
    out: Tensor,
    bits: int,
    top: float | None = None,
    factor: float = 1.0,
    add: bool = False,
) -> None:
    """Compute out = factor · decoded codes.

    codes, scales: with the shapes and dtypes of quantize.
    out: [blocks, size], fp32 or fp64.
    top: quantize's; None if no scale comes near it.
    factor: a power of two.
    add: True to add to out instead.
    """
    limit = None if top is None else top * factor
    decoded = _scratch(out.shape, out.dtype) if add else out
    if bits == 8:
        decoded.copy_(codes.view(torch.int8))
    else:
        # 16 · each code: its bits in the upper half of a byte.
        pairs = codes.to(torch.int16)
        upper = (pairs << 8).bitwise_or_(pairs.bitwise_left_shift_(4)).bitwise_and_(-0x0F10)
        decoded.copy_(upper.view(torch.int8))
        factor /= 16
    scale = scales.to(out.dtype)[:, None]
    if factor != 1.0:
        scale *= factor
    if add and limit is None:
        out.addcmul_(decoded, scale)
        return
    decoded *= scale
    if limit is not None:
        decoded.clamp_(-limit, limit)
    if add:
        out += decoded


class Chunk(NamedTuple):
    """Blocks of a shard that are quantized together.

    rows, blocks: the slices of the shard's blocks, and of all shards' blocks.
    copies: (slice of the chunk's elements, the same elements' slice in the bucket) pairs.
    in_bucket: the chunk's elements in the bucket if they are together there, without padding; otherwise None.
    """

    rows: slice
    blocks: slice
    copies: list[tuple[slice, slice]]
    in_bucket: slice | None


class _Operation:
    """What the operations in plain torch have in common; see ops.encoder and ops.adder for the arguments.

    Blocks are quantized in chunks, so that each operation reads and writes main memory once. All other passes
    are in the processor's caches.
    """

    def __init__(
        self,
        layout: BlockLayout,
        dtype: torch.dtype,
        *,
        bits: int,
        uncompressed_dtype: torch.dtype | None = None,
        averages_dtype: torch.dtype | None = None,
        error_feedback: bool = False,
    ):
        self._layout, self._exact_dtype, self._bits = layout, uncompressed_dtype or dtype, bits
        self._wide, self._feedback = torch.promote_types(dtype, torch.float32), error_feedback
        self._top = torch.finfo(averages_dtype or dtype).max
        sections, _ = layout.sections(bits, self._exact_dtype.itemsize)
        self._codes_at, self._scales_at, self._exact_at = sections
        self._step = max(1, CHUNK_NUMEL // layout.block_size)
        self._code_bytes = layout.code_bytes(bits)
        # Of every shard the first chunk, then the second one, and so on.
        self._chunks = list(zip(*map(self._chunks_of, range(layout.world_size)), strict=True))

    def _chunks_of(self, shard: int) -> Iterator[Chunk]:
        """Cut a shard into chunks."""
        num_blocks, size = self._layout.num_blocks, self._layout.block_size
        for first in range(0, num_blocks, self._step):
            rows = slice(first, min(first + self._step, num_blocks))
            blocks = slice(shard * num_blocks + rows.start, shard * num_blocks + rows.stop)
            start, stop, copies = blocks.start * size, blocks.stop * size, []
            for run in self._layout.runs_between(start, stop):
                low, high = max(run.stored.start, start), min(run.stored.stop, stop)
                offset = run.in_bucket.start - run.stored.start
                copies.append((slice(low - start, high - start), slice(low + offset, high + offset)))
            is_whole = [own for own, _ in copies] == [slice(0, stop - start)]
            yield Chunk(rows, blocks, copies, copies[0][1] if is_whole else None)

    def _coded(self, payloads: Tensor) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield (codes [blocks, bytes], scales [blocks]) of every payload's first chunk, then its second, ….

        payloads: [payloads, bytes], contiguous. Each view takes one call here: slices of slices take several.
        """
        size, scales, first = self._code_bytes, payloads.view(torch.bfloat16), payloads.storage_offset()
        each = scales.itemsize
        starts = range(first, first + payloads.numel(), payloads.shape[1] or 1)
        for chunk, *_ in self._chunks:
            row, n = chunk.rows.start, chunk.rows.stop - chunk.rows.start
            code, scale = self._codes_at.start + row * size, self._scales_at.start // each + row
            yield [
                (
                    payloads.as_strided((n, size), (size, 1), start + code),
                    scales.as_strided((n,), (1,), start // each + scale),
                )
                for start in starts
            ]

    def _others_of(self, payloads: Tensor) -> tuple[Tensor, Tensor, float, float | None]:
        """Return what is beside codes: exact elements, scales, the largest scale and dequantize's top for it.

        The first two are [payloads, elements] and [payloads, blocks]. The largest is NaN if a scale is.
        """
        exact = payloads[:, self._exact_at].contiguous().view(self._exact_dtype)
        scales = payloads[:, self._scales_at].contiguous().view(torch.bfloat16)
        largest = float(scales.amax()) if scales.numel() else 0.0
        return exact, scales, largest, None if largest * LARGEST_CODE[self._bits] <= self._top else self._top

    def _values(self, chunk: Chunk, buffer: Tensor | None = None) -> tuple[Tensor, list[tuple[slice, slice]]]:
        """Return where a chunk's values are computed, and the copies from there to the buffer.

        That is the buffer itself if possible, or scratch.
        """
        if buffer is not None and chunk.in_bucket is not None and buffer.dtype == self._wide:
            return buffer[chunk.in_bucket].view(-1, self._layout.block_size), []
        shape = chunk.rows.stop - chunk.rows.start, self._layout.block_size
        return _scratch(torch.Size(shape), self._wide, "values"), chunk.copies


class Encoder(_Operation):
    """See ops.encoder."""

    def __call__(self, *, buffer: Tensor, payload: Tensor, kept: Tensor, rank: int) -> None:
        layout, blocks = self._layout, kept.view(-1, self._layout.block_size)
        for chunks, coded in zip(self._chunks, self._coded(payload), strict=False):
            for shard, (chunk, (codes, scales)) in enumerate(zip(chunks, coded, strict=True)):
                is_own, gradients = shard == rank, None
                if self._feedback:
                    gradients, values = partial(self._gradients, chunk, buffer), blocks[chunk.blocks]
                    for stored, in_bucket in chunk.copies:
                        values.view(-1)[stored].add_(buffer[in_bucket])
                else:
                    values = self._gradients(chunk, buffer, blocks[chunk.rows] if is_own else None)
                quantize(
                    values, codes=None if is_own else codes, scales=scales, bits=self._bits, top=self._top,
                    gradients=gradients,
                )  # fmt: skip
        exact = buffer.new_zeros(len(payload) * layout.exact_numel, dtype=self._exact_dtype)
        for each in layout.exact:
            exact[each.stored] = buffer[each.in_bucket]
        payload[:, self._exact_at] = exact.view(torch.uint8).view(len(payload), -1)

    def _gradients(self, chunk: Chunk, buffer: Tensor, out: Tensor | None = None) -> Tensor:
        """Write a chunk's gradients to out, scratch by default. Returns out."""
        out = self._values(chunk)[0] if out is None else out
        if chunk.in_bucket is not None:
            return out.copy_(buffer[chunk.in_bucket].view(out.shape))
        out.zero_()
        for stored, in_bucket in chunk.copies:
            out.view(-1)[stored].add_(buffer[in_bucket])
        return out


class _Adding(_Operation):
    """What the two adders have in common."""

    def __init__(
        self,
        layout: BlockLayout,
        dtype: torch.dtype,
        *,
        num_payloads: int,
        divisor: float | None = None,
        has_own: bool,
        **options: Any,
    ):
        super().__init__(layout, dtype, **options)
        self._has_own = has_own
        # Values are multiplied by this power of two, so that sums can't overflow. It changes no bits.
        self._shrink = 0.5 ** (num_payloads - 1).bit_length()
        self._num_ranks = divisor or num_payloads
        self._divisor = self._num_ranks * self._shrink  # of a shrunk sum: the quotient is the mean

    def _add(
        self, sent: list[tuple[Tensor, Tensor]], rank: int, top: float | None, is_large: bool, out: Tensor
    ) -> None:
        """Make this rank's own values in out, if there are any, the quotient of all ranks' sum.

        sent: the senders' codes and scales of a chunk, added in their order.
        top: see dequantize.
        is_large: whether the sum is limited to what the dtype holds.
        """
        if self._has_own:
            if top is not None:
                # The own codes aren't used, but a scale is NaN where the own values aren't finite.
                out[sent[rank][1].isnan()] = torch.nan
            if self._shrink != 1.0:
                out *= self._shrink
        how: dict[str, Any] = {"bits": self._bits, "top": top, "factor": self._shrink}
        for sender, (codes, scales) in enumerate(sent):
            if not (self._has_own and sender == rank):
                dequantize(codes, scales, out=out, add=self._has_own or sender > 0, **how)
        if is_large:
            _saturate(out, self._divisor)
        if self._divisor != 1.0:
            out /= self._divisor


class AdderInCodes(_Adding):
    """See ops.adder. The quantization errors of the mean, times the divisor, become the own values."""

    def __call__(self, *, received: Tensor, out: Tensor, kept: Tensor, rank: int) -> None:
        first = rank * self._layout.num_blocks if self._feedback else 0
        kept = kept.view(-1, self._layout.block_size)[first:]
        exact, scales, largest, top = self._others_of(received)
        stays = (scales == 0).all(0)
        if math.isnan(largest):
            stays |= scales[rank].isnan()
        is_small = largest <= SMALL_SCALE  # False if a scale is NaN
        parts = zip(self._chunks, self._coded(out[None]), self._coded(received), strict=False)
        for (chunk,), [(codes, scales)], sent in parts:
            own = kept[chunk.rows]
            # If no rank has sent a block, as of a layer that all ranks skip, its error stays; also if this
            # rank's own gradients in it aren't finite.
            left_out = stays[chunk.rows].nonzero()[:, 0]
            before = own.index_select(0, left_out)
            own.index_fill_(0, left_out, 0.0)
            self._add(sent, rank, top, not is_small, own)
            quantize(own, codes=codes, scales=scales, bits=self._bits, top=self._top)
            if self._feedback:
                own *= self._num_ranks
                if not is_small:
                    _saturate(own)
                own.index_copy_(0, left_out, before)
        mean_of_exact = (exact.to(self._wide) * self._shrink).sum(0) / self._divisor
        out[self._exact_at] = mean_of_exact.to(self._exact_dtype).view(torch.uint8)


class Adder(_Adding):
    """See ops.adder. The own values become zero."""

    def __call__(self, *, received: Tensor, out: Tensor, kept: Tensor, rank: int) -> None:
        first = rank * self._layout.num_blocks if self._feedback else 0
        kept = kept.view(-1, self._layout.block_size)[first:]
        exact, _, largest, top = self._others_of(received)
        is_large = not (self._has_own or largest <= SMALL_SCALE)
        for (chunk,), sent in zip(self._chunks, self._coded(received), strict=False):
            values, copies = (kept[chunk.rows], chunk.copies) if self._has_own else self._values(chunk, out)
            self._add(sent, rank, top, is_large, values)
            for stored, in_bucket in copies:
                out[in_bucket] = values.view(-1)[stored]
            if self._has_own:
                values.zero_()
        mean_of_exact = (exact.to(self._wide) * self._shrink).sum(0) / self._divisor
        for part in self._layout.exact:
            out[part.in_bucket] = mean_of_exact[part.stored]


class Decoder(_Operation):
    """See ops.decoder."""

    def __call__(self, *, payload: Tensor, buffer: Tensor) -> None:
        exact, _, _, top = self._others_of(payload)
        for chunks, coded in zip(self._chunks, self._coded(payload), strict=False):
            for chunk, (codes, scales) in zip(chunks, coded, strict=True):
                values, copies = self._values(chunk, buffer)
                dequantize(codes, scales, out=values, bits=self._bits, top=top)
                for stored, in_bucket in copies:
                    buffer[in_bucket] = values.view(-1)[stored]
        for each in self._layout.exact:
            buffer[each.in_bucket] = exact.view(-1)[each.stored]


def _saturate(values: Tensor, factor: float = 1.0) -> None:
    """Limit values to factor times the largest number of their dtype. NaN stays NaN."""
    limit = torch.finfo(values.dtype).max * factor
    values.clamp_(-limit, limit)
