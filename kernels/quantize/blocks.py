"""Quantize the blocks of a bucket, and write the averaged blocks back to the bucket."""

import triton
import triton.language as tl

from ..launch import Launch, Slot
from ..tile import copy_tile, element_type
from .bucket import RANK, QuantizedBucket
from .tile import (
    BLOCKS_WORK,
    COPY_BLOCK,
    WORK_FIELDS,
    codes_at,
    decode,
    encode,
    load_codes,
    load_gradients,
    load_scales,
    store_codes,
    store_gradients,
    store_scales,
    tile_of,
)


@triton.jit(do_not_specialize=["rank"])
def _quantize_kernel(
    grad_ptr,
    error_ptr,
    payload_ptr,
    work_ptr,
    rank: tl.int64,
    FEEDBACK: tl.constexpr,
    EXACT: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Quantize M = gradient + error: write codes and scales to the payloads, and error = M − decoded codes.

    In this rank's own shard error = M: nobody reads the codes there. Where M isn't finite, the error counts
    as zero.

    grad_ptr: the bucket.
    error_ptr: [blocks of all shards, SIZE], fp32 (fp64 for an fp64 bucket). Without FEEDBACK
        [blocks of a shard, SIZE], only for the own shard's M = gradient.
    payload_ptr: the payloads of all shards, see QuantizedWork.
    work_ptr: QuantizedWork's bucket_work.
    EXACT: the dtype of exact elements in the payloads.
    LIMIT: the largest number of the averages' dtype.
    Grid: one program per row of work_ptr: a tile of at most BLOCKS blocks, or a copy of exact elements.
    Moves per fp32 element 4 B of gradient, 8 B of error and BITS / 8 B of codes: 12.5 B at 4 bits. Per
    element of the bucket, with W = 8 ranks, average moves 1.6 B, dequantize 4.5 B, and the scales of blocks
    of 128 elements are 0.05 B: 18.6 B in all.
    """
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    grad = grad_ptr + tl.load(work + 1)
    length = tl.load(work + 2)
    third = tl.load(work + 3)
    if tl.load(work) == BLOCKS_WORK:
        ACC: tl.constexpr = error_ptr.dtype.element_ty
        values = load_gradients(grad, length, third, ACC, BLOCKS, SIZE)
        is_own = tl.load(work + 7) == rank
        mask, offs = tile_of(third, BLOCKS, SIZE)
        if FEEDBACK:
            error = error_ptr + tl.load(work + 4) * SIZE
            total = tl.load(error + offs, mask=mask, other=0.0) + values
            values = tl.where(tl.abs(total) < float("inf"), total, values)
        else:
            error = error_ptr + tl.load(work + 8) * SIZE
            mask &= is_own
        codes, scale, lost = encode(values, BITS, LIMIT)
        store_codes(codes_at(payload_ptr, tl.load(work + 5), SIZE, BITS), codes, third, BLOCKS, SIZE, BITS)
        store_scales(payload_ptr, tl.load(work + 6), scale, third, BLOCKS)
        tl.store(error + offs, tl.where(is_own, values, lost), mask=mask)
    else:
        exact = (payload_ptr + third).to(tl.pointer_type(EXACT))
        copy_tile(grad, exact, length, 1.0, COPY_BLOCK)


def quantize(bucket: QuantizedBucket) -> Launch:
    """Return the launch of _quantize_kernel: it fills payload. Slots: buffer, kept, rank."""
    return Launch(
        _quantize_kernel,
        len(bucket.bucket_work),
        Slot.buffer(bucket.dtype),
        bucket.kept_slot,
        bucket.payload,
        bucket.bucket_work,
        RANK,
        FEEDBACK=bucket.feedback,
        EXACT=element_type(bucket.exact_dtype),
        **bucket.constants,
    )


@triton.jit
def _dequantize_kernel(
    payload_ptr,
    grad_ptr,
    work_ptr,
    ACC: tl.constexpr,
    EXACT: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Compute gradient = round(scale · code), and copy exact elements unchanged.

    ACC: the dtype of the arithmetic.
    For the other arguments and the grid see _quantize_kernel.
    Moves per element BITS / 8 B of codes, and the gradient once.
    """
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    grad = grad_ptr + tl.load(work + 1)
    length = tl.load(work + 2)
    third = tl.load(work + 3)
    if tl.load(work) == BLOCKS_WORK:
        scale = load_scales(payload_ptr, tl.load(work + 6), third, BLOCKS)
        codes = load_codes(codes_at(payload_ptr, tl.load(work + 5), SIZE, BITS), third, BLOCKS, SIZE, BITS)
        store_gradients(grad, decode(codes, scale, ACC, BITS, LIMIT), length, third, BLOCKS, SIZE)
    else:
        exact = (payload_ptr + third).to(tl.pointer_type(EXACT))
        copy_tile(exact, grad, length, 1.0, COPY_BLOCK)


def dequantize(bucket: QuantizedBucket) -> Launch:
    """Return the launch of _dequantize_kernel: it decodes payload to the bucket. Slot: buffer."""
    return Launch(
        _dequantize_kernel,
        len(bucket.bucket_work),
        bucket.payload,
        Slot.buffer(bucket.dtype),
        bucket.bucket_work,
        ACC=element_type(bucket.kept.dtype),
        EXACT=element_type(bucket.exact_dtype),
        **bucket.constants,
    )
