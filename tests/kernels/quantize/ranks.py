"""Quantized all-reduces of simulated ranks, and checks of quantized blocks, for the kernels' tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from gradcomp import ops
from gradcomp.cpu import quantize as plain
from gradcomp.kernels.quantize.plan import QuantizedPlan
from gradcomp.layout import BlockLayout


def plans_of(
    layout: BlockLayout, dtype: torch.dtype, device: torch.device, *, bits: int, error_feedback: bool = True
) -> list[Any]:
    """Return a plan on the kernels for each simulated rank."""
    options = {"bits": bits, "error_feedback": error_feedback}
    plans = [ops.quantized_plan(layout, dtype, device, **options) for _ in range(layout.world_size)]
    assert all(isinstance(plan, QuantizedPlan) for plan in plans)
    return plans


def plain_plans_of(layout: BlockLayout, dtype: torch.dtype, **options: Any) -> list[Any]:
    """Return a plan in plain torch for each simulated rank."""
    return [plain.QuantizedPlan(layout, dtype, **options) for _ in range(layout.world_size)]


def padding_of(layout: BlockLayout) -> list[slice]:
    """Return the slices of the padded blocks that belong to no tensor."""
    ends = [0, *(run.stored.stop for run in layout.runs)]
    starts = [*(run.stored.start for run in layout.runs), layout.world_size * layout.shard_numel]
    return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def random_grads(layout: BlockLayout, dtype: torch.dtype, device: torch.device, seed: int) -> list[Any]:
    """Return a bucket for each rank."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.world_size, layout.numel)
    return list(torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype))


def all_to_all(plans: Sequence[Any]) -> None:
    for owner, plan in enumerate(plans):
        for sender, other in enumerate(plans):
            plan.received[sender].copy_(other.payload[owner])


def all_gather(plans: Sequence[Any]) -> None:
    for plan in plans:
        for owner, other in enumerate(plans):
            plan.payload[owner].copy_(other.mean)


def all_reduce(
    plans: Sequence[Any], grads: Sequence[torch.Tensor], unused: Sequence[Sequence[Any]] = ()
) -> list[torch.Tensor]:
    """Run the all-reduce; return every rank's averaged bucket.

    unused: for each rank the layout's parts that it has not used; by default it has used all.
    """
    outputs = [grad.clone() for grad in grads]
    for rank, plan in enumerate(plans):
        plan.quantize(outputs[rank], rank, unused[rank] if unused else ())
    all_to_all(plans)
    for rank, plan in enumerate(plans):
        plan.average(rank)
    all_gather(plans)
    for rank, plan in enumerate(plans):
        plan.dequantize(outputs[rank])
    return outputs


def sections_of(
    payload: torch.Tensor, layout: BlockLayout, dtype: torch.dtype, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the codes [blocks, bytes], scales and exact elements of one payload, on the CPU."""
    sections, _ = layout.sections(bits, dtype.itemsize)
    # Copy: view refuses an empty section that isn't aligned.
    codes, scales, exact = (payload.cpu()[section].clone() for section in sections)
    return codes.view(-1, layout.code_bytes(bits)), scales.view(torch.bfloat16), exact.view(dtype)


def blocks_of(layout: BlockLayout, flat: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Return a bucket's quantized tensors in blocks [blocks, size], with zeros as padding."""
    blocks = torch.zeros(layout.world_size * layout.shard_numel, dtype=wide)
    for part in layout.quantized:
        blocks[part.stored] = flat[part.in_bucket].cpu().to(wide)
    return blocks.view(-1, layout.block_size)


def assert_quantized(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
    """Compare codes and scales of finite blocks (fp32 or fp64) with those of plain torch, bit by bit."""
    own_codes, own_scales = torch.empty_like(codes), torch.empty_like(scales)
    plain.quantize(values.clone(), codes=own_codes, scales=own_scales, bits=bits, top=math.inf)
    assert torch.equal(codes, own_codes)
    assert torch.equal(scales, own_scales)


def dequantized(
    codes: torch.Tensor, scales: torch.Tensor, wide: torch.dtype, bits: int, top: float
) -> torch.Tensor:
    """Return what codes stand for."""
    if bits == 4:
        codes = torch.stack([codes << 4, codes & 0xF0], 2).flatten(1).view(torch.int8) >> 4
    return (codes.view(torch.int8).to(wide) * scales.to(wide)[:, None]).clamp(-top, top)
