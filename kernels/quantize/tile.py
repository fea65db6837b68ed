"""Tiles of blocks, and codes of blocks: shared by the kernels of the quantized all-reduce.

A tile has BLOCKS rows, one per block, and a power of two of columns. A block has SIZE elements, in the
first columns. cpu/quantize.py has the formulas.

quantizer_ptr: the quantizer of 4 bits in fp32: its 16 levels by code, then its 14 thresholds.
CAP: the largest scale.
"""

import torch
import triton
import triton.language as tl

from ..tile import on_16_bytes, round_to_bf16
from . import work as quantize_work

WORK_FIELDS = tl.constexpr(quantize_work.WORK_FIELDS)
COPY_BLOCK = tl.constexpr(quantize_work.COPY_BLOCK)
BLOCKS_WORK = tl.constexpr(quantize_work.BLOCKS)  # the first column of a row of work
QUARTER = tl.constexpr(quantize_work.QUARTER)
THRESHOLD = tl.constexpr(23)  # position of the first positive threshold in the quantizer
ZERO = tl.constexpr(8)  # the code of the level zero


def _reach(scales: float) -> int:
    """Return scales · the largest number of bf16, as fp64's bits.

    A block with a larger value becomes NaN.
    """
    return int(torch.tensor(scales * torch.finfo(torch.bfloat16).max, dtype=torch.float64).view(torch.int64))


REACH_4, REACH_8 = tl.constexpr(_reach(2.5)), tl.constexpr(_reach(127))


@triton.jit
def tile_of(num_blocks, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """Return (mask, offsets) of a tile of num_blocks blocks of SIZE elements, stored one after another."""
    COLS: tl.constexpr = triton.next_power_of_2(SIZE)
    offs_block = tl.arange(0, BLOCKS)[:, None]
    offs_col = tl.arange(0, COLS)[None, :]
    mask = offs_block < num_blocks.to(tl.int32)
    if SIZE < COLS:
        mask = mask & (offs_col < SIZE)
    return mask, offs_block * SIZE + offs_col


@triton.jit
def gradients_of(grad_ptr, length, num_blocks, mask, offs, SIZE: tl.constexpr):
    """Return (whether all gradients of a tile can be moved 128 bits at a time, a pointer for that, a mask).

    Where they can, tile_of's mask is constant in each block; where they can't, use grad_ptr and the mask.

    grad_ptr: the first gradient of the tile.
    length: the number of gradients.
    mask, offs: tile_of's result.
    """
    is_aligned = grad_ptr.to(tl.uint64) % 16 == 0
    is_whole = (SIZE == triton.next_power_of_2(SIZE)) & (length == num_blocks * SIZE) & is_aligned
    return is_whole, on_16_bytes(grad_ptr), mask & (offs < length.to(tl.int32))


@triton.jit
def encode(values, quantizer_ptr, SIZE: tl.constexpr, BITS: tl.constexpr, CAP: tl.constexpr):
    """Quantize each row of values.

    values: a tile, fp32 or fp64, zero beyond column SIZE.

    Returns (codes, scales, lost):
    codes: int32.
    scales: fp32, rounded to bf16. NaN for a row that isn't finite, or has a value that no scale reaches.
    lost: values − decoded codes; zero in rows with the scale NaN.
    """
    ACC: tl.constexpr = values.dtype
    BITS_TYPE: tl.constexpr = tl.int64 if ACC == tl.float64 else tl.int32
    MANTISSA: tl.constexpr = 52 if ACC == tl.float64 else 23
    INFINITY: tl.constexpr = (2047 << 52) if ACC == tl.float64 else (255 << 23)
    REACH: tl.constexpr = (REACH_8 if BITS == 8 else REACH_4) if ACC == tl.float64 else INFINITY - 1
    # Nonnegative floats are in the order of their bits, and NaN has the largest bits.
    largest_bits = tl.max(tl.abs(values).to(BITS_TYPE, bitcast=True), 1)
    is_finite = largest_bits <= REACH
    values = tl.where(is_finite[:, None], values, 0.0)
    largest_bits = tl.where(is_finite, largest_bits, 0)
    if BITS == 8:
        largest = largest_bits.to(ACC, bitcast=True)
        scale = tl.minimum(_divide(largest, tl.full(largest.shape, 127.0, ACC)), CAP)
        scale = round_to_bf16(tl.where(is_finite, scale, float("nan")))
        wide = _or_zero(scale).to(ACC)
        decoded = _nearest_integer(values * _inverse(wide)[:, None])
        codes = decoded.to(tl.int32)
    else:
        # Divide by a power of two, exactly, to values below 4: their squares neither overflow nor vanish.
        exponent = largest_bits >> MANTISSA
        exponent = tl.minimum(tl.maximum(exponent, 1), (INFINITY >> MANTISSA) - 2)
        power = (exponent << MANTISSA).to(ACC, bitcast=True)
        inverse_power = (((INFINITY >> MANTISSA) - 1 - exponent) << MANTISSA).to(ACC, bitcast=True)
        unit = values * inverse_power[:, None]
        squared = tl.sum(unit * unit, 1)
        inverse_rms = tl.rsqrt(tl.where(squared > 0.0, squared, 1.0).to(tl.float32) * (1.0 / SIZE))
        # The root mean square is taken as at most 2 / 3 of CAP.
        inverse_rms = tl.maximum(inverse_rms, (power * (1.5 / CAP)).to(tl.float32))
        codes = _nearest_level(unit.to(tl.float32) * inverse_rms[:, None], quantizer_ptr)
        decoded = tl.load(quantizer_ptr + codes).to(ACC)
        # The sum is zero in a row of zeros, at least 0.7 in any other row.
        energy = tl.maximum(tl.sum(decoded * decoded, 1), 0.5)
        scale = tl.minimum(_divide(tl.sum(unit * decoded, 1), energy) * power, CAP)
        scale = round_to_bf16(tl.where(is_finite, scale, float("nan")))
        wide = _or_zero(scale).to(ACC)
    lost = values - decoded * wide[:, None]
    return codes, scale, tl.where(is_finite[:, None], lost, 0.0)


@triton.jit
def saturated(x, LIMIT: tl.constexpr):
    """Return x limited to −LIMIT .. LIMIT; NaN stays NaN."""
    return tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))


@triton.jit
def _nearest_level(unit, quantizer_ptr):
    """Return the codes of the levels nearest to unit.

    unit: fp32. Its absolute value is searched among the seven positive thresholds.
    """
    limit_ptr = quantizer_ptr + THRESHOLD
    size = tl.abs(unit)
    upper = size > tl.load(limit_ptr + 3)
    middle = size > tl.where(upper, tl.load(limit_ptr + 5), tl.load(limit_ptr + 1))
    lower = tl.where(middle, tl.load(limit_ptr + 2), tl.load(limit_ptr))
    threshold = tl.where(upper, tl.where(middle, tl.load(limit_ptr + 6), tl.load(limit_ptr + 4)), lower)
    half = tl.where(upper, 4, 0) + tl.where(middle, 2, 0) + tl.where(size > threshold, 1, 0)
    return tl.where(unit < 0.0, ZERO - half, ZERO + half)


@triton.jit
def load_codes(codes_ptr, num_blocks, BLOCKS: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Load the packed codes of a tile, for decode.

    codes_ptr: the tile's first byte of codes.
    """
    mask, offs = tile_of(num_blocks, BLOCKS, SIZE * BITS // 8)
    return tl.load(codes_ptr + offs, mask=mask, other=0)


@triton.jit
def decode(packed, scale, quantizer_ptr, ACC: tl.constexpr, BITS: tl.constexpr):
    """Return scale · the value of each code, in ACC.

    packed: load_codes' result.
    scale: fp32, one per row.
    """
    if BITS == 8:
        decoded = packed.to(tl.int8, bitcast=True).to(ACC)
    else:
        pairs = packed.to(tl.int32)
        codes = tl.reshape(tl.join(pairs & 15, pairs >> 4), (packed.shape[0], 2 * packed.shape[1]))
        decoded = tl.load(quantizer_ptr + codes).to(ACC)
    return decoded * scale.to(ACC)[:, None]


@triton.jit
def store_codes(codes_ptr, codes, num_blocks, BLOCKS: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Pack and store the codes of a tile.

    codes_ptr: the tile's first byte of codes.
    codes: int32, of a tile. With 4 bits, two share a byte: the first one is in the lower half.
    """
    mask, offs = tile_of(num_blocks, BLOCKS, SIZE * BITS // 8)
    if BITS == 8:
        packed = codes
    else:
        low, high = tl.split(tl.reshape(codes, (BLOCKS, codes.shape[1] // 2, 2)))
        packed = low | (high << 4)
    tl.store(codes_ptr + offs, packed.to(tl.uint8), mask=mask)


@triton.jit
def codes_at(payload_ptr, at, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Return the pointer to a tile's first code.

    at: the byte of the code in the payloads. Within a shard it is a multiple of a block's bytes of codes.
    """
    # Shards begin on multiples of 16 bytes. Dividing shows the compiler how the pointer is aligned.
    BYTES: tl.constexpr = SIZE * BITS // 8
    ALIGNMENT: tl.constexpr = min(BYTES & -BYTES, 16)
    return payload_ptr + at // ALIGNMENT * ALIGNMENT


@triton.jit
def load_scales(payload_ptr, at, num_blocks, BLOCKS: tl.constexpr):
    """Load the scales of a tile as fp32.

    at: the byte of the first scale; scales are stored in bf16.
    """
    offs = tl.arange(0, BLOCKS)
    scales = (payload_ptr + at).to(tl.pointer_type(tl.uint16))
    # Converted as integers: Triton's interpreter doesn't convert subnormal numbers to and from bf16.
    upper = tl.load(scales + offs, mask=offs < num_blocks.to(tl.int32), other=0)
    return (upper.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def store_scales(payload_ptr, at, scale, num_blocks, BLOCKS: tl.constexpr):
    """Store encode's scales of a tile in bf16.

    at: the byte of the first scale.
    """
    offs = tl.arange(0, BLOCKS)
    scales = (payload_ptr + at).to(tl.pointer_type(tl.uint16))
    upper = (scale.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
    tl.store(scales + offs, upper, mask=offs < num_blocks.to(tl.int32))


@triton.jit
def _divide(x, y):
    """Return x / y, rounded once."""
    return tl.div_rn(x, y) if x.dtype == tl.float32 else x / y


@triton.jit
def _or_zero(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)  # zero for NaN, too


@triton.jit
def _inverse(x):
    """Return 1 / x for scales x >= 0, and 0 where 1 / x isn't finite."""
    NONE: tl.constexpr = 0.0 if x.dtype == tl.float64 else 2.0**-128
    one = tl.full(x.shape, 1.0, x.dtype)
    return tl.where(x > NONE, _divide(one, tl.where(x > NONE, x, 1.0)), 0.0)


@triton.jit
def _nearest_integer(x):
    """Return x rounded to an integer, to nearest even, and limited to −127 .. 127."""
    # A number of this size has no bits for fractions.
    SHIFT: tl.constexpr = 6755399441055744.0 if x.dtype == tl.float64 else 12582912.0
    x = tl.minimum(tl.maximum(x, -127.0), 127.0)
    return (x + SHIFT) - SHIFT
