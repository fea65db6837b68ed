"""What the quantized all-reduce's kernels compute on for one bucket. Launchers take a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..device import num_multiprocessors, send
from ..launch import Slot
from .work import QuantizedWork

RANK = Slot("rank", 1000)  # this rank, the owner of shard_error's shard


class QuantizedBucket:
    """One bucket's tables and tensors on a device, and the options that its kernels are compiled for.

    layout: a BlockLayout.
    dtype: of the bucket's flat buffer.
    bits, error_feedback, exact_dtype, divisor, averages_dtype, only_dequantizes, only_sums: see
        ops.quantized_plan.
    levels: [16], the values of the 4-bit codes.
    thresholds: the 14 numbers between the 15 codes that are sent.
    largest_scale: the largest scale of a block.

    payload, received: uint8 [world size, bytes], the payloads of all shards, and of all ranks.
    mean: uint8 [bytes], one payload.
    error, shard_error: see ops.quantized_plan, in the arithmetic's dtype; empty without feedback.
    quantizer: see tile.py.
    bucket_work, shard_work: int64, QuantizedWork's; with only_sums shard_work is its sum_work.
    constants: what all kernels are compiled for.
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
        def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def sent(rows: list[tuple[int, ...]]) -> torch.Tensor:
            return send(torch.tensor(rows, dtype=torch.int64), device)

        self.layout, self.dtype, self.feedback = layout, dtype, error_feedback
        self.exact_dtype, self.averages_dtype = exact_dtype or dtype, averages_dtype or dtype
        self.only_dequantizes, self.only_sums = only_dequantizes, only_sums
        self.divisor = layout.world_size if divisor is None else divisor
        self.largest_scale = largest_scale
        self.work = work = QuantizedWork(
            layout, bits, dtype.itemsize, self.exact_dtype.itemsize, num_multiprocessors(device)
        )
        num_received = 0 if only_dequantizes else layout.world_size
        self.payload = zeros(layout.world_size, work.payload_bytes)
        self.received = zeros(num_received, work.payload_bytes)
        self.mean = zeros(0 if only_dequantizes or only_sums else work.payload_bytes)
        wide = torch.promote_types(dtype, torch.float32)
        kept = layout.shard_numel if error_feedback and not only_sums else 0
        self.error, self.shard_error = zeros(layout.world_size * kept, dtype=wide), zeros(kept, dtype=wide)
        self.quantizer = send(torch.cat([levels, torch.tensor(thresholds, dtype=levels.dtype)]), device)
        self.bucket_work = sent(work.bucket_work)
        self.shard_work = sent(work.sum_work if only_sums else work.shard_work)
        self.constants = {
            "BITS": bits,
            "SIZE": layout.block_size,
            "BLOCKS": work.tile_blocks,
        }
