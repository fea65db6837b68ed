"""The quantized all-reduce's working set for one bucket on the kernels: three launches a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..device import has_streams, launching_on, send
from ..launch import Slot, Stage
from .average import average
from .blocks import dequantize, quantize
from .work import QuantizedWork


class QuantizedPlan:
    """The plan that ops.quantized_plan describes, on a device that runs Triton.

    layout: a BlockLayout. levels: [16], what the codes of 4 bits stand for; thresholds: the 14 numbers
    between the 15 that are sent. largest_scale: of a block. Everything is allocated here, payloads included:
    a step allocates nothing, unless it leaves tensors out.
    """

    def __init__(
        self,
        layout: Any,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bits: int,
        error_feedback: bool,
        exact_dtype: torch.dtype | None = None,
        levels: torch.Tensor,
        thresholds: Sequence[float],
        largest_scale: float,
    ):
        self.layout, self._device, self._feedback = layout, device, error_feedback
        self.exact_dtype = exact_dtype = exact_dtype or dtype
        work = QuantizedWork(layout, bits, dtype.itemsize, exact_dtype.itemsize)
        wide = torch.promote_types(dtype, torch.float32)

        def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.payload = zeros(layout.world_size, work.payload_bytes)
        self.received = zeros(layout.world_size, work.payload_bytes)
        self.mean = zeros(work.payload_bytes)
        kept = layout.shard_numel if error_feedback else 0
        self._error, self._shard_error = zeros(layout.world_size * kept, dtype=wide), zeros(kept, dtype=wide)
        self._bucket_work = _table(work.bucket_work, device)
        self._shard_work = _table(work.shard_work, device)
        self._quantizer = send(torch.cat([levels, torch.tensor(thresholds, dtype=levels.dtype)]), device)
        self._sizes = {
            "bits": bits,
            "block_size": layout.block_size,
            "tile_blocks": work.tile_blocks,
            "num_warps": work.num_warps,
        }
        self.largest_scale = largest_scale
        self._quantizing, self._averaging, self._dequantizing = self._stages(dtype)
        if has_streams(device):
            with launching_on(device):
                self.compile()

    @property
    def error(self) -> torch.Tensor | None:
        """What the mean lacks of this rank's gradients, by element of the padded blocks."""
        return self._error if self._feedback else None

    @property
    def shard_error(self) -> torch.Tensor | None:
        """The part of error that is the owner's of this rank's shard."""
        return self._shard_error if self._feedback else None

    def compile(self) -> None:
        """Compile every kernel for the current device."""
        for stage in (self._quantizing, self._averaging, self._dequantizing):
            stage.compile()

    def quantize(self, flat: torch.Tensor, rank: int, unused: Sequence[Any] = ()) -> None:
        """Quantize gradients plus errors into payload; what is lost becomes this rank's error. One launch."""
        kept = [(part.stored, self._take_error(part.stored, rank)) for part in unused if self._feedback]
        for part in unused:
            flat[part.in_bucket] = 0.0
        with launching_on(self._device):
            self._quantizing(buffer=flat, rank=rank)
        for stored, error in kept:
            self._error[stored] = error

    def average(self, rank: int) -> None:
        """Average this rank's shard from received into mean; what is lost becomes the owner's error.

        One launch.
        """
        with launching_on(self._device):
            self._averaging(rank=rank)

    def dequantize(self, flat: torch.Tensor) -> None:
        """Write the means in payload, one per shard, to the bucket. One launch."""
        with launching_on(self._device):
            self._dequantizing(buffer=flat)

    def _take_error(self, part: slice, rank: int) -> torch.Tensor:
        """Return the sender's error in a part of the blocks, and make quantize find zero there."""
        own = self.layout.shard(rank)
        error = self._error[part].clone()
        self._error[part] = 0.0
        start, stop = max(part.start, own.start), min(part.stop, own.stop)
        if start < stop:
            # quantize takes the owner's error off.
            owners = self._shard_error[start - own.start : stop - own.start]
            error[start - part.start : stop - part.start] -= owners
            self._error[start:stop] = owners
        return error

    def _stages(self, dtype: torch.dtype) -> tuple[Stage, Stage, Stage]:
        """Return the launches that quantize, average and dequantize. dtype: the bucket's."""
        buffer, rank, sizes = Slot.buffer(dtype), Slot("rank", 1000), self._sizes
        quantizing = quantize(
            buffer,
            self._quantizer,
            self._bucket_work,
            rank,
            error=self._error,
            shard_error=self._shard_error,
            out=self.payload,
            feedback=self._feedback,
            exact_dtype=self.exact_dtype,
            cap=self.largest_scale,
            **sizes,
        )
        averaging = average(
            self.received.view(-1).view(self.exact_dtype),
            self._quantizer,
            self._shard_work,
            rank,
            error=self._error,
            shard_error=self._shard_error,
            out=self.mean.view(self.exact_dtype),
            world_size=self.layout.world_size,
            feedback=self._feedback,
            cap=self.largest_scale,
            **sizes,
        )
        dequantizing = dequantize(
            self.payload,
            self._quantizer,
            self._bucket_work,
            out=buffer,
            exact_dtype=self.exact_dtype,
            **sizes,
        )
        return Stage([quantizing]), Stage([averaging]), Stage([dequantizing])


def _table(rows: Sequence[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    return send(torch.tensor(rows, dtype=torch.int64), device)


def compile_kernels(layout: Any, dtype: torch.dtype, device: torch.device, **options: Any) -> None:
    """Compile every kernel that a QuantizedPlan with these arguments launches, on "meta" tensors."""
    plan = QuantizedPlan(layout, dtype, torch.device("meta"), **options)
    with launching_on(device):
        plan.compile()
