"""Quantization of blocks in plain torch, to 8 or 4 bits, with one bf16 scale for each block.

8 bits: scale = largest absolute value / 127; code = round(value / scale).

4 bits: code = the nearest of 15 levels for value / root mean square; scale = the number that minimizes
Σ (value − scale · level)². The levels are optimal for a normal distribution, among levels that include zero
(Lloyd 1982, Max 1960). The quotient is rounded to fp16 before its level is looked up, so a quotient within
2⁻¹¹ of halfway between two levels may get either level.

With both, a zero stays exactly zero.

No scale exceeds largest_scale, so that every code stands for a finite number of the bucket's dtype. At 4 bits
the root mean square is capped at 2/3 of largest_scale; the levels then reach 4 root mean squares. A block
gets the scale NaN, and so becomes NaN, if it has a value that isn't finite, or an fp64 value beyond REACH.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch

# The positive levels of the 15-level Lloyd–Max quantizer for the standard normal distribution.
HALF_LEVELS = (0.273857, 0.554764, 0.851134, 1.174879, 1.546057, 2.006474, 2.680866)
SORTED_LEVELS = (*(-level for level in reversed(HALF_LEVELS)), 0.0, *HALF_LEVELS)
# Halfway between neighboring levels: a value is nearest to the level between its thresholds.
THRESHOLDS = tuple((low + high) / 2 for low, high in pairwise(SORTED_LEVELS))

LARGEST_CODE = 127  # at 8 bits
SCALE_DTYPE = torch.bfloat16
LARGEST_IN_BF16 = torch.finfo(SCALE_DTYPE).max
# By bits, the largest value that a code and a bf16 scale can represent.
REACH = {4: 2.5 * LARGEST_IN_BF16, 8: LARGEST_CODE * LARGEST_IN_BF16}
CHUNK_NUMEL = 1 << 19  # elements to quantize at a time: more don't fit the caches, fewer need more calls
# If a block's largest value or norm exceeds this, neither squares nor inverses overflow or vanish in fp32.
SMALLEST = 1e-15


@cache
def levels() -> torch.Tensor:
    """Return the level of each code: fp32 [16], with the last four bits zero to leave room for the code.

    Code 8 is zero, and 8 ± k is the k-th level on either side. Code 0 is reserved: no encoder writes it. It
    decodes to zero, too, like code 0 at 8 bits, so that zero bytes decode to zeros.
    """
    values = torch.tensor([0.0, *SORTED_LEVELS])
    return (values.view(torch.int32) & ~15).view(torch.float32)


@cache
def _level_by_half() -> torch.Tensor:
    """Return a table from an fp16 number's bits to the nearest level, with its code in the last four bits.

    The level of a number that isn't finite is arbitrary.
    """
    halves = torch.arange(1 << 16).to(torch.uint16).view(torch.float16).double()
    thresholds = torch.tensor(THRESHOLDS, dtype=torch.float64)
    codes = 1 + torch.bucketize(halves.nan_to_num(), thresholds).int()
    return (levels().view(torch.int32)[codes] | codes).view(torch.float32)


@cache
def _levels_by_byte() -> torch.Tensor:
    """Return a table from a byte with two codes to their two fp32 levels, stored as one float64."""
    codes = torch.arange(256)
    pairs = torch.stack([levels()[codes & 15], levels()[codes >> 4]], 1)
    return pairs.view(torch.float64).view(-1)


@cache
def largest_scale(bits: int, dtype: torch.dtype) -> float:
    """Return the largest scale, a bf16 number, with which every code is finite in the bucket's dtype."""
    largest_level = LARGEST_CODE if bits == 8 else HALF_LEVELS[-1]
    exact = min(torch.finfo(dtype).max / largest_level, LARGEST_IN_BF16)
    fraction, exponent = math.frexp(exact)
    return math.ldexp(math.floor(fraction * 2**8), exponent - 8)


def quantizer(bits: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the kernels' constants: levels, thresholds, and the largest scale of a bucket's blocks."""
    return {"levels": levels(), "thresholds": THRESHOLDS, "largest_scale": largest_scale(bits, dtype)}


def rows_at_a_time(block_size: int) -> int:
    """Return the number of blocks to quantize at a time: as many as the processor's caches hold."""
    return max(1, CHUNK_NUMEL // block_size)


class _Buffers(threading.local):
    """This thread's scratch buffers, by name and dtype. They grow to the size of the largest chunk."""

    def __init__(self) -> None:
        self.by_name: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        buffer, numel = self.by_name.get((name, dtype)), shape.numel()
        if buffer is None or buffer.numel() < numel:
            buffer = self.by_name[name, dtype] = torch.empty(numel, dtype=dtype)
        return buffer[:numel].view(shape)


_buffers = _Buffers()

# Called with (values, largest value or norm of each block [blocks, 1], codes), writes the codes. Returns (the
# decoded codes without scales, the scales [blocks, 1]).
Encode = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def quantize(
    values: torch.Tensor,
    *,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    cap: float | None = None,
    gradients: Callable[[], torch.Tensor] | None = None,
) -> None:
    """Quantize blocks, and leave the quantization errors in values.

    values: [blocks, size], fp32 or fp64, contiguous. Afterwards values − dequantized values, or zeros if a
        block isn't finite. rows_at_a_time(size) blocks are quantized fastest.
    codes: uint8 [blocks, size · bits / 8], written.
    scales: bf16 [blocks], written; NaN for a block that isn't finite.
    cap: the bucket's largest_scale; None for the largest_scale of values' dtype.
    gradients: returns the gradients without errors, [blocks, size]. They replace sums of gradients and errors
        that aren't finite.
    """
    if not len(values):
        return
    cap = cap or largest_scale(bits, values.dtype)
    sizes = _largest(values) if bits == 8 else _norm(values)
    careful = _careful_blocks(values, sizes, _bound(values, bits, cap))
    kept = values.index_select(0, careful)
    if len(careful):
        # Careful blocks are few. They are quantized separately; here zeros replace them.
        values.index_fill_(0, careful, 0.0)
        sizes.index_fill_(0, careful, 0.0)
    _quantize(values, sizes, codes, scales, _encode_8 if bits == 8 else _encode_4)
    if len(careful):
        if gradients is not None and not kept.isfinite().all():
            kept = torch.where(kept.isfinite(), kept, gradients().index_select(0, careful))
        their_codes, their_scales = codes.new_empty(len(kept), codes.shape[1]), scales.new_empty(len(kept))
        encode = _encode_8_carefully if bits == 8 else _encode_4_carefully
        _quantize(kept, _largest(kept), their_codes, their_scales, partial(encode, cap=cap))
        kept.masked_fill_(~their_scales.isfinite()[:, None], 0.0)
        for all_blocks, theirs in ((values, kept), (codes, their_codes), (scales, their_scales)):
            all_blocks.index_copy_(0, careful, theirs)


def _bound(values: torch.Tensor, bits: int, cap: float) -> float:
    """Return a bound on a block's largest value (8 bits) or norm (4 bits) that keeps its scale below the cap.

    At 8 bits a scale is within 2⁻⁸ of largest / 127. At 4 bits a scale is at most 1.52 root mean squares (the
    greatest ratio of a value to its level), or the largest value over the largest level.
    """
    bound = 0.99 * LARGEST_CODE * cap if bits == 8 else cap * min(0.6 * values.shape[1] ** 0.5, 2.6)
    return min(bound, torch.finfo(values.dtype).max)


def _quantize(
    values: torch.Tensor, sizes: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, encode: Encode
) -> None:
    """Quantize blocks with one encode function, and leave the quantization errors in values."""
    decoded, scale = encode(values, sizes, codes)
    scales.copy_(scale[:, 0])
    values.addcmul_(decoded, scales.to(values.dtype)[:, None], value=-1)


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    out: torch.Tensor,
    bits: int,
    factor: float = 1.0,
    add: bool = False,
) -> None:
    """Compute out = factor · scale · decoded code.

    codes, scales: with the shapes and dtypes of quantize.
    out: [blocks, size], fp32 or fp64.
    factor: a power of two.
    add: True to add to out instead.
    """
    scale = scales.to(out.dtype)[:, None]
    if factor != 1.0:
        scale = scale * factor
    if bits == 8 and not add:
        out.copy_(codes.view(torch.int8)).mul_(scale)
        return
    decoded = _decode_8(codes, out) if bits == 8 else _decode_4(codes, out)
    if add:
        out.addcmul_(decoded, scale)
    else:
        torch.mul(decoded, scale, out=out)


def _careful_blocks(values: torch.Tensor, sizes: torch.Tensor, bound: float) -> torch.Tensor:
    """Return the indices of blocks too large, too small or not finite for the fast arithmetic.

    Blocks of zeros are excluded. They are common, in embeddings and inactive units. If such a block once had
    other values, its error becomes smaller from step to step.
    """
    # A test on the host comes first, because operations on small tensors take as long as on large ones.
    least, largest = sizes.aminmax()
    if bool(least > SMALLEST) and bool(largest < bound):
        return torch.empty(0, dtype=torch.long)
    found = ((sizes > SMALLEST) & (sizes < bound))[:, 0].logical_not_().nonzero()[:, 0]
    # A zero norm may be underflow of tiny squares: exclude only blocks of zeros.
    return found[_largest(values.index_select(0, found))[:, 0] != 0]


def _encode_8(
    values: torch.Tensor, largest: torch.Tensor, codes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (largest / LARGEST_CODE).to(SCALE_DTYPE)
    decoded = _buffers.take("decoded", values.shape, values.dtype)
    torch.mul(values, _finite_or_zero(scale.to(values.dtype).reciprocal_()), out=decoded)
    codes.view(torch.int8).copy_(decoded.round_())
    return decoded, scale


def _encode_8_carefully(
    values: torch.Tensor, largest: torch.Tensor, codes: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _scale_or_nan(largest / LARGEST_CODE, largest, 8, cap).to(SCALE_DTYPE)
    decoded = (values * _finite_or_zero(scale.to(values.dtype).reciprocal_())).round_()
    # Clamp, because a scale may be up to 2⁻⁷ from largest / 127, and a subnormal scale farther.
    decoded.clamp_(-LARGEST_CODE, LARGEST_CODE).nan_to_num_(0.0)
    codes.view(torch.int8).copy_(decoded)
    return decoded, scale


def _encode_4_carefully(
    values: torch.Tensor, largest: torch.Tensor, codes: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    has_values = largest.isfinite() & (largest > 0)
    # Division by a power of two changes no bits. In two halves, it neither overflows nor vanishes.
    exponent = torch.frexp(torch.where(has_values, largest, 1.0)).exponent
    halves = [torch.exp2(half.to(values.dtype)) for half in (exponent // 2, exponent - exponent // 2)]
    unit = torch.where(has_values, values / halves[0] / halves[1], 0.0)
    longest = cap / 1.5 / halves[0] / halves[1] * values.shape[1] ** 0.5
    norm = torch.where(has_values, torch.minimum(_norm(unit), longest), 1.0)
    decoded, scale = _encode_4(unit, norm, codes)
    return decoded, _scale_or_nan(scale * halves[0] * halves[1], largest, 4, cap)


def _scale_or_nan(scale: torch.Tensor, largest: torch.Tensor, bits: int, cap: float) -> torch.Tensor:
    """Return scales, at most cap; NaN for a block with values that isn't finite or exceeds REACH."""
    is_reached = largest.isfinite() & (largest.double() <= REACH[bits])
    return torch.where(is_reached, scale.clamp(max=cap), torch.nan)


def _encode_4(
    values: torch.Tensor, norm: torch.Tensor, codes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = values.shape
    half = _buffers.take("half", shape, torch.float16)
    torch.mul(values, _finite_or_zero(shape[1] ** 0.5 / norm), out=half)
    index = _buffers.take("index", shape, torch.int32)
    index.copy_(half.view(torch.uint16))
    level = _buffers.take("level", shape, torch.float32)
    torch.index_select(_level_by_half(), 0, index.view(-1), out=level.view(-1))
    bits = level.view(torch.int32)
    low = _buffers.take("low", shape, torch.uint8).copy_(bits).bitwise_and_(15)
    pairs = low.view(torch.int16)  # the lower byte has the first of two codes
    codes.copy_(torch.bitwise_right_shift(pairs, 4).bitwise_or_(pairs))
    # Remove the codes, so that levels of opposite signs cancel exactly.
    bits.bitwise_and_(~15)
    decoded = level
    if values.dtype != torch.float32:
        decoded = _buffers.take("decoded", shape, values.dtype).copy_(level)
    # Σ level² as a squared norm takes a third of a second vecdot's time. It is zero for blocks of zeros, else
    # at least 0.8.
    scale = torch.linalg.vecdot(values, decoded)[:, None] / _norm(decoded).square_().clamp_min_(0.5)
    return decoded, scale


def _decode_8(codes: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return _buffers.take("decoded", like.shape, like.dtype).copy_(codes.view(torch.int8))


def _decode_4(codes: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    index = _buffers.take("index", codes.shape, torch.int32).copy_(codes)
    level = _buffers.take("level", like.shape, torch.float32)
    torch.index_select(_levels_by_byte(), 0, index.view(-1), out=level.view(-1).view(torch.float64))
    return level


def _finite_or_zero(inverse: torch.Tensor) -> torch.Tensor:
    return inverse.nan_to_num_(nan=0.0, posinf=0.0)


def _largest(values: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of each block, [blocks, 1]."""
    return torch.maximum(values.amax(1, keepdim=True), values.amin(1, keepdim=True).neg_())


def _norm(values: torch.Tensor) -> torch.Tensor:
    """Return the root of each block's sum of squares, [blocks, 1]."""
    norm: torch.Tensor = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    return norm
