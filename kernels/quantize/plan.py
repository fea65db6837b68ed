"""The quantized all-reduce's plan of one bucket on the kernels: three launches per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..device import has_streams, launching_on
from ..launch import Stage
from .average import average
from .blocks import dequantize, quantize
from .bucket import QuantizedBucket


class QuantizedPlan(QuantizedBucket):
    """One bucket's plan on a device that runs Triton; see ops.quantized_plan.

    Everything is allocated here, payloads included. A step allocates nothing, unless tensors are unused.
    """

    def __init__(self, layout: Any, dtype: torch.dtype, device: torch.device, **options: Any):
        super().__init__(layout, dtype, device, **options)
        self._device = device
        self._quantizing, self._averaging, self._dequantizing = Stage([]), Stage([]), Stage([])
        if not self.only_dequantizes:
            self._quantizing, self._averaging = Stage([quantize(self)]), Stage([average(self)])
        if not self.only_sums:
            self._dequantizing = Stage([dequantize(self)])
        if has_streams(device):
            with launching_on(device):
                self.compile()

    @property
    def error(self) -> torch.Tensor | None:
        """The values that the averages still lack from this rank, in the order of the padded blocks."""
        return self.kept if self.feedback else None

    @error.setter
    def error(self, error: torch.Tensor) -> None:
        self.kept = error

    def compile(self) -> None:
        """Compile every kernel for the current device."""
        for stage in (self._quantizing, self._averaging, self._dequantizing):
            stage.compile()

    def quantize(
        self,
        flat: torch.Tensor,
        rank: int,
        unused: Sequence[Any] = (),
        stays: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Quantize gradients plus errors into payload. One launch, unless tensors are unused.

        The quantization errors become this rank's error.
        """
        waiting = []
        for index, part in enumerate(unused):
            error = self.kept[part.stored if self.feedback else slice(0)]
            if stays is None:
                flat[part.in_bucket] = 0.0
            stay = torch.ones_like(error, dtype=torch.bool) if stays is None else stays[index]
            if self.feedback:
                waiting.append((error, stay, error.clone()))
                error.masked_fill_(stay, 0.0)
        with launching_on(self._device):
            self._quantizing(buffer=flat, kept=self.kept, rank=rank)
        for error, stay, before in waiting:
            error.copy_(torch.where(stay, before, error))

    def average(self, rank: int) -> None:
        """Average this rank's shard into mean; see ops.quantized_plan. One launch."""
        with launching_on(self._device):
            self._averaging(kept=self.kept, rank=rank)

    def sum(self, out: torch.Tensor, rank: int) -> None:
        """Write this rank's shard, summed over the ranks and divided by the divisor, to out. One launch."""
        with launching_on(self._device):
            self._averaging(buffer=out, kept=self.kept, rank=rank)

    def dequantize(self, flat: torch.Tensor) -> None:
        """Write the means in payload, one per shard, to the bucket. One launch."""
        with launching_on(self._device):
            self._dequantizing(buffer=flat)


def compile_kernels(layout: Any, dtype: torch.dtype, device: torch.device, **options: Any) -> None:
    """Compile every kernel that a QuantizedPlan with these arguments launches, on "meta" tensors."""
    plan = QuantizedPlan(layout, dtype, torch.device("meta"), **options)
    with launching_on(device):
        plan.compile()
