"""Quantized all-reduces of simulated ranks, and checks of quantized blocks, for the kernels' tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradcomp import ops
from gradcomp.cpu import quantize as plain
from gradcomp.cpu.quantize_plan import QuantizedPlan as PlainPlan
from gradcomp.kernels.quantize.plan import QuantizedPlan
from gradcomp.layout import BlockLayout
from tests.tolerances import QUANTIZED_SCALE, QUANTIZED_THRESHOLD


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
    return [PlainPlan(layout, dtype, **options) for _ in range(layout.world_size)]


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


def all_reduce(plans: Sequence[Any], grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run the all-reduce; return every rank's averaged bucket."""
    outputs = [grad.clone() for grad in grads]
    for rank, plan in enumerate(plans):
        plan.quantize(outputs[rank], rank)
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


def decoded_4(codes: torch.Tensor) -> torch.Tensor:
    """Return the levels of 4-bit codes, in float64."""
    pairs = torch.stack([codes & 15, codes >> 4], 2).flatten(1)
    return plain.levels().double()[pairs.long()]


def assert_quantized(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
    """Compare codes and scales of finite blocks (fp32 or fp64) with the definition."""
    if bits == 8:
        own_codes, own_scales = torch.empty_like(codes), torch.empty_like(scales)
        plain.quantize(values.clone(), codes=own_codes, scales=own_scales, bits=8)
        assert torch.equal(codes, own_codes)
        assert torch.equal(scales, own_scales)
        return
    cap = plain.largest_scale(4, values.dtype)
    values = values.double()
    level = decoded_4(codes)
    unit = values / values.square().mean(1, keepdim=True).sqrt().clamp(1e-300, cap / 1.5)
    chosen, nearest = (unit - level).abs(), (unit[:, :, None] - plain.levels().double()).abs().amin(2)
    assert (chosen <= nearest + QUANTIZED_THRESHOLD).all()
    best = ((values * level).sum(1) / level.square().sum(1).clamp_min(0.5)).clamp_max(cap)
    assert torch.allclose(scales.double(), best, rtol=QUANTIZED_SCALE, atol=2.0**-134)


def dequantized(codes: torch.Tensor, scales: torch.Tensor, wide: torch.dtype, bits: int) -> torch.Tensor:
    """Return the codes' values, rounded once."""
    decoded = codes.view(torch.int8) if bits == 8 else decoded_4(codes)
    return decoded.to(wide) * scales.to(wide)[:, None]
