"""Quantize the blocks of a bucket, and write the averaged blocks back to the bucket."""

import torch
import triton
import triton.language as tl

from ..launch import Launch, Slot, registers
from ..tile import copy_tile, element_type, round_to
from .bucket import RANK, QuantizedBucket
from .tile import (
    BLOCKS_WORK,
    COPY_BLOCK,
    QUARTER,
    WORK_FIELDS,
    codes_at,
    decode,
    encode,
    gradients_of,
    load_codes,
    load_scales,
    store_codes,
    store_scales,
    tile_of,
)

RESIDENT_WARPS = 16  # warps that a multiprocessor's registers must hold at once


@triton.jit
def quantize_tile(
    grad, error_ptr, shard_error_ptr, payload_ptr, quantizer_ptr, work, length, num_blocks, rank,
    FEEDBACK: tl.constexpr, BITS: tl.constexpr, CAP: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Quantize a tile of at most BLOCKS blocks; see _quantize_kernel.

    grad, length: the tile's first gradient, and the number of its gradients.
    """
    ACC: tl.constexpr = error_ptr.dtype.element_ty
    mask, offs = tile_of(num_blocks, BLOCKS, SIZE)
    is_whole, aligned, exists = gradients_of(grad, length, num_blocks, mask, offs, SIZE)
    if is_whole:
        values = tl.load(aligned + offs, mask=mask, other=0.0).to(ACC)
    else:
        values = tl.load(grad + offs, mask=exists, other=0.0).to(ACC)
    first = tl.load(work + 4)
    if FEEDBACK:
        error = error_ptr + first * SIZE
        own_blocks = tl.where(tl.load(work + 7) == rank, num_blocks, 0)
        own_mask, _ = tile_of(own_blocks, BLOCKS, SIZE)
        own = shard_error_ptr + tl.load(work + 8) * SIZE
        kept = tl.load(own + offs, mask=own_mask, other=0.0)
        total = (tl.load(error + offs, mask=mask, other=0.0) - kept) + values
        values = tl.where(tl.abs(total) < float("inf"), total, values)
    codes, scale, lost = encode(values, quantizer_ptr, SIZE, BITS, CAP)
    store_codes(codes_at(payload_ptr, tl.load(work + 5), SIZE, BITS), codes, num_blocks, BLOCKS, SIZE, BITS)
    store_scales(payload_ptr, tl.load(work + 6), scale, num_blocks, BLOCKS)
    if FEEDBACK:
        tl.store(error + offs, lost, mask=mask)


@triton.jit(do_not_specialize=["rank"])
def _quantize_kernel(
    grad_ptr,
    error_ptr,
    shard_error_ptr,
    payload_ptr,
    quantizer_ptr,
    work_ptr,
    rank: tl.int64,
    FEEDBACK: tl.constexpr,
    EXACT: tl.constexpr,
    BITS: tl.constexpr,
    CAP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Quantize M = gradient + error: write codes and scales to the payloads, and error = M − decoded codes.

    In this rank's shard M = gradient + (error − shard_error). Where M isn't finite, the error counts as zero.

    grad_ptr: the bucket.
    error_ptr: [blocks of all shards, SIZE], fp32 (fp64 for an fp64 bucket).
    shard_error_ptr: [blocks of a shard, SIZE], error's dtype.
    payload_ptr: the payloads of all shards, see QuantizedWork.
    quantizer_ptr: see tile.py.
    work_ptr: QuantizedWork's bucket_work.
    EXACT: the dtype of exact elements in the payloads.
    CAP: the largest scale.
    Grid: one program per row of work_ptr: a tile of BLOCKS or BLOCKS / 4 blocks, or a copy of exact elements.
    Moves per fp32 element 4 B of gradient, 8 B of error, 4 / W B of shard_error (W ranks) and BITS / 8 B of
    codes: 13.0 B at 4 bits and W = 8. Per element of the bucket, average moves 2.6 B, dequantize 4.5 B, and
    the scales of blocks of 128 elements are 0.05 B: 20.1 B in all.
    """
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    grad = grad_ptr + tl.load(work + 1)
    length = tl.load(work + 2)
    third = tl.load(work + 3)
    if tl.load(work) == BLOCKS_WORK:
        for IS_SMALL in tl.static_range(2 if BLOCKS >= QUARTER else 1):
            if (third <= BLOCKS // QUARTER) == IS_SMALL:
                quantize_tile(
                    grad, error_ptr, shard_error_ptr, payload_ptr, quantizer_ptr, work, length, third, rank,
                    FEEDBACK, BITS, CAP, SIZE, BLOCKS // QUARTER if IS_SMALL else BLOCKS,
                )  # fmt: skip
    else:
        exact = (payload_ptr + third).to(tl.pointer_type(EXACT))
        copy_tile(grad, exact, length, 1.0, COPY_BLOCK)


def quantize(bucket: QuantizedBucket) -> Launch:
    """Return the launch of _quantize_kernel: it fills payload, and keeps the error.

    Slots: buffer, error, rank.
    """
    num_warps = bucket.work.num_warps
    return Launch(
        _quantize_kernel,
        len(bucket.bucket_work),
        Slot.buffer(bucket.dtype),
        Slot("error", bucket.error[:0]),
        bucket.shard_error,
        bucket.payload,
        bucket.quantizer,
        bucket.bucket_work,
        RANK,
        FEEDBACK=bucket.feedback,
        EXACT=element_type(bucket.exact_dtype),
        CAP=bucket.largest_scale,
        num_warps=num_warps,
        maxnreg=registers(num_warps, max(1, RESIDENT_WARPS // num_warps)),
        # Codes of opposite signs must cancel.
        enable_fp_fusion=False,
        **bucket.constants,
    )


# Warps that a multiprocessor's registers must hold at once: for programs with quantize's warps, or with half.
WRITING_WARPS, WRITING_HALF_WARPS = 24, 16


@triton.jit
def dequantize_tile(
    payload_ptr, grad, quantizer_ptr, work, length, num_blocks,
    ACC: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Dequantize a tile of at most BLOCKS blocks; see _dequantize_kernel and quantize_tile."""
    mask, offs = tile_of(num_blocks, BLOCKS, SIZE)
    scale = load_scales(payload_ptr, tl.load(work + 6), num_blocks, BLOCKS)
    first_code = codes_at(payload_ptr, tl.load(work + 5), SIZE, BITS)
    codes = load_codes(first_code, num_blocks, BLOCKS, SIZE, BITS)
    values = round_to(decode(codes, scale, quantizer_ptr, ACC, BITS), grad.dtype.element_ty)
    is_whole, aligned, exists = gradients_of(grad, length, num_blocks, mask, offs, SIZE)
    if is_whole:
        tl.store(aligned + offs, values, mask=mask)
    else:
        tl.store(grad + offs, values, mask=exists)


@triton.jit
def _dequantize_kernel(
    payload_ptr,
    grad_ptr,
    quantizer_ptr,
    work_ptr,
    ACC: tl.constexpr,
    EXACT: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Compute gradient = round(scale · value of the code), and copy exact elements unchanged.

    ACC: the dtype of the arithmetic.
    For the other arguments and the grid see _quantize_kernel.
    Moves per element BITS / 8 B of codes, and the gradient once.
    """
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    grad = grad_ptr + tl.load(work + 1)
    length = tl.load(work + 2)
    third = tl.load(work + 3)
    if tl.load(work) == BLOCKS_WORK:
        for IS_SMALL in tl.static_range(2 if BLOCKS >= QUARTER else 1):
            if (third <= BLOCKS // QUARTER) == IS_SMALL:
                dequantize_tile(
                    payload_ptr, grad, quantizer_ptr, work, length, third,
                    ACC, BITS, SIZE, BLOCKS // QUARTER if IS_SMALL else BLOCKS,
                )  # fmt: skip
    else:
        exact = (payload_ptr + third).to(tl.pointer_type(EXACT))
        copy_tile(exact, grad, length, 1.0, COPY_BLOCK)


def dequantize(bucket: QuantizedBucket) -> Launch:
    """Return the launch of _dequantize_kernel: it decodes payload to the bucket. Slot: buffer."""
    resident, num_warps = WRITING_WARPS, bucket.work.num_warps
    if bucket.constants["BITS"] == 4 and bucket.dtype != torch.float64:
        # With half the warps a thread's codes are 128 bits. In fp64 they would be 64 bits, and spill.
        resident, num_warps = WRITING_HALF_WARPS, num_warps // 2
    return Launch(
        _dequantize_kernel,
        len(bucket.bucket_work),
        bucket.payload,
        Slot.buffer(bucket.dtype),
        bucket.quantizer,
        bucket.bucket_work,
        ACC=element_type(bucket.error.dtype),
        EXACT=element_type(bucket.exact_dtype),
        num_warps=num_warps,
        maxnreg=registers(num_warps, max(1, resident // num_warps)),
        enable_fp_fusion=False,
        **bucket.constants,
    )
