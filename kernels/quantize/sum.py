"""Sum a shard over the payloads of all ranks: the end of a quantized reduce-scatter."""

import triton
import triton.language as tl

from ..launch import Launch, Slot, registers
from ..tile import round_to
from .average import (
    RESIDENT_FEW_WARPS,
    RESIDENT_WARPS,
    WIDEST_BLOCK,
    mean_of,
    shrinking,
    sum_of_exact,
    sum_of_ranks,
)
from .bucket import QuantizedBucket
from .tile import BLOCKS_WORK, WORK_FIELDS, element_type, gradients_of, tile_of


@triton.jit
def _sum_exact(
    received_ptr,
    out_ptr,
    payload_bytes,
    length,
    at,
    ACC: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    DIVISOR: tl.constexpr,
    SHRINK: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
):
    """Sum exact elements, and divide. Accesses are 128 bits wide where all addresses allow it.

    length: the number of elements.
    at: the byte of the first one in a payload.
    """
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    offs = tl.arange(0, COPY_BLOCK)
    address = out_ptr.to(tl.uint64)
    if (length == COPY_BLOCK) & (address % 16 == 0) & (at % 16 == 0):
        # The hints are on rounded copies of the addresses: see copy_tile.
        whole = offs < COPY_BLOCK
        rounded = at // 16 * 16
        aligned = tl.multiple_of((address // 16 * 16).to(tl.pointer_type(TYPE)), 16)
        total = sum_of_exact(received_ptr, payload_bytes, rounded, whole, ACC, WORLD_SIZE, SHRINK, COPY_BLOCK)
        tl.store(aligned + offs, round_to(mean_of(total, DIVISOR, SHRINK), TYPE))
    else:
        mask = offs < length
        total = sum_of_exact(received_ptr, payload_bytes, at, mask, ACC, WORLD_SIZE, SHRINK, COPY_BLOCK)
        tl.store(out_ptr + offs, round_to(mean_of(total, DIVISOR, SHRINK), TYPE), mask=mask)


@triton.jit
def _sum_kernel(
    received_ptr,
    out_ptr,
    quantizer_ptr,
    work_ptr,
    ACC: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    DIVISOR: tl.constexpr,
    SHRINK: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    COLS: tl.constexpr,
    BLOCKS: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
):
    """Compute out = round((Σ dequantized) / DIVISOR), and likewise with exact elements.

    The sum is in the order of the WORLD_SIZE payloads, in ACC. It doesn't overflow, because its addends are
    multiplied by SHRINK.

    received_ptr: the payloads of all ranks, one after another, as elements of the dtype of exact elements.
    out_ptr: the shard's tensors, one after another.
    quantizer_ptr: see tile.py.
    work_ptr: QuantizedWork's sum_work.
    Grid: one program per row of work_ptr: a tile of BLOCKS blocks, or some exact elements.
    Moves per element of the shard BITS / 8 B of codes for each of WORLD_SIZE payloads, and the sum once.
    """
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    out = out_ptr + tl.load(work + 1)
    length = tl.load(work + 2)
    third = tl.load(work + 3)
    # Payloads begin on multiples of 16 bytes; dividing shows the compiler that they do.
    payload_bytes = tl.load(work + 4) // 16 * 16
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    if tl.load(work) == BLOCKS_WORK:
        mask, offs = tile_of(third, BLOCKS, COLS, SIZE)
        total, _ = sum_of_ranks(
            received_ptr.to(tl.pointer_type(tl.uint8)), payload_bytes, tl.load(work + 5), tl.load(work + 6),
            third, quantizer_ptr, ACC, WORLD_SIZE, SHRINK, BITS, SIZE, COLS, BLOCKS,
        )  # fmt: skip
        values = round_to(mean_of(total, DIVISOR, SHRINK), TYPE)
        is_whole, aligned, exists = gradients_of(out, length, mask, offs, BLOCKS, COLS, SIZE)
        if is_whole:
            tl.store(aligned + offs, values)
        else:
            tl.store(out + offs, values, mask=exists)
    else:
        _sum_exact(
            received_ptr, out, payload_bytes, length, third, ACC, WORLD_SIZE, DIVISOR, SHRINK, COPY_BLOCK
        )


def sum_shard(bucket: QuantizedBucket) -> Launch:
    """Return the launch of _sum_kernel: it sums received. Slot: buffer, the shard's tensors."""
    size, columns, num_warps = bucket.constants["SIZE"], bucket.constants["COLS"], bucket.work.num_warps
    warps = RESIDENT_WARPS if columns == size <= WIDEST_BLOCK else RESIDENT_FEW_WARPS
    return Launch(
        _sum_kernel,
        len(bucket.shard_work),
        bucket.received.view(-1).view(bucket.exact_dtype),
        Slot.buffer(bucket.averages_dtype),
        bucket.quantizer,
        bucket.shard_work,
        ACC=element_type(bucket.error.dtype),
        WORLD_SIZE=bucket.layout.world_size,
        DIVISOR=bucket.divisor,
        SHRINK=shrinking(bucket.layout.world_size),
        num_warps=num_warps,
        maxnreg=registers(num_warps, max(1, warps // num_warps)),
        # Codes of opposite signs must cancel: a fused product would leave its rounding error.
        enable_fp_fusion=False,
        **bucket.constants,
    )
