"""The quantized all-reduce's plan of one bucket on the kernels: three launches per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..device import has_streams, launching_on, send
from ..launch import Launch, Slot, Stage
from .average import average
from .blocks import dequantize, quantize
from .sum import sum_shard
from .work import QuantizedWork

NO_RANK = -1  # no rank's shard, so quantize reads no owner's error


class QuantizedPlan:
    """One bucket's plan on a device that runs Triton; see ops.quantized_plan.

    layout: a BlockLayout.
    levels: [16], the values of the 4-bit codes.
    thresholds: the 14 numbers between the 15 codes that are sent.
    largest_scale: the largest scale of a block.

    Everything is allocated here, payloads included. A step allocates nothing, unless tensors are unused.
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
        divisor: float | None = None,
        averages_dtype: torch.dtype | None = None,
        only_dequantizes: bool = False,
        only_sums: bool = False,
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
        self.received = zeros(0 if only_dequantizes else layout.world_size, work.payload_bytes)
        self.mean = zeros(0 if only_dequantizes or only_sums else work.payload_bytes)
        self._divisor = layout.world_size if divisor is None else divisor
        kept = layout.shard_numel if error_feedback and not only_sums else 0
        self._error, self._shard_error = zeros(layout.world_size * kept, dtype=wide), zeros(kept, dtype=wide)
        self._bucket_work = _table(work.bucket_work, device)
        self._shard_work = _table(work.sum_work if only_sums else work.shard_work, device)
        self._quantizer = send(torch.cat([levels, torch.tensor(thresholds, dtype=levels.dtype)]), device)
        self._sizes = {
            "bits": bits,
            "block_size": layout.block_size,
            "tile_blocks": work.tile_blocks,
            "num_warps": work.num_warps,
        }
        self.largest_scale = largest_scale
        self._quantizing, self._averaging, self._dequantizing = self._stages(dtype)
        self._summing = Stage([self._sum_launch(averages_dtype or dtype)] if only_sums else [])
        self._used = [self._quantizing, self._averaging, self._dequantizing]
        if only_sums:
            self._used = [self._quantizing, self._summing]
        elif only_dequantizes:
            self._used = [self._dequantizing]
        if has_streams(device):
            with launching_on(device):
                self.compile()

    @property
    def error(self) -> torch.Tensor | None:
        """The values that the averages still lack from this rank, in the order of the padded blocks."""
        return self._error if self._feedback else None

    @error.setter
    def error(self, error: torch.Tensor) -> None:
        self._error = error

    @property
    def shard_error(self) -> torch.Tensor | None:
        """The owner's error of this rank's shard, which is part of error."""
        return self._shard_error if self._feedback else None

    def compile(self) -> None:
        """Compile every kernel for the current device."""
        for stage in self._used:
            stage.compile()

    def quantize(
        self,
        flat: torch.Tensor,
        rank: int | None,
        unused: Sequence[Any] = (),
        stays: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Quantize gradients plus errors into payload. One launch, unless tensors are unused.

        The quantization errors become this rank's error.
        """
        rank, kept = NO_RANK if rank is None else rank, []
        for index, part in enumerate(unused):
            if self._feedback:
                before = self._error[part.stored].clone()
                error = self._take_error(part.stored, rank)
                if stays is not None:
                    self._error[part.stored] = torch.where(stays[index], self._error[part.stored], before)
                kept.append(error)
            if stays is None:
                flat[part.in_bucket] = 0.0
        with launching_on(self._device):
            self._quantizing(buffer=flat, error=self._error, rank=rank)
        for index, (part, error) in enumerate(zip(unused, kept, strict=False)):
            lost = self._error[part.stored]
            self._error[part.stored] = error if stays is None else torch.where(stays[index], error, lost)

    def average(self, rank: int) -> None:
        """Average this rank's shard from received into mean. The quantization errors become the owner's.

        One launch.
        """
        with launching_on(self._device):
            self._averaging(rank=rank)

    def dequantize(self, flat: torch.Tensor) -> None:
        """Write the means in payload, one per shard, to the bucket. One launch."""
        with launching_on(self._device):
            self._dequantizing(buffer=flat)

    def sum(self, out: torch.Tensor) -> None:
        """Write the sum of this rank's shard over received, divided by the divisor, to out. One launch."""
        with launching_on(self._device):
            self._summing(buffer=out)

    def _take_error(self, part: slice, rank: int) -> torch.Tensor:
        """Return the sender's error in a part of the blocks, and change error so that quantize adds zero."""
        own = self.layout.shard(rank)
        error = self._error[part].clone()
        self._error[part] = 0.0
        start, stop = max(part.start, own.start), min(part.stop, own.stop)
        if start < stop:
            # quantize subtracts the owner's error.
            owners = self._shard_error[start - own.start : stop - own.start]
            error[start - part.start : stop - part.start] -= owners
            self._error[start:stop] = owners
        return error

    def _stages(self, dtype: torch.dtype) -> tuple[Stage, Stage, Stage]:
        """Return the stages that quantize, average and dequantize.

        dtype: the bucket's dtype.
        """
        buffer, rank, sizes = Slot.buffer(dtype), Slot("rank", 1000), self._sizes
        quantizing = quantize(
            buffer,
            self._quantizer,
            self._bucket_work,
            rank,
            error=Slot("error", self._error[:0]),
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
            divisor=self._divisor,
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

    def _sum_launch(self, dtype: torch.dtype) -> Launch:
        """Return sum's launch. dtype: of its out."""
        return sum_shard(
            self.received.view(-1).view(self.exact_dtype),
            self._quantizer,
            self._shard_work,
            out=Slot.buffer(dtype),
            dtype=self._error.dtype,
            world_size=self.layout.world_size,
            divisor=self._divisor,
            **self._sizes,
        )


def _table(rows: Sequence[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    return send(torch.tensor(rows, dtype=torch.int64), device)


def compile_kernels(layout: Any, dtype: torch.dtype, device: torch.device, **options: Any) -> None:
    """Compile every kernel that a QuantizedPlan with these arguments launches, on "meta" tensors."""
    plan = QuantizedPlan(layout, dtype, torch.device("meta"), **options)
    with launching_on(device):
        plan.compile()
