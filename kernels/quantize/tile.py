"""Tiles of blocks, and codes of blocks: the device functions of the quantized all-reduce's kernels.

A tile has BLOCKS rows, one per block, and a power of two of columns. A block has SIZE elements, in the
first columns. cpu/quantize.py has the formulas; LIMIT is its top.
"""

import triton
import triton.language as tl

from ..tile import on_16_bytes, round_to
from . import work as quantize_work

WORK_FIELDS = tl.constexpr(quantize_work.WORK_FIELDS)
COPY_BLOCK = tl.constexpr(quantize_work.COPY_BLOCK)
BLOCKS_WORK = tl.constexpr(quantize_work.BLOCKS)  # the first column of a row of work
SMALL, BOOST = tl.constexpr(2.0**-100), tl.constexpr(2.0**64)
LARGEST_BF16 = tl.constexpr(255 * 2.0**120)


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
def can_be_wide(grad_ptr, length, num_blocks, SIZE: tl.constexpr):
    """Return whether a tile's gradients can be moved 128 bits at a time, with tile_of's mask.

    grad_ptr: the first gradient of the tile.
    length: the number of gradients.
    """
    is_aligned = grad_ptr.to(tl.uint64) % 16 == 0
    return (SIZE == triton.next_power_of_2(SIZE)) & (length == num_blocks * SIZE) & is_aligned


@triton.jit
def load_gradients(grad_ptr, length, num_blocks, ACC: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """Load the gradients of a tile; zeros beyond length."""
    mask, offs = tile_of(num_blocks, BLOCKS, SIZE)
    if can_be_wide(grad_ptr, length, num_blocks, SIZE):
        values = tl.load(on_16_bytes(grad_ptr) + offs, mask=mask, other=0.0)
    else:
        values = tl.load(grad_ptr + offs, mask=mask & (offs < length.to(tl.int32)), other=0.0)
    return values.to(ACC)


@triton.jit
def store_gradients(grad_ptr, values, length, num_blocks, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """Round the values of a tile to the gradients' dtype, and store them."""
    mask, offs = tile_of(num_blocks, BLOCKS, SIZE)
    values = round_to(values, grad_ptr.dtype.element_ty)
    if can_be_wide(grad_ptr, length, num_blocks, SIZE):
        tl.store(on_16_bytes(grad_ptr) + offs, values, mask=mask)
    else:
        tl.store(grad_ptr + offs, values, mask=mask & (offs < length.to(tl.int32)))


@triton.jit
def encode(values, BITS: tl.constexpr, LIMIT: tl.constexpr):
    """Quantize each row of values.

    values: a tile, fp32 or fp64, zero beyond column SIZE.

    Returns (codes, scales, lost):
    codes: integers; only the last BITS bits count.
    scales: bf16 numbers in fp32. NaN for a row that isn't finite, or has a value that no scale reaches.
    lost: values − decoded codes; zero in rows with the scale NaN.
    """
    ACC: tl.constexpr = values.dtype
    BITS_TYPE: tl.constexpr = tl.int64 if ACC == tl.float64 else tl.int32
    # A number of this size has no bits for fractions: adding it rounds to an integer, to nearest even.
    SHIFT: tl.constexpr = 6755399441055744.0 if ACC == tl.float64 else 12582912.0
    # Nonnegative floats are in the order of their bits, and NaN has the largest bits.
    largest = tl.max(tl.abs(values).to(BITS_TYPE, bitcast=True), 1).to(ACC, bitcast=True)
    scale = divide(largest, tl.full(largest.shape, (1 << (BITS - 1)) - 1, ACC)).to(tl.float32)
    is_finite = scale <= LARGEST_BF16
    # Rounded up: bf16 is the upper half of fp32's bits.
    upper = (scale.to(tl.uint32, bitcast=True) + 0xFFFF) & 0xFFFF0000
    scale = tl.where(is_finite, upper.to(tl.float32, bitcast=True), 0.0)
    wide = scale.to(ACC)
    boost = tl.where(wide < SMALL, tl.full(wide.shape, BOOST, ACC), 1.0)
    boosted = tl.where(wide > 0.0, wide * boost, 1.0)
    inverse = tl.where(wide > 0.0, divide(tl.full(wide.shape, 1.0, ACC), boosted), 0.0)
    values = tl.where(is_finite[:, None], values, 0.0)
    shifted = values * boost[:, None] * inverse[:, None] + SHIFT
    lost = values - saturated((shifted - SHIFT) * wide[:, None], LIMIT)
    return shifted.to(BITS_TYPE, bitcast=True).to(tl.int32), tl.where(is_finite, scale, float("nan")), lost


@triton.jit
def saturated(x, LIMIT: tl.constexpr):
    """Return x limited to −LIMIT .. LIMIT; NaN stays NaN. fp64 values never exceed their limits."""
    if x.dtype == tl.float32:
        ALL: tl.constexpr = tl.PropagateNan.ALL
        x = tl.minimum(tl.maximum(x, -LIMIT, propagate_nan=ALL), LIMIT, propagate_nan=ALL)
    return x


@triton.jit
def load_codes(codes_ptr, num_blocks, BLOCKS: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Load the packed codes of a tile, for decode, from its first byte of codes."""
    mask, offs = tile_of(num_blocks, BLOCKS, SIZE * BITS // 8)
    return tl.load(codes_ptr + offs, mask=mask, other=0)


@triton.jit
def decode(packed, scale, ACC: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr):
    """Return scale · code, limited to ±LIMIT, in ACC.

    packed: load_codes' result.
    scale: fp32 or ACC, one per row.
    """
    codes = packed.to(tl.int8, bitcast=True)
    if BITS == 4:
        pairs = codes.to(tl.int32)
        pairs = tl.join(pairs << 28 >> 28, pairs >> 4)
        codes = tl.reshape(pairs, (packed.shape[0], 2 * packed.shape[1]))
    return saturated(codes.to(ACC) * scale.to(ACC)[:, None], LIMIT)


@triton.jit
def store_codes(codes_ptr, codes, num_blocks, BLOCKS: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Pack and store encode's codes of a tile. With 4 bits, a pair's first code is a byte's lower half."""
    mask, offs = tile_of(num_blocks, BLOCKS, SIZE * BITS // 8)
    if BITS == 4:
        low, high = tl.split(tl.reshape(codes, (BLOCKS, codes.shape[1] // 2, 2)))
        codes = (low & 15) | (high << 4)
    tl.store(codes_ptr + offs, codes.to(tl.uint8), mask=mask)


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
    """Load the scales of a tile as fp32. at: the byte of the first scale; scales are stored in bf16."""
    offs = tl.arange(0, BLOCKS)
    scales = (payload_ptr + at).to(tl.pointer_type(tl.uint16))
    # Converted as integers: Triton's interpreter doesn't convert subnormal numbers to and from bf16.
    upper = tl.load(scales + offs, mask=offs < num_blocks.to(tl.int32), other=0)
    return (upper.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def store_scales(payload_ptr, at, scale, num_blocks, BLOCKS: tl.constexpr):
    """Store encode's scales of a tile in bf16, see load_scales."""
    offs = tl.arange(0, BLOCKS)
    scales = (payload_ptr + at).to(tl.pointer_type(tl.uint16))
    upper = (scale.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
    tl.store(scales + offs, upper, mask=offs < num_blocks.to(tl.int32))


@triton.jit
def divide(x, y):
    """Return x / y, rounded once."""
    return tl.div_rn(x, y) if x.dtype == tl.float32 else x / y
