"""Quantised all-reduce as a compressor: two collectives of codes and scales in place of one of the bucket.

    rank r    bucket + error ──quantise──▶ shard 0 │ shard 1 │ … │ shard W−1
    all-to-all: every rank gets its own shard of all ranks
    owner     Σ dequantised + its error ──quantise──▶ the shard's mean
    all-gather: every rank gets all shards, and dequantises the same bytes

A rank sends and receives about two buckets of codes, whatever the number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.layout.blocks import BlockLayout

from .compressor import BucketSpec, Compressor, State

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.

# torch 2.13 gave it a new name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class QuantisedOptions:
    """The options of a quantised all-reduce.

    bits: 4 or 8 for an element. block_size: elements that have one scale; even. error_feedback: add what a
    step's rounding loses to the next step's gradients.

    Raises ValueError for other values.
    """

    bits: int = 4
    block_size: int = 128
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or isinstance(self.bits, bool):
            raise ValueError(f"bits is {self.bits!r}; it has to be 4 or 8")
        size = self.block_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 2 or size % 2:
            raise ValueError(f"block_size is {size!r}; it has to be an even number of elements, at least 2")
        if not isinstance(self.error_feedback, bool):
            raise ValueError(f"error_feedback is {self.error_feedback!r}; it has to be True or False")


class QuantisedCompressor(Compressor):
    """The quantised all-reduce of one bucket, with error feedback on the sender and on the owner of a shard.

    Its state: "error", what the mean still lacks of this rank's gradients: the sender's error, plus the
    owner's in its shard, times the number of ranks. "shard_error": the latter alone. Without the other it is
    no error of its own, so a rank with another shard starts from "error" alone, and nothing is lost.
    """

    def __init__(self, bucket: BucketSpec, options: QuantisedOptions):
        self._options, self._dtype, self._device = options, bucket.dtype, bucket.device
        self.layout = layout = BlockLayout(bucket.shapes, options.block_size, bucket.world_size)
        self._wide = torch.float64 if bucket.dtype == torch.float64 else torch.float32
        self._code_bytes = ops.code_bytes(options.bits, options.block_size)
        self._sections, self._payload_bytes = layout.sections(self._code_bytes, 2, bucket.dtype.itemsize)
        # Between steps the blocks hold the error. A step adds gradients, and leaves what quantising loses.
        self._blocks = self._zeros(layout.world_size * layout.shard_numel)
        self._shard_error = self._zeros(layout.shard_numel)
        self._parts = [self._blocks[part.stored] for part in layout.quantised]
        self._padding = [self._blocks[each] for each in layout.padding]
        self._part_of = {
            part.position: blocks for part, blocks in zip(layout.quantised, self._parts, strict=True)
        }
        self._unused: list[torch.Tensor] = []
        self._own: slice | None = None  # this rank's shard, once its rank is known
        self._loaded_shard_error: torch.Tensor | None = None
        # An all-reduce of as many bytes would have as many elements.
        self.sent_numel = -(-layout.world_size * self._payload_bytes // bucket.dtype.itemsize)

    def _zeros(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel, dtype=self._wide, device=self._device)

    def leave_out(self, unused: Sequence[int]) -> None:
        """Send nothing of these tensors, so that their errors stay."""
        self._unused = [self._part_of[position] for position in unused if position in self._part_of]

    def average(self, flat: torch.Tensor, group: dist.ProcessGroup, seed: int) -> None:
        """Replace the bucket by its mean over the ranks, quantised twice, but for what is sent exactly."""
        layout = self.layout
        own = slice(group.rank() * layout.shard_numel, (group.rank() + 1) * layout.shard_numel)
        if not layout.num_blocks + layout.exact_numel:
            return
        self._take_loaded_shard_error(own)
        payload = torch.zeros(layout.world_size, self._payload_bytes, dtype=torch.uint8, device=self._device)
        self._send(flat, payload, own)
        received = torch.empty_like(payload)
        dist.all_to_all_single(received.view(-1), payload.view(-1), group=group)
        _all_gather(payload.view(-1), self._mean_of(received, own), group=group)
        self._receive(payload, flat)

    def _send(self, flat: torch.Tensor, payload: torch.Tensor, own: slice) -> None:
        """Quantise gradients plus errors into payloads by shard; what is lost becomes the sender's error."""
        gradients = [flat[part.in_bucket] for part in self.layout.quantised]
        kept: list[torch.Tensor] = []
        if gradients and self._options.error_feedback:
            self._blocks[own] -= self._shard_error
            kept = [part.clone() for part in self._unused]
            torch._foreach_add_(self._parts, gradients)
            for part in self._unused:
                part.zero_()
        elif gradients:
            torch._foreach_copy_(self._parts, gradients)
        self._quantise(self._blocks, payload)
        if self._padding:
            torch._foreach_zero_(self._padding)
        for part, error in zip(self._unused, kept, strict=False):
            part.copy_(error)
        exact = torch.zeros(
            payload.shape[0] * self.layout.exact_numel, dtype=self._dtype, device=self._device
        )
        for each in self.layout.exact:
            exact[each.stored] = flat[each.in_bucket]
        self._exact_of(payload).copy_(exact.view(torch.uint8).view(payload.shape[0], -1))

    def _mean_of(self, received: torch.Tensor, own: slice) -> torch.Tensor:
        """Return the payload of this shard's mean; what is lost becomes the owner's error."""
        layout, world_size = self.layout, self.layout.world_size
        total = self._zeros(layout.shard_numel)
        exact_total = self._zeros(layout.exact_numel)
        is_sent = torch.zeros(layout.num_blocks, 1, dtype=torch.bool, device=self._device)
        for payload in received.split(1):
            self._dequantise(payload, total, add=True)
            exact_total += self._exact_of(payload).view(-1).view(self._dtype)
            is_sent |= self._scales_of(payload)[:, None] != 0
        blocks = total.view(-1, layout.block_size)
        if self._options.error_feedback:
            # Where no rank has sent anything, a layer that all of them skip, the error stays.
            total += self._shard_error
            blocks *= is_sent
        total /= world_size
        result = torch.zeros(1, self._payload_bytes, dtype=torch.uint8, device=self._device)
        self._quantise(total, result)
        self._exact_of(result).copy_((exact_total / world_size).to(self._dtype).view(torch.uint8))
        if self._options.error_feedback:
            kept = self._shard_error.view(-1, layout.block_size)
            self._shard_error = torch.where(is_sent, blocks * world_size, kept).view(-1)
            for part in self._padding_of(own):
                self._shard_error[part] = 0.0
            self._blocks[own] += self._shard_error
        return result.view(-1)

    def _receive(self, payload: torch.Tensor, flat: torch.Tensor) -> None:
        """Write all shards' means to the bucket."""
        values = self._zeros(self.layout.world_size * self.layout.shard_numel)
        self._dequantise(payload, values, add=False)
        exact = self._exact_of(payload).reshape(-1).view(self._dtype)
        for tensors, means in ((self.layout.quantised, values), (self.layout.exact, exact)):
            for each in tensors:
                flat[each.in_bucket] = means[each.stored]

    # --- payloads: rows of codes, scales and exact elements ---

    def _quantise(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        num_blocks = len(values) // self.layout.block_size
        codes = torch.empty(num_blocks, self._code_bytes, dtype=torch.uint8, device=self._device)
        scales = torch.empty(num_blocks, dtype=torch.bfloat16, device=self._device)
        ops.quantise(
            values.view(num_blocks, self.layout.block_size),
            codes=codes,
            scales=scales,
            bits=self._options.bits,
        )
        payload[:, self._sections[0]] = codes.view(len(payload), -1)
        payload[:, self._sections[1]] = scales.view(torch.uint8).view(len(payload), -1)

    def _dequantise(self, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        codes = payload[:, self._sections[0]].reshape(-1, self._code_bytes)
        blocks = out.view(-1, self.layout.block_size)
        ops.dequantise(codes, self._scales_of(payload), out=blocks, bits=self._options.bits, add=add)

    def _scales_of(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[:, self._sections[1]].reshape(-1).view(torch.bfloat16)

    def _exact_of(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[:, self._sections[2]]

    # --- memory ---

    def _padding_of(self, own: slice) -> list[slice]:
        """Return the padding in a shard, in its elements."""
        clipped = (
            slice(max(each.start, own.start), min(each.stop, own.stop)) for each in self.layout.padding
        )
        return [
            slice(each.start - own.start, each.stop - own.start) for each in clipped if each.start < each.stop
        ]

    def _take_loaded_shard_error(self, own: slice) -> None:
        """Take over the loaded owner's error, now that this rank's shard is known."""
        self._own = own
        if self._loaded_shard_error is not None:
            self._shard_error = self._padded(self._loaded_shard_error)[own]
            self._loaded_shard_error = None

    def _padded(self, flat: torch.Tensor) -> torch.Tensor:
        padded = self._zeros(len(self._blocks))
        for part in self.layout.quantised:
            padded[part.stored] = flat[part.in_bucket]
        return padded

    def _unpadded(self, blocks: torch.Tensor) -> torch.Tensor:
        flat = self._zeros(self.layout.numel)
        for part in self.layout.quantised:
            flat[part.in_bucket] = blocks[part.stored]
        return flat

    def state(self) -> State:
        if not self._options.error_feedback:
            return {}
        shard_error = self._loaded_shard_error
        if shard_error is None:
            padded = self._zeros(len(self._blocks))
            if self._own is not None:
                padded[self._own] = self._shard_error
            shard_error = self._unpadded(padded)
        return {"error": self._unpadded(self._blocks), "shard_error": shard_error.clone()}

    def load(self, state: State) -> None:
        if self._options.error_feedback and "error" in state:
            self._blocks.copy_(self._padded(state["error"].to(self._wide)))
            self._shard_error.zero_()
            loaded = state.get("shard_error")
            self._loaded_shard_error = None if loaded is None else loaded.to(self._device, self._wide)
