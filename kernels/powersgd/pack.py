"""Fill PowerSGD's wires: add up partial factors, and copy uncompressed tensors."""

import torch
import triton
import triton.language as tl

from ..launch import Launch, Slot, registers
from ..tile import copy_tile, round_to
from .tile import REDUCE, SHRINK, WORK_FIELDS, wire_start, wire_stride
from .work import COPY_BLOCK, factor_tile

NUM_WARPS = 4


@triton.jit
def _pack_kernel(
    partial_ptr,
    grad_ptr,
    wire_ptr,
    work_ptr,
    scale: tl.float64,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
):
    """Write scale · (sum of partial panels, in the order of their indices), or scale · gradient, to a wire.

    partial_ptr: [partial sums, RANK, BLOCK], panels column after column, times SHRINK. A float16 wire gets
        the sums without SHRINK, any other wire with it.
    grad_ptr: the bucket.
    wire_ptr: see PowerSGDWork.
    work_ptr: rows, either of
        (REDUCE, first wire element, rows, r, first partial sum, partial sums of a block, the factor's rows)
        (COPY, first bucket element, first wire element, number of elements, zeros behind them)
    ROWS: the most rows that a REDUCE row covers, a multiple of BLOCK.
    Grid: one program per row of work_ptr.
    Moves each partial sum once, 4 · RANK · BLOCK B, and each uncompressed element twice.
    """
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    first = tl.load(work + 1)
    second = tl.load(work + 2)
    third = tl.load(work + 3)
    fourth = tl.load(work + 4)
    VECTOR: tl.constexpr = 128 // wire_ptr.dtype.element_ty.primitive_bitwidth
    if tl.load(work) == REDUCE:
        num_partial = tl.load(work + 5)
        stride = wire_stride(tl.load(work + 6), wire_ptr.dtype.element_ty)
        ACC: tl.constexpr = partial_ptr.dtype.element_ty
        GROW: tl.constexpr = 1.0 / SHRINK if wire_ptr.dtype.element_ty == tl.float16 else 1.0
        factor = (tl.full((), GROW, tl.float64) * scale).to(ACC)
        offs_row = tl.arange(0, ROWS)[None, :]
        mask_row = offs_row < wire_stride(second.to(tl.int32), wire_ptr.dtype.element_ty)
        partial = partial_ptr + fourth * (RANK * BLOCK) + offs_row % BLOCK
        partial += (offs_row // BLOCK) * (num_partial * (RANK * BLOCK))
        wire = wire_start(wire_ptr, first) + offs_row
        for rank_start in range(0, RANK, RANK_BLOCK):
            offs_rank = rank_start + tl.arange(0, RANK_BLOCK)[:, None]
            mask = mask_row & (offs_rank < third)
            acc = tl.zeros((RANK_BLOCK, ROWS), ACC)
            for i in range(num_partial.to(tl.int32)):
                acc += tl.load(partial + i * (RANK * BLOCK) + offs_rank * BLOCK, mask=mask, other=0.0)
            # If P has NaN, sums beyond the last row may be NaN too.
            values = round_to(tl.where(offs_row < second, acc * factor, 0.0), wire_ptr.dtype.element_ty)
            tl.store(wire + offs_rank * stride, values, mask=mask)
    else:
        copy_tile(grad_ptr + first, wire_ptr + second, third, scale, COPY_BLOCK)
        offs = tl.arange(0, VECTOR)
        zeros = tl.zeros((VECTOR,), wire_ptr.dtype.element_ty)
        tl.store(wire_ptr + second + third + offs, zeros, mask=offs < fourth)


def pack(
    partial: torch.Tensor,
    grad: torch.Tensor | Slot,
    work: torch.Tensor,
    *,
    out: torch.Tensor,
    rank: int,
    block: int,
    scale: float | Slot,
) -> Launch:
    """Return the launch that sums the partial P (or Q) into a wire, and copies uncompressed tensors there.

    partial: project's or back_project's out.
    grad: the bucket's flat buffer.
    work: int64, PowerSGDWork's pack_work for P, reduce_work for Q.
    out: the wire, in the dtype to communicate.
    rank: PowerSGDWork's.
    block: PowerSGDWork's block_rows for P, block_cols for Q.
    scale: 1 / world size. It makes the all-reduced sum the average, and never overflows 16 bits needlessly.
    """
    rows, cols = factor_tile(rank, block, partial.itemsize)
    return Launch(
        _pack_kernel,
        len(work),
        partial,
        grad,
        out,
        work,
        scale,
        RANK=rank,
        RANK_BLOCK=cols,
        ROWS=rows,
        BLOCK=block,
        COPY_BLOCK=COPY_BLOCK,
        num_warps=NUM_WARPS,
        # Without this limit ptxas spills, to fit more than four programs on a multiprocessor.
        maxnreg=registers(NUM_WARPS, 4),
        enable_fp_fusion=False,
    )
