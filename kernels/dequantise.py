"""Write the means in the payloads of all shards to the bucket."""

import torch
import triton
import triton.language as tl

from .launch import launch, registers
from .quantise_tile import (
    WORK_FIELDS,
    codes_at,
    decode,
    element_type,
    gradients_of,
    load_codes,
    load_scales,
    tile_of,
)
from .quantise_work import BLOCKS as _BLOCKS
from .quantise_work import COPY_BLOCK, padded_size
from .tile import copy_tile, round_to

BLOCKS_WORK = tl.constexpr(_BLOCKS)
# Of a multiprocessor, which its registers have to hold: with as many threads as quantise has, and with half.
RESIDENT_WARPS, RESIDENT_HALF_WARPS = 24, 16


@triton.jit
def _dequantise_kernel(
    payload_ptr,
    grad_ptr,
    quantiser_ptr,
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

    Pointers and grid as in quantise. Moves per element BITS / 8 B of codes and the gradient once.
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
        values = round_to(decode(codes, scale, quantiser_ptr, ACC, BITS), TYPE)
        is_whole, aligned, exists = gradients_of(grad, length, mask, offs, BLOCKS, COLS, SIZE)
        if is_whole:
            tl.store(aligned + offs, values)
        else:
            tl.store(grad + offs, values, mask=exists)
    else:
        exact = (payload_ptr + third).to(tl.pointer_type(EXACT))
        copy_tile(exact, grad, length, 1.0, COPY_BLOCK)


def dequantise(
    payload: torch.Tensor,
    quantiser: torch.Tensor,
    work: torch.Tensor,
    *,
    out: torch.Tensor,
    exact_dtype: torch.dtype,
    bits: int,
    block_size: int,
    tile_blocks: int,
    num_warps: int,
) -> None:
    """Write what the payloads of all shards stand for to the bucket, in one launch.

    payload: uint8. quantiser, work, exact_dtype and the sizes: those of quantise. out: the bucket.
    """
    resident = RESIDENT_WARPS
    if bits == 4 and out.dtype != torch.float64:
        # So that a thread's codes are 128 bits; in fp64, where they would be 64, it spills.
        resident, num_warps = RESIDENT_HALF_WARPS, num_warps // 2
    if len(work):
        launch(_dequantise_kernel, len(work))(
            payload,
            out,
            quantiser,
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
