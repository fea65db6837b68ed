"""The quantized all-reduce's arithmetic in plain torch: to 8 or 4 bits, with one bf16 scale for each block.

    scale = the block's largest absolute value / L, rounded up to bf16        L = 127 at 8 bits, 7 at 4
    code  = round(value / scale), an integer from −L to L
    decoded = scale · code, limited to ±top, the largest number of the bucket's dtype

So no element is off by more than its block's largest value / 2L, plus the scale's rounding, and a zero stays
exactly zero. A block gets the scale NaN, and so becomes NaN, if it has a value that isn't finite, or an fp64
value beyond L times bf16's largest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gradcomp.layout.blocks import BlockLayout, Part

LARGEST_CODE = {8: 127, 4: 7}  # L by bits
LARGEST_IN_BF16 = torch.finfo(torch.bfloat16).max
CHUNK_NUMEL = 1 << 19  # elements to quantize at a time: more don't fit the caches, fewer need more calls
# Below SMALL a scale's inverse could be infinite, so the scale and its values are multiplied by BOOST before.
SMALL, BOOST = 2.0**-100, 2.0**64
# With scales up to this, sums of decoded values and errors are far from overflow in fp32.
SMALL_SCALE = 1e30


_of_thread = threading.local()


def _scratch(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return this thread's scratch buffer of a dtype. It grows to the size of the largest chunk."""
    buffer, numel = getattr(_of_thread, str(dtype), None), shape.numel()
    if buffer is None or buffer.numel() < numel:
        buffer = torch.empty(numel, dtype=dtype, device="cpu")
        setattr(_of_thread, str(dtype), buffer)
    return buffer[:numel].view(shape)


def quantize(
    values: torch.Tensor,
    *,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    top: float,
    gradients: Callable[[], torch.Tensor] | None = None,
    error: torch.Tensor | None = None,
) -> None:
    """Quantize blocks, and write the quantization errors to error, or in place of values.

    values: [blocks, size], fp32 or fp64, contiguous. CHUNK_NUMEL elements are quantized fastest.
    error: like values. Afterwards values − decoded codes; a block that isn't finite keeps its error. None to
        write to values, with zeros in such a block.
    codes: uint8 [blocks, size · bits / 8], written. At 4 bits a byte's lower half is the first one of a pair.
    scales: bf16 [blocks], written.
    top: the largest number to decode to.
    gradients: see find_scales.
    """
    if not len(values):
        return
    scale, least, largest = find_scales(values, scales=scales, bits=bits, gradients=gradients)
    bad = before = None
    if not largest < torch.inf:
        is_bad = scale.isnan()
        if error is not None:
            bad = is_bad[:, 0].nonzero()[:, 0]
            before = error.index_select(0, bad)
        values.masked_fill_(is_bad, 0.0)
        scale.masked_fill_(is_bad, 0.0)
        least, largest = _bounds(scale)
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
    out = values if error is None else error
    if largest * LARGEST_CODE[bits] <= top:
        torch.addcmul(values, decoded, scale, value=-1, out=out)
    else:
        torch.sub(values, decoded.mul_(scale).clamp_(-top, top), out=out)
    if bad is not None and before is not None:
        out.index_copy_(0, bad, before)


def find_scales(
    values: torch.Tensor,
    *,
    scales: torch.Tensor,
    bits: int,
    gradients: Callable[[], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, float, float]:
    """Write the blocks' scales. Returns them in fp32, [blocks, 1], and a lower and an upper bound of them.

    The upper bound isn't finite if a scale isn't.

    values, scales: see quantize.
    gradients: returns the gradients without errors, [blocks, size]. They replace sums of gradients and errors
        that aren't finite.
    """
    sizes = torch.maximum(values.amax(1, keepdim=True), values.amin(1, keepdim=True).neg_())
    scale = sizes.div_(LARGEST_CODE[bits]).to(torch.float32)
    bounds = _bounds(scale)
    if not bounds[1] <= LARGEST_IN_BF16:
        if gradients is not None:
            torch.where(values.isfinite(), values, gradients(), out=values)
            return find_scales(values, scales=scales, bits=bits)
        scale.masked_fill_(~(scale <= LARGEST_IN_BF16), torch.nan)
        bounds = torch.nan, torch.nan
    # Rounded up: bf16 is the upper half of fp32's bits.
    scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
    scales.copy_(scale[:, 0])
    return scale, *bounds


def _bounds(scale: torch.Tensor) -> tuple[float, float]:
    """Return bounds of scales that are rounded up from these, or rounded; NaN if a scale is."""
    least, largest = scale.aminmax()
    return float(least), float(largest) * (1 + 2.0**-7)


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    out: torch.Tensor,
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


@dataclass(frozen=True)
class Chunk:
    """Blocks of a shard that are quantized together.

    rows: the slice of the shard's blocks.
    codes, scales: [blocks, bytes] and [blocks], views of a payload.
    copies: (slice of the chunk's elements, the same elements' slice in the bucket) pairs.
    in_bucket: the chunk's elements in the bucket if they are together there, without padding; otherwise None.
    """

    rows: slice
    codes: torch.Tensor
    scales: torch.Tensor
    copies: Sequence[tuple[slice, slice]] = ()
    in_bucket: slice | None = None


class QuantizedPlan:
    """One bucket's plan in plain torch; see ops.quantized_plan.

    Blocks are quantized in chunks, so that each stage reads and writes main memory once. All other passes are
    in the processor's caches.
    """

    def __init__(
        self,
        layout: BlockLayout,
        dtype: torch.dtype,
        *,
        bits: int,
        error_feedback: bool,
        uncompressed_dtype: torch.dtype | None = None,
        divisor: float | None = None,
        averages_dtype: torch.dtype | None = None,
        only_dequantizes: bool = False,
        only_sums: bool = False,
        only_gathers: bool = False,
        num_senders: int | None = None,
    ):
        self._only_gathers, self._has_own = only_gathers, num_senders is None and not only_gathers
        num_ranks = num_senders or layout.world_size
        self.layout, self._uncompressed_dtype, self._bits = layout, uncompressed_dtype or dtype, bits
        self._wide = wide = torch.promote_types(dtype, torch.float32)
        self._top = torch.finfo(averages_dtype or dtype).max
        # Values are multiplied by this power of two before they are summed, so that sums can't overflow. It
        # changes no bits.
        self._shrink = 0.5 ** (num_ranks - 1).bit_length()
        self._num_ranks = num_ranks if divisor is None else divisor
        self._divisor = self._num_ranks * self._shrink  # of a shrunk sum: the quotient is the mean
        sections, self.payload_bytes = layout.sections(bits, self._uncompressed_dtype.itemsize)
        self._codes_at, self._scales_at, self._exact_at = sections
        num_bytes, num_payloads = self.payload_bytes, 0 if only_gathers else layout.world_size
        self.payload = torch.zeros(num_payloads, num_bytes, dtype=torch.uint8, device="cpu")
        averages = not (only_dequantizes or only_gathers)
        self.received = self.payload.new_empty(num_ranks if averages else 0, num_bytes)
        has_mean = self._has_own and averages and not only_sums
        self.mean = self.payload.new_zeros(num_bytes if has_mean else 0)
        step = max(1, CHUNK_NUMEL // layout.block_size)
        self._rows = [slice(i, min(i + step, layout.num_blocks)) for i in range(0, layout.num_blocks, step)]
        self._sent = [self._chunks(row, shard) for shard, row in enumerate(self.payload)]
        self._received = [self._chunks(row) for row in self.received]
        self._mean = self._chunks(self.mean) if has_mean else []
        self._scratch = self.payload.new_zeros(min(step, layout.num_blocks), layout.block_size, dtype=wide)
        self.error: torch.Tensor | None = None
        # Without an error, this rank's own values from quantize to the sum.
        keeps_own = self._has_own and not (error_feedback or only_dequantizes)
        self._kept = self.payload.new_zeros(layout.shard_numel if keeps_own else 0, dtype=wide)
        if error_feedback and not only_sums:
            self.error = self.payload.new_zeros(layout.world_size * layout.shard_numel, dtype=wide)

    def _chunks(self, payload: torch.Tensor, shard: int | None = None) -> list[Chunk]:
        """Cut a payload into chunks; with its shard's number, they know their places in the bucket."""
        if not self._rows:
            return []
        codes = payload[self._codes_at].view(-1, self.layout.code_bytes(self._bits))
        scales, chunks = payload[self._scales_at].view(torch.bfloat16), []
        for rows in self._rows:
            copies = [] if shard is None else self._copies(shard, rows)
            numel = (rows.stop - rows.start) * self.layout.block_size
            is_whole = [own for own, _ in copies] == [slice(0, numel)]
            chunks.append(Chunk(rows, codes[rows], scales[rows], copies, copies[0][1] if is_whole else None))
        return chunks

    def _copies(self, shard: int, rows: slice) -> list[tuple[slice, slice]]:
        """Return a chunk's copies: (slice of its elements, slice of the bucket) pairs."""
        first, size = shard * self.layout.num_blocks, self.layout.block_size
        start, stop = (first + rows.start) * size, (first + rows.stop) * size
        copies = []
        for run in self.layout.runs_between(start, stop):
            low, high = max(run.stored.start, start), min(run.stored.stop, stop)
            offset = run.in_bucket.start - run.stored.start
            copies.append((slice(low - start, high - start), slice(low + offset, high + offset)))
        return copies

    def quantize(
        self,
        flat: torch.Tensor,
        rank: int,
        unused: Sequence[Part] = (),
        stays: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Quantize gradients plus errors into payload. The quantization errors become this rank's error.

        A block that isn't finite keeps its error.
        """
        error, waiting = self.error, []
        for index, part in enumerate(unused):
            if stays is None:
                flat[part.in_bucket] = 0.0
            if error is not None:
                mask = slice(None) if stays is None else stays[index]
                waiting.append((error[part.stored], mask, error[part.stored][mask].clone()))
                error[part.stored][mask] = 0.0
        payload, sent = self.payload, self._sent
        if self._only_gathers:
            payload = self.payload[rank : rank + 1]
            sent = [self._chunks(payload[0], 0)]
        for shard, chunks in enumerate(sent):
            is_own = shard == rank and self._has_own
            for chunk in chunks:
                values = self._values_of(chunk, shard, is_own, flat)
                gradients = None if error is None else partial(self._gradients_of, chunk, flat)
                how: dict[str, Any] = {"scales": chunk.scales, "bits": self._bits, "gradients": gradients}
                kept = None if error is None else self._kept_in(shard)[chunk.rows]
                if not is_own:
                    quantize(values, codes=chunk.codes, top=self._top, error=kept, **how)
                    continue
                scale, _, largest = find_scales(values, **how)
                if kept is not None:
                    kept.copy_(values if largest < torch.inf else torch.where(scale.isnan(), kept, values))
        for values, mask, before in waiting:
            values[mask] = before
        exact = flat.new_zeros(len(payload) * self.layout.exact_numel, dtype=self._uncompressed_dtype)
        for each in self.layout.exact:
            if each.stored.start < len(exact):
                exact[each.stored] = flat[each.in_bucket]
        payload[:, self._exact_at] = exact.view(torch.uint8).view(len(payload), -1)

    def _kept_in(self, shard: int) -> torch.Tensor:
        """Return where a shard's values are kept, [blocks, size]: in the error; without one, only the own."""
        layout = self.layout
        if self.error is None:
            return self._kept.view(layout.num_blocks, layout.block_size)
        return self.error.view(layout.world_size, layout.num_blocks, layout.block_size)[shard]

    def _values_of(self, chunk: Chunk, shard: int, is_own: bool, flat: torch.Tensor) -> torch.Tensor:
        """Return a chunk's gradients plus errors, in scratch; without errors the own where they are kept."""
        values, gradients = self._scratch[: len(chunk.scales)], None
        if chunk.in_bucket is not None:
            gradients = flat[chunk.in_bucket].view(values.shape)
        if self.error is not None:
            error = self._kept_in(shard)[chunk.rows]
            if gradients is not None:
                return torch.add(error, gradients, out=values)
            values.copy_(error)
        else:
            values = self._kept_in(shard)[chunk.rows] if is_own else values
            if gradients is not None:
                return values.copy_(gradients)
            values.zero_()
        for stored, in_bucket in chunk.copies:
            values.view(-1)[stored].add_(flat[in_bucket])
        return values

    def _gradients_of(self, chunk: Chunk, flat: torch.Tensor) -> torch.Tensor:
        """Return a chunk's gradients without errors."""
        gradients = flat.new_zeros(len(chunk.scales) * self.layout.block_size, dtype=self._wide)
        for stored, in_bucket in chunk.copies:
            gradients[stored] = flat[in_bucket].to(self._wide)
        return gradients.view(-1, self.layout.block_size)

    def average(self, rank: int) -> None:
        """Average this rank's shard into mean: its own values, and the others' from received.

        The quantization errors, times the divisor, become this rank's error of the shard.
        """
        if not self.mean.numel():
            return
        scales, largest, top = self._scales_of(self.received)
        stays = (scales == 0).all(0) | scales[rank].isnan()
        is_small = largest <= SMALL_SCALE  # False if a scale is NaN
        for index, mean in enumerate(self._mean):
            own = self._kept_in(rank)[mean.rows]
            # If no rank has sent a block, as of a layer that all ranks skip, its error stays; also if this
            # rank's own gradients in it aren't finite.
            left_out = stays[mean.rows].nonzero()[:, 0]
            before = own.index_select(0, left_out)
            own.index_fill_(0, left_out, 0.0)
            self._add_others(own, rank, index, top)
            if not is_small:
                _saturate(own, self._divisor)
            if self._divisor != 1.0:
                own /= self._divisor
            quantize(own, codes=mean.codes, scales=mean.scales, bits=self._bits, top=self._top)
            if self.error is not None:
                own *= self._num_ranks
                if not is_small:
                    _saturate(own)
                own.index_copy_(0, left_out, before)
        exact = self.received[:, self._exact_at].contiguous().view(self._uncompressed_dtype)
        mean_of_exact = (exact.to(self._wide) * self._shrink).sum(0) / self._divisor
        self.mean[self._exact_at] = mean_of_exact.to(self._uncompressed_dtype).view(torch.uint8)

    def sum(self, out: torch.Tensor, rank: int, received: torch.Tensor | None = None) -> None:
        """Write a shard, summed over the ranks and divided by the divisor, to out.

        out: [elements of a shard], the shard's tensors in the bucket's order.
        received: the payloads, in received's place.
        """
        received = self.received if received is None else received
        senders = self._received if received is self.received else [self._chunks(row) for row in received]
        _, largest, top = self._scales_of(received)
        for index, chunk in enumerate(self._sent[0]):
            is_in_place = False
            if self._has_own:
                own = self._kept_in(rank)[chunk.rows]
                self._add_others(own, rank, index, top)
            else:
                is_in_place = chunk.in_bucket is not None and out.dtype == self._wide
                own = self._scratch[: len(chunk.scales)]
                if is_in_place:
                    own = out[chunk.in_bucket].view(own.shape)
                how: dict[str, Any] = {"bits": self._bits, "top": top, "factor": self._shrink}
                for sender, chunks in enumerate(senders):
                    sent = chunks[index]
                    dequantize(sent.codes, sent.scales, out=own, add=sender > 0, **how)
                if not largest <= SMALL_SCALE:
                    _saturate(own, self._divisor)
            if self._divisor != 1.0:
                own /= self._divisor
            if not is_in_place:
                for stored, in_shard in chunk.copies:
                    out[in_shard] = own.view(-1)[stored]
            if self._has_own:
                own.zero_()
        exact = received[:, self._exact_at].contiguous().view(self._uncompressed_dtype)
        total = exact.new_zeros(self.layout.exact_numel, dtype=self._wide)
        for row in exact:
            total.add_(row, alpha=self._shrink)
        if self._divisor != 1.0:
            total /= self._divisor
        for part in self.layout.exact:
            values = total[part.stored]  # of the shard alone
            out[part.in_bucket.start :][: len(values)] = values

    def _scales_of(self, payloads: torch.Tensor) -> tuple[torch.Tensor, float, float | None]:
        """Return the payloads' scales, [payloads, blocks], the largest, and dequantize's top for them.

        The largest is NaN if a scale is.
        """
        scales = payloads[:, self._scales_at].contiguous().view(torch.bfloat16)
        largest = float(scales.amax()) if scales.numel() else 0.0
        return scales, largest, None if largest * LARGEST_CODE[self._bits] <= self._top else self._top

    def _add_others(self, own: torch.Tensor, rank: int, index: int, top: float | None) -> None:
        """Make a chunk of this rank's own values the shrunk sum over all ranks, the others in their order.

        top: see dequantize.
        """
        if top is not None:
            # The own codes aren't used, but a scale is NaN where the own values aren't finite.
            own[self._received[rank][index].scales.isnan()] = torch.nan
        if self._shrink != 1.0:
            own *= self._shrink
        how: dict[str, Any] = {"bits": self._bits, "top": top, "factor": self._shrink}
        for sender, chunks in enumerate(self._received):
            if sender != rank:
                dequantize(chunks[index].codes, chunks[index].scales, out=own, add=True, **how)

    def dequantize(self, flat: torch.Tensor) -> None:
        """Write the means in payload, one per shard, to the bucket."""
        _, _, top = self._scales_of(self.payload)
        for chunks in self._sent or [self._chunks(row, shard) for shard, row in enumerate(self.payload)]:
            for chunk in chunks:
                values = self._scratch[: len(chunk.scales)]
                is_in_place = chunk.in_bucket is not None and flat.dtype == self._wide
                if is_in_place:
                    values = flat[chunk.in_bucket].view(values.shape)
                dequantize(chunk.codes, chunk.scales, out=values, bits=self._bits, top=top)
                if not is_in_place:
                    for stored, in_bucket in chunk.copies:
                        flat[in_bucket] = values.view(-1)[stored]
        exact = self.payload[:, self._exact_at].contiguous().view(-1).view(self._uncompressed_dtype)
        for each in self.layout.exact:
            flat[each.in_bucket] = exact[each.stored]


def _saturate(values: torch.Tensor, factor: float = 1.0) -> None:
    """Limit values to factor times the largest number of their dtype. NaN stays NaN."""
    limit = torch.finfo(values.dtype).max * factor
    values.clamp_(-limit, limit)
