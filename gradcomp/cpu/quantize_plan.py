"""A quantized all-reduce's local arithmetic in plain torch, for CPU tensors and as the kernels' reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .quantize import dequantize, find_scales, largest_code, quantize, rows_at_a_time

if TYPE_CHECKING:
    from gradcomp.layout.blocks import BlockLayout, Part

# With scales up to this, sums of decoded values and errors are far from overflow in fp32.
SMALL_SCALE = 1e30


@dataclass(frozen=True)
class Chunk:
    """Blocks of a shard that are quantized together.

    rows: the slice of the shard's blocks.
    codes, scales: [blocks, bytes] and [blocks], views of a payload.
    copies: (slice of the chunk's elements, the same elements' slice in the bucket) pairs.
    """

    rows: slice
    codes: torch.Tensor
    scales: torch.Tensor
    copies: Sequence[tuple[slice, slice]] = ()

    @property
    def num_blocks(self) -> int:
        return len(self.scales)

    def adjacent(self, flat: torch.Tensor, block_size: int) -> torch.Tensor | None:
        """Return a view [blocks, size] of the bucket; None if the bucket has padding or gaps there."""
        if len(self.copies) != 1:
            return None
        stored, in_bucket = self.copies[0]
        is_whole = stored.stop - stored.start == self.num_blocks * block_size
        return flat[in_bucket].view(-1, block_size) if is_whole else None


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
        exact_dtype: torch.dtype | None = None,
        divisor: float | None = None,
        averages_dtype: torch.dtype | None = None,
        only_dequantizes: bool = False,
        only_sums: bool = False,
        num_senders: int | None = None,
    ):
        self._has_own, num_ranks = num_senders is None, num_senders or layout.world_size
        self.layout, self._exact_dtype, self._bits = layout, exact_dtype or dtype, bits
        self._wide = wide = torch.promote_types(dtype, torch.float32)
        self._top = torch.finfo(averages_dtype or dtype).max
        # Values are multiplied by this power of two before they are summed, so that sums can't overflow. It
        # changes no bits.
        self._shrink = 0.5 ** (num_ranks - 1).bit_length()
        self._num_ranks = num_ranks if divisor is None else divisor
        self._divisor = self._num_ranks * self._shrink  # of a shrunk sum: the quotient is the mean
        self._sections, num_bytes = layout.sections(bits, self._exact_dtype.itemsize)
        self.payload = torch.zeros(layout.world_size, num_bytes, dtype=torch.uint8)
        self.received = self.payload.new_empty(0 if only_dequantizes else num_ranks, num_bytes)
        has_mean = self._has_own and not (only_dequantizes or only_sums)
        self.mean = self.payload.new_zeros(num_bytes if has_mean else 0)
        step = rows_at_a_time(layout.block_size)
        self._rows = [slice(i, min(i + step, layout.num_blocks)) for i in range(0, layout.num_blocks, step)]
        self._sent = [self._chunks(row, shard) for shard, row in enumerate(self.payload)]
        self._received = [self._chunks(row) for row in self.received]
        self._mean = self._chunks(self.mean) if len(self.mean) else []
        self._scratch = torch.zeros(min(step, layout.num_blocks), layout.block_size, dtype=wide)
        self.error: torch.Tensor | None = None
        # Without an error, this rank's own values from quantize to the sum.
        keeps_own = self._has_own and not (error_feedback or only_dequantizes)
        self._kept = torch.zeros(layout.shard_numel if keeps_own else 0, dtype=wide)
        if error_feedback and not only_sums:
            self.error = torch.zeros(layout.world_size * layout.shard_numel, dtype=wide)

    def _chunks(self, payload: torch.Tensor, shard: int | None = None) -> list[Chunk]:
        """Cut a payload into chunks; with its shard's number, they know their places in the bucket."""
        if not self._rows:
            return []
        codes = payload[self._sections[0]].view(-1, self.layout.code_bytes(self._bits))
        scales = payload[self._sections[1]].view(torch.bfloat16)
        return [
            Chunk(rows, codes[rows], scales[rows], () if shard is None else self._copies(shard, rows))
            for rows in self._rows
        ]

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
        """Quantize gradients plus errors into payload. The quantization errors become this rank's error."""
        error, waiting = self.error, []
        for index, part in enumerate(unused):
            if stays is None:
                flat[part.in_bucket] = 0.0
            if error is not None:
                mask = slice(None) if stays is None else stays[index]
                waiting.append((error[part.stored], mask, error[part.stored][mask].clone()))
                error[part.stored][mask] = 0.0
        for shard, chunks in enumerate(self._sent):
            for chunk in chunks:
                values = self._values_of(chunk, shard, rank, flat)
                gradients = None if error is None else partial(self._gradients_of, chunk, flat)
                if shard == rank and self._has_own:
                    find_scales(values, scales=chunk.scales, bits=self._bits, gradients=gradients)
                else:
                    self._quantize(values, chunk, gradients)
        for values, mask, before in waiting:
            values[mask] = before
        exact = torch.zeros(len(self.payload) * self.layout.exact_numel, dtype=self._exact_dtype)
        for each in self.layout.exact:
            exact[each.stored] = flat[each.in_bucket]
        self._exact_of(self.payload).copy_(exact.view(torch.uint8).view(len(self.payload), -1))

    def _values_of(self, chunk: Chunk, shard: int, rank: int, flat: torch.Tensor) -> torch.Tensor:
        """Return a chunk's gradients plus errors, as a view of where the chunk's errors are kept, if any."""
        size = self.layout.block_size
        if self.error is not None:
            values = self.error.view(len(self._sent), -1, size)[shard, chunk.rows]
        else:
            is_own = shard == rank and self._has_own
            values = self._own(rank, chunk) if is_own else self._scratch[: chunk.num_blocks]
            gradients = chunk.adjacent(flat, size)
            if gradients is not None:
                return values.copy_(gradients)
            values.zero_()
        for stored, in_bucket in chunk.copies:
            values.view(-1)[stored].add_(flat[in_bucket])
        return values

    def _own(self, rank: int, chunk: Chunk) -> torch.Tensor:
        """Return where a chunk of this rank's shard is kept from quantize to the sum, [blocks, size]."""
        kept = self._kept if self.error is None else self.error[self.layout.shard(rank)]
        return kept.view(-1, self.layout.block_size)[chunk.rows]

    def _gradients_of(self, chunk: Chunk, flat: torch.Tensor) -> torch.Tensor:
        """Return a chunk's gradients without errors."""
        gradients = torch.zeros(chunk.num_blocks * self.layout.block_size, dtype=self._wide)
        for stored, in_bucket in chunk.copies:
            gradients[stored] = flat[in_bucket].to(self._wide)
        return gradients.view(-1, self.layout.block_size)

    def _quantize(
        self, values: torch.Tensor, chunk: Chunk, gradients: Callable[[], torch.Tensor] | None = None
    ) -> None:
        codes, scales, top = chunk.codes, chunk.scales, self._top
        quantize(values, codes=codes, scales=scales, bits=self._bits, top=top, gradients=gradients)

    def average(self, rank: int) -> None:
        """Average this rank's shard into mean: its own values, and the others' from received.

        The quantization errors, times the divisor, become this rank's error of the shard.
        """
        if not self.mean.numel():
            return
        scales, largest = self._scales_of(self.received)
        unsent = (scales == 0).all(0)
        is_small = largest <= SMALL_SCALE  # False if a scale is NaN
        for index, mean in enumerate(self._mean):
            own = self._own(rank, mean)
            # If no rank has sent a block, as of a layer that all ranks skip, its error stays.
            left_out = unsent[mean.rows].nonzero()[:, 0]
            before = own.index_select(0, left_out)
            own.index_fill_(0, left_out, 0.0)
            self._add_others(own, rank, index, largest)
            if not is_small:
                _saturate(own, self._divisor)
            if self._divisor != 1.0:
                own /= self._divisor
            self._quantize(own, mean)
            if self.error is not None:
                own *= self._num_ranks
                if not is_small:
                    _saturate(own)
                own.index_copy_(0, left_out, before)
        exact = self._exact_of(self.received).contiguous().view(self._exact_dtype)
        mean_of_exact = (exact.to(self._wide) * self._shrink).sum(0) / self._divisor
        self._exact_of(self.mean).copy_(mean_of_exact.to(self._exact_dtype).view(torch.uint8))

    def sum(self, out: torch.Tensor, rank: int, received: torch.Tensor | None = None) -> None:
        """Write a shard, summed over the ranks and divided by the divisor, to out.

        out: [elements of a shard], the shard's tensors in the bucket's order.
        received: the payloads, in received's place.
        """
        received = self.received if received is None else received
        rows = self._received if received is self.received else [self._chunks(row) for row in received]
        _, largest = self._scales_of(received)
        for index, chunk in enumerate(self._sent[0]):
            if self._has_own:
                own = self._own(rank, chunk)
                self._add_others(own, rank, index, largest)
            else:
                gradients = chunk.adjacent(out, self.layout.block_size) if out.dtype == self._wide else None
                own = self._scratch[: chunk.num_blocks] if gradients is None else gradients
                for sender, chunks in enumerate(rows):
                    self._dequantize(chunks[index], own, largest, factor=self._shrink, add=sender > 0)
                if not largest <= SMALL_SCALE:
                    _saturate(own, self._divisor)
            if self._divisor != 1.0:
                own /= self._divisor
            if self._has_own or gradients is None:
                for stored, in_shard in chunk.copies:
                    out[in_shard] = own.view(-1)[stored]
            if self._has_own:
                own.zero_()
        exact = self._exact_of(received).contiguous().view(self._exact_dtype)
        total = torch.zeros(self.layout.exact_numel, dtype=self._wide)
        for sent in exact:
            total.add_(sent, alpha=self._shrink)
        if self._divisor != 1.0:
            total /= self._divisor
        for part in self.layout.exact:
            end = min(part.stored.stop, self.layout.exact_numel)
            if part.stored.start < end:
                first = part.in_bucket.start
                out[first : first + end - part.stored.start] = total[part.stored.start : end]

    def _scales_of(self, payloads: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the payloads' scales, [payloads, blocks], and the largest; NaN if a scale is."""
        scales = payloads[:, self._sections[1]].contiguous().view(torch.bfloat16)
        return scales, float(scales.amax()) if scales.numel() else 0.0

    def _add_others(self, own: torch.Tensor, rank: int, index: int, largest: float) -> None:
        """Make a chunk of this rank's own values the shrunk sum over all ranks, the others in their order.

        largest: the largest scale; NaN if a scale is.
        """
        if math.isnan(largest):
            # The own codes aren't used, but a scale is NaN where the own values aren't finite.
            own[self._received[rank][index].scales.isnan()] = torch.nan
        if self._shrink != 1.0:
            own *= self._shrink
        for sender, chunks in enumerate(self._received):
            if sender != rank:
                self._dequantize(chunks[index], own, largest, factor=self._shrink, add=True)

    def dequantize(self, flat: torch.Tensor) -> None:
        """Write the means in payload, one per shard, to the bucket."""
        _, largest = self._scales_of(self.payload)
        for chunks in self._sent:
            for chunk in chunks:
                gradients = chunk.adjacent(flat, self.layout.block_size)
                if gradients is not None and flat.dtype == self._wide:
                    self._dequantize(chunk, gradients, largest)
                    continue
                values = self._scratch[: chunk.num_blocks]
                self._dequantize(chunk, values, largest)
                for stored, in_bucket in chunk.copies:
                    flat[in_bucket] = values.view(-1)[stored]
        exact = self._exact_of(self.payload).contiguous().view(-1).view(self._exact_dtype)
        for each in self.layout.exact:
            flat[each.in_bucket] = exact[each.stored]

    def _dequantize(self, chunk: Chunk, out: torch.Tensor, largest: float, **how: Any) -> None:
        """Dequantize a chunk. largest: the largest scale; NaN if a scale is."""
        top = None if largest * largest_code(self._bits) <= self._top else self._top
        dequantize(chunk.codes, chunk.scales, out=out, bits=self._bits, top=top, **how)

    def _exact_of(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[..., self._sections[2]]


def _saturate(values: torch.Tensor, factor: float = 1.0) -> None:
    """Limit values to factor times the largest number of their dtype. NaN stays NaN."""
    limit = torch.finfo(values.dtype).max * factor
    values.clamp_(-limit, limit)
