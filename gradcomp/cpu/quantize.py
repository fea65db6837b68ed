"""Quantization of blocks in plain torch, to 8 or 4 bits, with one bf16 scale for each block.

    scale = the block's largest absolute value / L, rounded up to bf16        L = 127 at 8 bits, 7 at 4
    code  = round(value / scale), an integer from −L to L
    decoded = scale · code, limited to ±top, the largest number of the bucket's dtype

So no element is off by more than its block's largest value / 2L, plus the scale's rounding, and a zero stays
exactly zero. A block gets the scale NaN, and so becomes NaN, if it has a value that isn't finite, or an fp64
value beyond L times bf16's largest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

LARGEST_IN_BF16 = torch.finfo(torch.bfloat16).max
CHUNK_NUMEL = 1 << 19  # elements to quantize at a time: more don't fit the caches, fewer need more calls
# Below SMALL a scale's inverse could be infinite, so the scale and its values are multiplied by BOOST before.
SMALL, BOOST = 2.0**-100, 2.0**64


def largest_code(bits: int) -> int:
    """Return L."""
    return 127 if bits == 8 else 7


def rows_at_a_time(block_size: int) -> int:
    """Return the number of blocks to quantize at a time: as many as the processor's caches hold."""
    return max(1, CHUNK_NUMEL // block_size)


class _Buffers(threading.local):
    """This thread's scratch buffers, by dtype. They grow to the size of the largest chunk."""

    def __init__(self) -> None:
        self.by_dtype: dict[torch.dtype, torch.Tensor] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        buffer, numel = self.by_dtype.get(dtype), shape.numel()
        if buffer is None or buffer.numel() < numel:
            buffer = self.by_dtype[dtype] = torch.empty(numel, dtype=dtype)
        return buffer[:numel].view(shape)


_buffers = _Buffers()


def quantize(
    values: torch.Tensor,
    *,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    top: float,
    gradients: Callable[[], torch.Tensor] | None = None,
) -> None:
    """Quantize blocks, and leave the quantization errors in values.

    values: [blocks, size], fp32 or fp64, contiguous. Afterwards values − decoded codes, or zeros in a block
        that isn't finite. rows_at_a_time(size) blocks are quantized fastest.
    codes: uint8 [blocks, size · bits / 8], written.
    scales: bf16 [blocks], written.
    top: the largest number to decode to.
    gradients: see find_scales.
    """
    if not len(values):
        return
    scale, least, largest = find_scales(values, scales=scales, bits=bits, gradients=gradients)
    if not largest < torch.inf:
        is_bad = scale.isnan()
        values.masked_fill_(is_bad, 0.0)
        scale.masked_fill_(is_bad, 0.0)
        least, largest = _bounds(scale)
    scale = scale.to(values.dtype)
    inverse, boost = scale.reciprocal(), None
    if least < SMALL:
        inverse.masked_fill_(scale == 0, 0.0)
        is_small = (scale < SMALL) & (scale > 0)
        if is_small.any():
            boost = torch.ones_like(scale).masked_fill_(is_small, BOOST)
            inverse = torch.where(is_small, (scale * boost).reciprocal_(), inverse)
    decoded = torch.mul(values, inverse, out=_buffers.take(values.shape, values.dtype))
    if boost is not None:
        decoded *= boost
    signed = codes.view(torch.int8)
    if bits == 8:
        signed.copy_(decoded.round_())
    else:
        _pack(_buffers.take(values.shape, torch.int8).copy_(decoded.round_()), signed)
    if largest * largest_code(bits) <= top:
        values.addcmul_(decoded, scale, value=-1)
    else:
        values -= decoded.mul_(scale).clamp_(-top, top)


def find_scales(
    values: torch.Tensor,
    *,
    scales: torch.Tensor,
    bits: int,
    gradients: Callable[[], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, float, float]:
    """Write the blocks' scales. Returns them in fp32, [blocks, 1], and a lower and an upper bound of them.

    The upper bound isn't finite if a scale isn't.

    values, scales: see quantize.
    gradients: returns the gradients without errors, [blocks, size]. They replace sums of gradients and errors
        that aren't finite.
    """
    sizes = torch.maximum(values.amax(1, keepdim=True), values.amin(1, keepdim=True).neg_())
    scale = sizes.div_(largest_code(bits)).to(torch.float32)
    bounds = _bounds(scale)
    if not bounds[1] <= LARGEST_IN_BF16:
        if gradients is not None:
            torch.where(values.isfinite(), values, gradients(), out=values)
            return find_scales(values, scales=scales, bits=bits)
        scale.masked_fill_(~(scale <= LARGEST_IN_BF16), torch.nan)
        bounds = torch.nan, torch.nan
    # Rounded up: bf16 is the upper half of fp32's bits.
    scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
    scales.copy_(scale[:, 0])
    return scale, *bounds


def _bounds(scale: torch.Tensor) -> tuple[float, float]:
    """Return bounds of scales that are rounded up from these, or rounded; NaN if a scale is."""
    least, largest = scale.aminmax()
    return float(least), float(largest) * (1 + 2.0**-7)


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    out: torch.Tensor,
    bits: int,
    top: float | None = None,
    factor: float = 1.0,
    add: bool = False,
) -> None:
    """Compute out = factor · decoded codes.

    codes, scales: with the shapes and dtypes of quantize.
    out: [blocks, size], fp32 or fp64.
    top: quantize's; None if no scale comes near it.
    factor: a power of two.
    add: True to add to out instead.
    """
    limit = None if top is None else top * factor
    decoded = _buffers.take(out.shape, out.dtype) if add else out
    if bits == 8:
        decoded.copy_(codes.view(torch.int8))
    else:
        decoded.copy_(_unpacked(codes))
        factor /= 16
    scale = scales.to(out.dtype)[:, None]
    if factor != 1.0:
        scale *= factor
    if add and limit is None:
        out.addcmul_(decoded, scale)
        return
    decoded *= scale
    if limit is not None:
        decoded.clamp_(-limit, limit)
    if add:
        out += decoded


def _pack(values: torch.Tensor, codes: torch.Tensor) -> None:
    """Write pairs of 4-bit codes to bytes, the first one to the lower half. Changes values.

    values: int8 [blocks, size]. codes: int8 [blocks, size / 2].
    """
    pairs = values.bitwise_and_(15).view(torch.int16)
    codes.copy_((pairs >> 4).bitwise_or_(pairs))


def _unpacked(codes: torch.Tensor) -> torch.Tensor:
    """Return 16 · each 4-bit code, int8 [blocks, size]: the code's bits in the upper half of a byte."""
    pairs = codes.to(torch.int16)
    upper = (pairs << 8).bitwise_or_(pairs.bitwise_left_shift_(4))
    return upper.bitwise_and_(-0x0F10).view(torch.int8)
