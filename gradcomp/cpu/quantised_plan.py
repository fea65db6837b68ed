"""The arithmetic of a quantised all-reduce in plain torch: the reference, and what runs on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .quantise import dequantise, quantise, rows_at_a_time

if TYPE_CHECKING:
    from gradcomp.layout.blocks import BlockLayout, Part


@dataclass(frozen=True)
class Chunk:
    """Blocks of a shard that are quantised together.

    rows: which of the shard's. codes [blocks, bytes], scales [blocks]: where they are in a payload. copies:
    (elements of the chunk, where they are in the bucket).
    """

    rows: slice
    codes: torch.Tensor
    scales: torch.Tensor
    copies: Sequence[tuple[slice, slice]] = ()

    @property
    def num_blocks(self) -> int:
        return len(self.scales)


class QuantisedPlan:
    """The plan that ops.quantised_plan describes, in plain torch.

    Blocks are quantised in chunks, so that each stage reads memory once.
    """

    def __init__(
        self,
        layout: BlockLayout,
        dtype: torch.dtype,
        *,
        bits: int,
        error_feedback: bool,
        exact_dtype: torch.dtype | None = None,
    ):
        self.layout, self._exact_dtype, self._bits = layout, exact_dtype or dtype, bits
        self._wide = wide = torch.promote_types(dtype, torch.float32)
        self._sections, num_bytes = layout.sections(bits, self._exact_dtype.itemsize)
        self.payload = torch.zeros(layout.world_size, num_bytes, dtype=torch.uint8)
        self.received = torch.empty_like(self.payload)
        self.mean = torch.zeros(num_bytes, dtype=torch.uint8)

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
        self._mean = chunks(self.mean)
        self._scratch = torch.zeros(min(step, layout.num_blocks), layout.block_size, dtype=wide)
        self.error: torch.Tensor | None = None
        self.shard_error: torch.Tensor | None = None
        # By rank, of which a plan meets one.
        self._shard_padding: dict[int, list[slice]] = {}
        if error_feedback:
            self.error = torch.zeros(layout.world_size * layout.shard_numel, dtype=wide)
            self.shard_error = torch.zeros(layout.shard_numel, dtype=wide)

    def _copies(self, shard: int, rows: slice) -> list[tuple[slice, slice]]:
        """Return where a chunk's elements are in the bucket."""
        first, size = shard * self.layout.num_blocks, self.layout.block_size
        start, stop = (first + rows.start) * size, (first + rows.stop) * size
        copies = []
        for run in self.layout.runs_between(start, stop):
            low, high = max(run.stored.start, start), min(run.stored.stop, stop)
            offset = run.in_bucket.start - run.stored.start
            copies.append((slice(low - start, high - start), slice(low + offset, high + offset)))
        return copies

    def quantise(self, flat: torch.Tensor, rank: int, unused: Sequence[Part] = ()) -> None:
        """Quantise gradients plus errors into payload; what is lost becomes this rank's error."""
        error, kept = self.error, []
        if error is not None and self.shard_error is not None:
            error[self.layout.shard(rank)] -= self.shard_error
            kept = [error[part.stored].clone() for part in unused]
            for part in unused:
                error[part.stored] = flat[part.in_bucket] = 0.0
        for shard, chunks in enumerate(self._sent):
            for chunk in chunks:
                if error is None:
                    values = self._scratch[: chunk.num_blocks].zero_()
                else:
                    values = error.view(len(self._sent), -1, self.layout.block_size)[shard, chunk.rows]
                for stored, in_bucket in chunk.copies:
                    values.view(-1)[stored].add_(flat[in_bucket])
                quantise(values, codes=chunk.codes, scales=chunk.scales, bits=self._bits)
        if error is not None:
            self._clear(error, self.layout.padding)
            for part, before in zip(unused, kept, strict=True):
                error[part.stored] = before
        exact = torch.zeros(len(self.payload) * self.layout.exact_numel, dtype=self._exact_dtype)
        for each in self.layout.exact:
            exact[each.stored] = flat[each.in_bucket]
        self._exact_of(self.payload).copy_(exact.view(torch.uint8).view(len(self.payload), -1))

    def average(self, rank: int) -> None:
        """Average this rank's shard from received into mean; what is lost becomes the owner's error."""
        if not self.mean.numel():
            return
        world_size, size = self.layout.world_size, self.layout.block_size
        scales = self.received[:, self._sections[1]].contiguous().view(torch.bfloat16)
        is_sent = (scales != 0).any(0)[:, None]
        all_sent = bool(is_sent.all())
        for index, mean in enumerate(self._mean):
            total = self._scratch[: mean.num_blocks]
            for sender, chunks in enumerate(self._received):
                codes, scales = chunks[index].codes, chunks[index].scales
                dequantise(codes, scales, out=total, bits=self._bits, add=sender > 0)
            if self.shard_error is not None:
                error = self.shard_error.view(-1, size)[mean.rows]
                total += error
                # Where no rank has sent anything, a layer that all of them skip, the error stays.
                if not all_sent:
                    total.masked_fill_(~is_sent[mean.rows], 0.0)
            total /= world_size
            quantise(total, codes=mean.codes, scales=mean.scales, bits=self._bits)
            if self.shard_error is not None:
                total *= world_size
                error.copy_(total if all_sent else torch.where(is_sent[mean.rows], total, error))
        if self.error is not None and self.shard_error is not None:
            own = self.layout.shard(rank)
            if rank not in self._shard_padding:
                self._shard_padding[rank] = self.layout.padding_of(own)
            self._clear(self.shard_error, self._shard_padding[rank])
            self.error[own] += self.shard_error
        exact = self._exact_of(self.received).contiguous().view(self._exact_dtype)
        mean_of_exact = (exact.sum(0, dtype=self._wide) / world_size).to(self._exact_dtype)
        self._exact_of(self.mean).copy_(mean_of_exact.view(torch.uint8))

    def dequantise(self, flat: torch.Tensor) -> None:
        """Write the means in payload, one per shard, to the bucket."""
        for chunks in self._sent:
            for chunk in chunks:
                values = self._scratch[: chunk.num_blocks]
                dequantise(chunk.codes, chunk.scales, out=values, bits=self._bits)
                for stored, in_bucket in chunk.copies:
                    flat[in_bucket] = values.view(-1)[stored]
        exact = self._exact_of(self.payload).contiguous().view(-1).view(self._exact_dtype)
        for each in self.layout.exact:
            flat[each.in_bucket] = exact[each.stored]

    @staticmethod
    def _clear(error: torch.Tensor, padding: list[slice]) -> None:
        if padding:
            torch._foreach_zero_([error[each] for each in padding])

    def _exact_of(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[..., self._sections[2]]
