"""A quantized all-reduce's local arithmetic in plain torch, for CPU tensors and as the kernels' reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from .quantize import dequantize, largest_scale, quantize, rows_at_a_time

if TYPE_CHECKING:
    from gradcomp.layout.blocks import BlockLayout, Part


# With scales up to this, sums of dequantized values and errors are far from overflow in fp32.
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
    ):
        self.layout, self._exact_dtype, self._bits = layout, exact_dtype or dtype, bits
        self._wide = wide = torch.promote_types(dtype, torch.float32)
        self._cap = largest_scale(bits, averages_dtype or dtype)
        # Values are multiplied by this power of two before they are summed, so that sums can't overflow. It
        # changes no bits.
        self._shrink = 0.5 ** (layout.world_size - 1).bit_length()
        self._num_ranks = layout.world_size if divisor is None else divisor
        self._divisor = self._num_ranks * self._shrink  # of a shrunk sum: the quotient is the mean
        self._sections, num_bytes = layout.sections(bits, self._exact_dtype.itemsize)
        self.payload = torch.zeros(layout.world_size, num_bytes, dtype=torch.uint8)
        self.received = torch.empty_like(self.payload[:0] if only_dequantizes else self.payload)
        self.mean = torch.zeros(0 if only_dequantizes or only_sums else num_bytes, dtype=torch.uint8)

        def chunks(payload: torch.Tensor, shard: int | None = None) -> list[Chunk]:
            if not self._rows:
                return []
            codes = payload[self._sections[0]].view(-1, layout.code_bytes(bits))
            scales = payload[self._sections[1]].view(torch.bfloat16)
            return [
                Chunk(rows, codes[rows], scales[rows], () if shard is None else self._copies(shard, rows))
                for rows in self._rows
            ]

        step = rows_at_a_time(layout.block_size)
        self._rows = [slice(i, min(i + step, layout.num_blocks)) for i in range(0, layout.num_blocks, step)]
        self._sent = [chunks(row, shard) for shard, row in enumerate(self.payload)]
        self._received = [chunks(row) for row in self.received]
        self._mean = chunks(self.mean) if len(self.mean) else []
        self._scratch = torch.zeros(min(step, layout.num_blocks), layout.block_size, dtype=wide)
        self.error: torch.Tensor | None = None
        self.shard_error: torch.Tensor | None = None
        if error_feedback and not only_sums:
            self.error = torch.zeros(layout.world_size * layout.shard_numel, dtype=wide)
            self.shard_error = torch.zeros(layout.shard_numel, dtype=wide)

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
        rank: int | None,
        unused: Sequence[Part] = (),
        stays: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Quantize gradients plus errors into payload. The quantization errors become this rank's error."""
        error, owners, kept = self.error, self.shard_error, []
        if error is not None and owners is not None and rank is not None and unused:
            error[self.layout.shard(rank)] -= owners
            owners = None
            kept = [error[part.stored].clone() for part in unused]
            for index, part in enumerate(unused):
                if stays is None:
                    error[part.stored] = flat[part.in_bucket] = 0.0
                else:
                    error[part.stored].masked_fill_(stays[index], 0.0)
        for shard, chunks in enumerate(self._sent):
            for chunk in chunks:
                values = self._values_of(chunk, shard, owners if shard == rank else None, flat)
                gradients = None if error is None else partial(self._gradients_of, chunk, flat)
                self._quantize(values, chunk, gradients)
        if error is not None:
            for index, (part, before) in enumerate(zip(unused, kept, strict=True)):
                mask = slice(None) if stays is None else stays[index]
                error[part.stored][mask] = before[mask]
        exact = torch.zeros(len(self.payload) * self.layout.exact_numel, dtype=self._exact_dtype)
        for each in self.layout.exact:
            exact[each.stored] = flat[each.in_bucket]
        self._exact_of(self.payload).copy_(exact.view(torch.uint8).view(len(self.payload), -1))

    def _values_of(
        self, chunk: Chunk, shard: int, owners: torch.Tensor | None, flat: torch.Tensor
    ) -> torch.Tensor:
        """Return a chunk's gradients plus the sender's errors, as a view of self.error if errors are kept.

        owners: the owner's error in the shard, to be subtracted from self.error first; None to subtract
            nothing.
        """
        size = self.layout.block_size
        if self.error is not None:
            values = self.error.view(len(self._sent), -1, size)[shard, chunk.rows]
            if owners is not None:
                values -= owners.view(-1, size)[chunk.rows]
        else:
            values = self._scratch[: chunk.num_blocks]
            gradients = chunk.adjacent(flat, size)
            if gradients is not None:
                return values.copy_(gradients)
            values.zero_()
        for stored, in_bucket in chunk.copies:
            values.view(-1)[stored].add_(flat[in_bucket])
        return values

    def _gradients_of(self, chunk: Chunk, flat: torch.Tensor) -> torch.Tensor:
        """Return a chunk's gradients without errors."""
        gradients = torch.zeros(chunk.num_blocks * self.layout.block_size, dtype=self._wide)
        for stored, in_bucket in chunk.copies:
            gradients[stored] = flat[in_bucket].to(self._wide)
        return gradients.view(-1, self.layout.block_size)

    def _quantize(
        self, values: torch.Tensor, chunk: Chunk, gradients: Callable[[], torch.Tensor] | None = None
    ) -> None:
        codes, scales, cap = chunk.codes, chunk.scales, self._cap
        quantize(values, codes=codes, scales=scales, bits=self._bits, cap=cap, gradients=gradients)

    def average(self, rank: int) -> None:
        """Average this rank's shard from received into mean. The quantization errors become the owner's."""
        if not self.mean.numel():
            return
        scales = self.received[:, self._sections[1]].contiguous().view(torch.bfloat16)
        unsent = (scales == 0).all(0)
        size, own = self.layout.block_size, self.layout.shard(rank)
        for index, mean in enumerate(self._mean):
            # False if a scale is NaN.
            is_small = bool(scales[:, mean.rows].amax() <= SMALL_SCALE)
            if self.error is None or self.shard_error is None:
                self._quantize_mean(self._sum_of_ranks(index), mean, is_small)
                continue
            error = self.shard_error.view(-1, size)[mean.rows]
            # If all ranks sent zeros for a block, as for a layer that all ranks skip, its error stays.
            left_out = unsent[mean.rows].nonzero()[:, 0]
            kept = error.index_select(0, left_out)
            error.index_fill_(0, left_out, 0.0)
            self._add_sum_of_ranks(index, error)
            self._quantize_mean(error, mean, is_small)
            if self._num_ranks != 1:
                error *= self._num_ranks
            if not is_small:
                # Leave room for the sender's error, at most a quarter of the range, which is added next.
                half = torch.finfo(error.dtype).max / 2
                error.clamp_(-half, half)
            error.index_copy_(0, left_out, kept)
            self.error[own].view(-1, size)[mean.rows].add_(error)
        exact = self._exact_of(self.received).contiguous().view(self._exact_dtype)
        mean_of_exact = (exact.to(self._wide) * self._shrink).sum(0) / self._divisor
        self._exact_of(self.mean).copy_(mean_of_exact.to(self._exact_dtype).view(torch.uint8))

    def sum(self, out: torch.Tensor) -> None:
        """Write the sum of this rank's shard over the payloads in received, divided by the divisor, to out.

        out: [elements of a shard], the shard's tensors in the bucket's order.
        """
        for index, chunk in enumerate(self._sent[0]):
            total = self._sum_of_ranks(index)
            if self._divisor != 1.0:
                total /= self._divisor
            for stored, in_shard in chunk.copies:
                out[in_shard] = total.view(-1)[stored]
        exact = self._exact_of(self.received).contiguous().view(self._exact_dtype)
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

    def _sum_of_ranks(self, index: int) -> torch.Tensor:
        """Return the shrunk sum of a chunk over all ranks' received codes, in the order of ranks."""
        total = self._scratch[: self._received[0][index].num_blocks]
        for sender, chunks in enumerate(self._received):
            codes, scales = chunks[index].codes, chunks[index].scales
            dequantize(codes, scales, out=total, bits=self._bits, factor=self._shrink, add=sender > 0)
        return total

    def _add_sum_of_ranks(self, index: int, error: torch.Tensor) -> None:
        """Shrink a chunk of the owner's error, and add the shrunk sum of the chunk over all ranks' codes."""
        if self.layout.world_size > 1:
            torch.add(self._sum_of_ranks(index), error, alpha=self._shrink, out=error)
        else:
            codes, scales = self._received[0][index].codes, self._received[0][index].scales
            dequantize(codes, scales, out=error, bits=self._bits, add=True)

    def _quantize_mean(self, total: torch.Tensor, mean: Chunk, is_small: bool) -> None:
        """Quantize a chunk's mean from its shrunk sum over the ranks. Leaves the mean's errors in total."""
        if not is_small:
            largest = torch.finfo(total.dtype).max * self._divisor
            total.clamp_(-largest, largest)
        if self._divisor != 1.0:
            total /= self._divisor
        self._quantize(total, mean)

    def dequantize(self, flat: torch.Tensor) -> None:
        """Write the means in payload, one per shard, to the bucket."""
        for chunks in self._sent:
            for chunk in chunks:
                gradients = chunk.adjacent(flat, self.layout.block_size)
                if gradients is not None and flat.dtype == self._wide:
                    dequantize(chunk.codes, chunk.scales, out=gradients, bits=self._bits)
                    continue
                values = self._scratch[: chunk.num_blocks]
                dequantize(chunk.codes, chunk.scales, out=values, bits=self._bits)
                for stored, in_bucket in chunk.copies:
                    flat[in_bucket] = values.view(-1)[stored]
        exact = self._exact_of(self.payload).contiguous().view(-1).view(self._exact_dtype)
        for each in self.layout.exact:
            flat[each.in_bucket] = exact[each.stored]

    def _exact_of(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[..., self._sections[2]]
