"""Quantize the blocks of a bucket, and write the means that come back to the bucket."""

import torch
import triton
import triton.language as tl

from ..launch import Launch, Slot, registers
from ..tile import copy_tile, round_to
from .tile import (
    WORK_FIELDS,
    codes_at,
    decode,
    element_type,
    encode,
    gradients_of,
    load_codes,
    load_scales,
    store_codes,
    store_scales,
    tile_of,
)
from .work import BLOCKS as _BLOCKS
from .work import COPY_BLOCK, padded_size

BLOCKS_WORK = tl.constexpr(_BLOCKS)
RESIDENT_WARPS = 16  # of a multiprocessor, which its registers have to hold


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
    COLS: tl.constexpr,
    BLOCKS: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
):
    """Write the codes and scales of M = gradient + error to the payloads; error = what is lost.

    In this rank's shard M = gradient + (error − shard_error). Where M isn't finite, the error counts as zero.
    CAP: the largest scale. grad_ptr: the bucket. error_ptr: [blocks of all
    shards, SIZE], fp32 (fp64 for fp64). shard_error_ptr: [blocks of a shard, SIZE]. payload_ptr: see
    QuantizedWork, whose bucket_work is work_ptr. EXACT: the dtype of exact elements there. Grid: one program
    per row of that, a tile of BLOCKS blocks or a copy of exact elements.
    Moves per fp32 element 4 B of gradient, 8 of error, 4 / W of shard_error and BITS / 8 of codes. At 4 bits
    and W = 8 that is 13.0; average moves 2.6 per element of the bucket, dequantize 4.5, and the scales of
    blocks of 128 are 0.05: 20.1 in all.
    """
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    grad = grad_ptr + tl.load(work + 1)
    length = tl.load(work + 2)
    third = tl.load(work + 3)
    if tl.load(work) == BLOCKS_WORK:
        ACC: tl.constexpr = error_ptr.dtype.element_ty
        mask, offs = tile_of(third, BLOCKS, COLS, SIZE)
        is_whole, aligned, exists = gradients_of(grad, length, mask, offs, BLOCKS, COLS, SIZE)
        if is_whole:
            values = tl.load(aligned + offs).to(ACC)
        else:
            values = tl.load(grad + offs, mask=exists, other=0.0).to(ACC)
        first = tl.load(work + 4)
        if FEEDBACK:
            error = error_ptr + first * SIZE
            own_blocks = tl.where(tl.load(work + 7) == rank, third, 0)
            own_mask, _ = tile_of(own_blocks, BLOCKS, COLS, SIZE)
            own = shard_error_ptr + tl.load(work + 8) * SIZE
            kept = tl.load(own + offs, mask=own_mask, other=0.0)
            total = (tl.load(error + offs, mask=mask, other=0.0) - kept) + values
            values = tl.where(tl.abs(total) < float("inf"), total, values)
        codes, scale, lost = encode(values, quantizer_ptr, SIZE, BITS, CAP)
        store_codes(
            codes_at(payload_ptr, tl.load(work + 5), SIZE, BITS), codes, third, BLOCKS, COLS, SIZE, BITS
        )
        store_scales(payload_ptr, tl.load(work + 6), scale, third, BLOCKS)
        if FEEDBACK:
            tl.store(error + offs, lost, mask=mask)
    else:
        exact = (payload_ptr + third).to(tl.pointer_type(EXACT))
        copy_tile(grad, exact, length, 1.0, COPY_BLOCK)


def quantize(
    grad: torch.Tensor | Slot,
    quantizer: torch.Tensor,
    work: torch.Tensor,
    rank: int | Slot,
    *,
    error: torch.Tensor,
    shard_error: torch.Tensor,
    out: torch.Tensor,
    feedback: bool,
    exact_dtype: torch.dtype,
    bits: int,
    cap: float,
    block_size: int,
    tile_blocks: int,
    num_warps: int,
) -> Launch:
    """Quantize gradient + error into the payloads, and keep in error what is lost, in one launch.

    grad: the bucket. quantizer: see tile.py. work: int64 table, bucket_work of QuantizedWork, which
    has tile_blocks and num_warps, too. rank: whose shard shard_error belongs to. error, shard_error: those of
    ops.quantized_plan; without feedback they are neither read nor written, but have the dtype of the
    arithmetic. out: the payloads of all shards, uint8. exact_dtype: that of exact elements there. cap: the
    largest scale.
    """
    return Launch(
        _quantize_kernel,
        len(work),
        grad,
        error,
        shard_error,
        out,
        quantizer,
        work,
        rank,
        FEEDBACK=feedback,
        EXACT=element_type(exact_dtype),
        BITS=bits,
        CAP=cap,
        SIZE=block_size,
        COLS=padded_size(block_size),
        BLOCKS=tile_blocks,
        COPY_BLOCK=COPY_BLOCK,
        num_warps=num_warps,
        maxnreg=registers(num_warps, max(1, RESIDENT_WARPS // num_warps)),
        # Codes of opposite signs have to cancel.
        enable_fp_fusion=False,
    )


# Of a multiprocessor, which its registers have to hold: with as many threads as quantize has, and with half.
WRITING_WARPS, WRITING_HALF_WARPS = 24, 16


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
    COLS: tl.constexpr,
    BLOCKS: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
):
    """gradient = round(scale · code's value), and the exact elements as they are.

    Pointers and grid as in quantize. Moves per element BITS / 8 B of codes and the gradient once.
    """
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    grad = grad_ptr + tl.load(work + 1)
    length = tl.load(work + 2)
    third = tl.load(work + 3)
    TYPE: tl.constexpr = grad_ptr.dtype.element_ty
    if tl.load(work) == BLOCKS_WORK:
        mask, offs = tile_of(third, BLOCKS, COLS, SIZE)
        scale = load_scales(payload_ptr, tl.load(work + 6), third, BLOCKS)
        first_code = codes_at(payload_ptr, tl.load(work + 5), SIZE, BITS)
        codes = load_codes(first_code, third, BLOCKS, COLS, SIZE, BITS)
        values = round_to(decode(codes, scale, quantizer_ptr, ACC, BITS), TYPE)
        is_whole, aligned, exists = gradients_of(grad, length, mask, offs, BLOCKS, COLS, SIZE)
        if is_whole:
            tl.store(aligned + offs, values)
        else:
            tl.store(grad + offs, values, mask=exists)
    else:
        exact = (payload_ptr + third).to(tl.pointer_type(EXACT))
        copy_tile(exact, grad, length, 1.0, COPY_BLOCK)


def dequantize(
    payload: torch.Tensor,
    quantizer: torch.Tensor,
    work: torch.Tensor,
    *,
    out: torch.Tensor | Slot,
    exact_dtype: torch.dtype,
    bits: int,
    block_size: int,
    tile_blocks: int,
    num_warps: int,
) -> Launch:
    """Write what the payloads of all shards stand for to the bucket, in one launch.

    payload: uint8. quantizer, work, exact_dtype and the sizes: those of quantize. out: the bucket.
    """
    resident = WRITING_WARPS
    if bits == 4 and out.dtype != torch.float64:
        # So that a thread's codes are 128 bits; in fp64, where they would be 64, it spills.
        resident, num_warps = WRITING_HALF_WARPS, num_warps // 2
    return Launch(
        _dequantize_kernel,
        len(work),
        payload,
        out,
        quantizer,
        work,
        ACC=element_type(torch.promote_types(out.dtype, torch.float32)),
        EXACT=element_type(exact_dtype),
        BITS=bits,
        SIZE=block_size,
        COLS=padded_size(block_size),
        BLOCKS=tile_blocks,
        COPY_BLOCK=COPY_BLOCK,
        num_warps=num_warps,
        maxnreg=registers(num_warps, max(1, resident // num_warps)),
        enable_fp_fusion=False,
    )
