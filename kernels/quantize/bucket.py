"""What the quantized all-reduce's kernels compute on for one bucket. Launchers take a bucket."""

from __future__ import annotations

from typing import Any

import torch

from ..device import num_multiprocessors, send
from ..launch import Slot, registers
from .work import QuantizedWork

RANK = Slot("rank", 1000)


class QuantizedBucket:
    """One bucket's tables and tensors on a device, and the options that its kernels are compiled for.

    layout: a BlockLayout.
    dtype: of the bucket's flat buffer.
    The other options: see ops.quantized_plan.

    payload, received: uint8 [world size, bytes], the payloads of all shards, and of all ranks.
    mean: uint8 [bytes], one payload.
    kept: the error, in the arithmetic's dtype. Without feedback [shard_numel], the own values until the sum.
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
    ):
        def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def sent(rows: list[tuple[int, ...]]) -> torch.Tensor:
            return send(torch.tensor(rows, dtype=torch.int64), device)

        self.layout, self.dtype, self.feedback = layout, dtype, error_feedback
        self.exact_dtype, self.averages_dtype = exact_dtype or dtype, averages_dtype or dtype
        self.only_dequantizes, self.only_sums = only_dequantizes, only_sums
        self.divisor = layout.world_size if divisor is None else divisor
        self.work = work = QuantizedWork(
            layout, bits, dtype.itemsize, self.exact_dtype.itemsize, num_multiprocessors(device)
        )
        self.payload = zeros(layout.world_size, work.payload_bytes)
        self.received = zeros(0 if only_dequantizes else layout.world_size, work.payload_bytes)
        self.mean = zeros(0 if only_dequantizes or only_sums else work.payload_bytes)
        num_kept = layout.world_size if error_feedback else 1
        if only_dequantizes or (error_feedback and only_sums):
            num_kept = 0
        self.kept = zeros(num_kept * layout.shard_numel, dtype=torch.promote_types(dtype, torch.float32))
        self.kept_slot = Slot("kept", self.kept[:0])
        self.bucket_work = sent(work.bucket_work)
        self.shard_work = sent(work.sum_work if only_sums else work.shard_work)
        self.constants = {
            "BITS": bits,
            "LIMIT": torch.finfo(self.averages_dtype).max,
            "SIZE": layout.block_size,
            "BLOCKS": work.tile_blocks,
            "num_warps": work.num_warps,
            "maxnreg": registers(work.num_warps, work.resident_programs),
            # Each product is rounded, as in plain torch.
            "enable_fp_fusion": False,
        }
