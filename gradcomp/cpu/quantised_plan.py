"""The arithmetic of a quantised all-reduce in plain torch: the reference, and what runs on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .quantise import code_bytes, dequantise, quantise, rows_at_a_time

if TYPE_CHECKING:
    from gradcomp.layout import BlockLayout

Rows = slice  # blocks of a shard
Copy = tuple[slice, slice]  # elements of a chunk, and where they are in the bucket


class QuantisedPlan:
    """The plan that ops.quantised_plan describes, in plain torch.

    Blocks are quantised in chunks, so that each stage reads memory once.
    """

    def __init__(self, layout: BlockLayout, dtype: torch.dtype, *, bits: int, error_feedback: bool):
        self.layout, self._dtype, self._bits = layout, dtype, bits
        self._wide = wide = torch.promote_types(dtype, torch.float32)
        self._code_bytes = code_bytes(bits, layout.block_size)
        self._sections, num_bytes = layout.sections(self._code_bytes, dtype.itemsize)
        self.payload = torch.zeros(layout.world_size, num_bytes, dtype=torch.uint8)
        self.received = torch.empty_like(self.payload)
        self.mean = torch.zeros(num_bytes, dtype=torch.uint8)
        step = rows_at_a_time(layout.block_size)
        self._chunks = [
            slice(row, min(row + step, layout.num_blocks)) for row in range(0, layout.num_blocks, step)
        ]
        self._scratch = torch.zeros(min(step, layout.num_blocks), layout.block_size, dtype=wide)
        self._copies = [
            [self._copies_of(shard, rows) for rows in self._chunks] for shard in range(layout.world_size)
        ]
        self.error: torch.Tensor | None = None
        self.shard_error: torch.Tensor | None = None
        if error_feedback:
            self.error = torch.zeros(layout.world_size * layout.shard_numel, dtype=wide)
            self.shard_error = torch.zeros(layout.shard_numel, dtype=wide)

    def _copies_of(self, shard: int, rows: Rows) -> list[Copy]:
        """Return where a chunk's elements are in the bucket."""
        first, size = shard * self.layout.num_blocks, self.layout.block_size
        start, stop = (first + rows.start) * size, (first + rows.stop) * size
        copies = []
        for part in self.layout.runs_between(start, stop):
            low, high = max(part.stored.start, start), min(part.stored.stop, stop)
            offset = part.in_bucket.start - part.stored.start
            copies.append((slice(low - start, high - start), slice(low + offset, high + offset)))
        return copies

    def quantise(self, flat: torch.Tensor, rank: int, unused: Sequence[slice] = ()) -> None:
        """Quantise gradients plus errors into payload; what is lost becomes this rank's error."""
        error, own = self.error, self.layout.shard(rank)
        kept = []
        if error is not None and self.shard_error is not None:
            error[own] -= self.shard_error
            kept = [(part, error[part].clone()) for part in unused]
            for part in unused:
                error[part] = 0.0
        for shard, payload in enumerate(self.payload):
            codes, scales = self._codes_of(payload), self._scales_of(payload)
            for rows, copies in zip(self._chunks, self._copies[shard], strict=True):
                values = self._values(shard, rows)
                for stored, in_bucket in copies:
                    if error is None:
                        values.view(-1)[stored].copy_(flat[in_bucket])
                    else:
                        values.view(-1)[stored].add_(flat[in_bucket])
                quantise(values, codes=codes[rows], scales=scales[rows], bits=self._bits)
        if error is not None:
            self._clear_padding(error)
            for part, before in kept:
                error[part] = before
        exact = torch.zeros(self.payload.shape[0] * self.layout.exact_numel, dtype=self._dtype)
        for each in self.layout.exact:
            exact[each.stored] = flat[each.in_bucket]
        self._exact_of(self.payload).copy_(exact.view(torch.uint8).view(len(self.payload), -1))

    def _values(self, shard: int, rows: Rows) -> torch.Tensor:
        """Return the memory in which a chunk of gradients plus errors is quantised."""
        if self.error is None:
            return self._scratch[: rows.stop - rows.start].zero_()
        blocks = self.error.view(self.layout.world_size, -1, self.layout.block_size)
        return blocks[shard, rows]

    def average(self, rank: int) -> None:
        """Average this rank's shard from received into mean; what is lost becomes the owner's error."""
        payloads = [(self._codes_of(each), self._scales_of(each)) for each in self.received]
        codes, scales = self._codes_of(self.mean), self._scales_of(self.mean)
        size, world_size = self.layout.block_size, self.layout.world_size
        for rows in self._chunks:
            total = self._scratch[: rows.stop - rows.start]
            is_sent = torch.zeros(len(total), dtype=torch.bool)
            for index, (sent_codes, sent_scales) in enumerate(payloads):
                dequantise(sent_codes[rows], sent_scales[rows], out=total, bits=self._bits, add=index > 0)
                is_sent |= sent_scales[rows] != 0
            if self.shard_error is not None:
                kept = self.shard_error.view(-1, size)[rows]
                total += kept
                # Where no rank has sent anything, a layer that all of them skip, the error stays.
                if not is_sent.all():
                    total[~is_sent] = 0.0
            total /= world_size
            quantise(total, codes=codes[rows], scales=scales[rows], bits=self._bits)
            if self.shard_error is not None:
                total *= world_size
                kept.copy_(total if is_sent.all() else torch.where(is_sent[:, None], total, kept))
        if self.error is not None and self.shard_error is not None:
            own = self.layout.shard(rank)
            self._clear_padding(self.shard_error, own)
            self.error[own] += self.shard_error
        exact = self._exact_of(self.received).contiguous().view(self._dtype).to(self._wide)
        mean = (exact.sum(0) / world_size).to(self._dtype)
        self._exact_of(self.mean).copy_(mean.view(torch.uint8))

    def dequantise(self, flat: torch.Tensor) -> None:
        """Write the means in payload, one per shard, to the bucket."""
        for shard, payload in enumerate(self.payload):
            codes, scales = self._codes_of(payload), self._scales_of(payload)
            for rows, copies in zip(self._chunks, self._copies[shard], strict=True):
                values = self._scratch[: rows.stop - rows.start]
                dequantise(codes[rows], scales[rows], out=values, bits=self._bits)
                for stored, in_bucket in copies:
                    flat[in_bucket] = values.view(-1)[stored]
        exact = self._exact_of(self.payload).contiguous().view(-1).view(self._dtype)
        for each in self.layout.exact:
            flat[each.in_bucket] = exact[each.stored]

    def _clear_padding(self, error: torch.Tensor, within: slice | None = None) -> None:
        """Set an error's padding to zero. within: the blocks' elements that it has; None for all."""
        padding = self.layout.padding if within is None else self.layout.padding_of(within)
        if padding:
            torch._foreach_zero_([error[each] for each in padding])

    def _codes_of(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[self._sections[0]].view(-1, self._code_bytes)

    def _scales_of(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[self._sections[1]].view(torch.bfloat16)

    def _exact_of(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[..., self._sections[2]]
