"""The quantized all-reduce's plan of one bucket on the kernels: three launches per step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...device import has_streams, launching_on, num_multiprocessors, send
from ..launch import Launch, Slot, Stage, registers
from ..tile import element_type
from .kernels import _average_kernel, _dequantize_kernel, _quantize_kernel
from .work import QuantizedWork


class QuantizedPlan:
    """One bucket's plan on a device that runs Triton; see ops.quantized_plan for the options.

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
        uncompressed_dtype: torch.dtype | None = None,
        divisor: float | None = None,
        averages_dtype: torch.dtype | None = None,
        only_dequantizes: bool = False,
        only_sums: bool = False,
        only_gathers: bool = False,
        num_senders: int | None = None,
    ):
        def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.layout, self._device, self._feedback = layout, device, error_feedback
        self._uncompressed_dtype = uncompressed_dtype or dtype
        self._only_gathers, self._has_own = only_gathers, num_senders is None and not only_gathers
        self._num_payloads = num_senders or layout.world_size  # of a shard
        self._only_sums = only_sums = only_sums or num_senders is not None
        work = QuantizedWork(
            layout, bits, dtype.itemsize, self._uncompressed_dtype.itemsize, num_multiprocessors(device)
        )
        self.payload_bytes = work.payload_bytes
        self.payload = zeros(0 if only_gathers else layout.world_size, work.payload_bytes)
        averages = not (only_dequantizes or only_gathers)
        self.received = zeros(self._num_payloads if averages else 0, work.payload_bytes)
        self.mean = zeros(work.payload_bytes if averages and not only_sums else 0)
        # The error, or without feedback this rank's own values until the sum.
        num_kept = layout.world_size if error_feedback else int(self._has_own)
        if only_dequantizes or (only_sums and self._has_own and error_feedback):
            num_kept = 0
        self._kept = zeros(num_kept * layout.shard_numel, dtype=torch.promote_types(dtype, torch.float32))
        quantize, average, dequantize = self._launches(work, dtype, averages_dtype or dtype, divisor)
        self._quantizing = Stage([] if only_dequantizes else [quantize])
        self._averaging = Stage([average] if averages else [])
        self._dequantizing = Stage([] if only_sums else [dequantize])
        if has_streams(device):
            self.compile(device)

    def _launches(
        self, work: QuantizedWork, dtype: torch.dtype, averages_dtype: torch.dtype, divisor: float | None
    ) -> tuple[Launch, Launch, Launch]:
        """Return the launches that quantize, average and dequantize."""
        wide, world_size, only_sums = self._kept.dtype, self._num_payloads, self._only_sums
        divisor = world_size if divisor is None else divisor
        bucket, kept, rank = Slot.buffer(dtype), Slot("kept", self._kept[:0]), Slot("rank", 1000)
        payload, has_equal_shards = Slot("payload", self.payload[:0]), only_sums or self._only_gathers
        received = Slot("received", torch.empty(1, dtype=self._uncompressed_dtype, device="meta"))
        bucket_work, shard_work = (
            send(torch.tensor(rows, dtype=torch.int64, device="cpu"), self._device)
            for rows in (work.bucket_work, work.sum_work if has_equal_shards else work.shard_work)
        )
        quantize_work = shard_work if self._only_gathers else bucket_work
        constants = {
            "BITS": work.bits,
            "LIMIT": torch.finfo(averages_dtype).max,
            "SIZE": self.layout.block_size,
            "BLOCKS": work.tile_blocks,
            "num_warps": work.num_warps,
            "maxnreg": registers(work.num_warps, work.resident_programs),
            # Each product is rounded, as in plain torch.
            "enable_fp_fusion": False,
        }
        # A power of two changes no bits. It is at most 1 / world size, so no sum overflows.
        shrink = 0.5 ** (world_size - 1).bit_length()
        by, exact = divisor * shrink, element_type(self._uncompressed_dtype)
        quantize = Launch(
            _quantize_kernel, len(quantize_work), bucket, kept, payload, quantize_work, rank,
            FEEDBACK=self._feedback, EXACT=exact, **constants,
        )  # fmt: skip
        average = Launch(
            _average_kernel, len(shard_work), received,
            Slot.buffer(averages_dtype) if only_sums else self.mean.view(self._uncompressed_dtype),
            kept, shard_work, rank, work.payload_bytes, self.layout.num_blocks,
            WORLD_SIZE=world_size, DIVISOR=divisor, SHRINK=shrink, BY=by,
            INVERSE=1 / by if math.frexp(by)[0] == 0.5 else 0.0,
            FEEDBACK=self._feedback, HAS_OWN=self._has_own, ONLY_SUMS=only_sums,
            LARGEST=torch.finfo(wide).max, **constants,
        )  # fmt: skip
        dequantize = Launch(
            _dequantize_kernel, len(bucket_work), payload, bucket, bucket_work,
            ACC=element_type(wide), EXACT=exact, **constants,
        )  # fmt: skip
        return quantize, average, dequantize

    @property
    def error(self) -> torch.Tensor | None:
        """The values that the averages still lack from this rank, in the order of the padded blocks."""
        return self._kept if self._feedback else None

    @error.setter
    def error(self, error: torch.Tensor) -> None:
        self._kept = error

    def compile(self, device: torch.device) -> None:
        """Compile every kernel for a device. The plan's own may be "meta"."""
        with launching_on(device):
            for stage in (self._quantizing, self._averaging, self._dequantizing):
                stage.compile()

    def quantize(
        self,
        flat: torch.Tensor,
        rank: int,
        unused: Sequence[Any] = (),
        stays: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Quantize gradients plus errors into payload. One launch, unless tensors are unused."""
        waiting = []
        for index, part in enumerate(unused):
            if stays is None:
                flat[part.in_bucket] = 0.0
            if self._feedback:
                error = self._kept[part.stored]
                stay = torch.ones_like(error, dtype=torch.bool) if stays is None else stays[index]
                waiting.append((error, stay, error.clone()))
                error.masked_fill_(stay, 0.0)
        payload = self.payload[rank] if self._only_gathers else self.payload
        with launching_on(self._device):
            self._quantizing(
                buffer=flat, kept=self._kept, payload=payload, rank=rank if self._has_own else -1
            )
        for error, stay, before in waiting:
            error.copy_(torch.where(stay, before, error))  # without waiting for a GPU, unlike error[stay]

    def average(self, rank: int) -> None:
        """Average this rank's shard into mean. One launch."""
        self._average(self.received, rank)

    def sum(self, out: torch.Tensor, rank: int, received: torch.Tensor | None = None) -> None:
        """Write a shard, summed over the ranks and divided by the divisor, to out. One launch.

        received: the payloads, in received's place.
        """
        self._average(self.received if received is None else received, rank, buffer=out)

    def _average(self, received: torch.Tensor, rank: int, **buffer: torch.Tensor) -> None:
        received = received.view(-1).view(self._uncompressed_dtype)
        rank = rank if self._has_own else -1
        with launching_on(self._device):
            self._averaging(received=received, kept=self._kept, rank=rank, **buffer)

    def dequantize(self, flat: torch.Tensor) -> None:
        """Write the means in payload, one per shard, to the bucket. One launch."""
        with launching_on(self._device):
            self._dequantizing(buffer=flat, payload=self.payload)
