"""The quantized all-reduce's plan of one bucket on the kernels: three launches per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..device import has_streams, launching_on
from ..launch import Stage
from .average import average, sum_shard
from .blocks import dequantize, quantize
from .bucket import QuantizedBucket

NO_RANK = -1  # no rank's shard, so quantize reads no owner's error


class QuantizedPlan:
    """One bucket's plan on a device that runs Triton; see ops.quantized_plan.

    options: QuantizedBucket's.

    Everything is allocated here, payloads included. A step allocates nothing, unless tensors are unused.
    """

    def __init__(self, layout: Any, dtype: torch.dtype, device: torch.device, **options: Any):
        bucket = QuantizedBucket(layout, dtype, device, **options)
        self.layout, self._device, self._feedback = layout, device, bucket.feedback
        self.payload, self.received, self.mean = bucket.payload, bucket.received, bucket.mean
        self._error, self._shard_error = bucket.error, bucket.shard_error
        self._quantizing, self._averaging, self._dequantizing, self._summing = (Stage([]) for _ in range(4))
        if bucket.only_sums:
            self._quantizing, self._summing = Stage([quantize(bucket)]), Stage([sum_shard(bucket)])
        else:
            self._dequantizing = Stage([dequantize(bucket)])
            if not bucket.only_dequantizes:
                self._quantizing, self._averaging = Stage([quantize(bucket)]), Stage([average(bucket)])
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
        for stage in (self._quantizing, self._averaging, self._dequantizing, self._summing):
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


def compile_kernels(layout: Any, dtype: torch.dtype, device: torch.device, **options: Any) -> None:
    """Compile every kernel that a QuantizedPlan with these arguments launches, on "meta" tensors."""
    plan = QuantizedPlan(layout, dtype, torch.device("meta"), **options)
    with launching_on(device):
        plan.compile()
