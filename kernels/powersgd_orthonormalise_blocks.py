"""Orthonormalise panels of any rank: block Gram–Schmidt, 32 columns at a time, one program per matrix."""

import torch
import triton
import triton.language as tl

from .launch import MAX_REGISTERS, launch
from .powersgd_gram_schmidt import copy_panel, gram, multiply, subtract_projection
from .powersgd_tile import (
    MATRIX_FIELDS,
    MATRIX_RANK,
    MIN_BLOCK_ROWS,
    P_PANEL,
    P_STRIDE,
    P_WIRE,
    ROWS,
    panel,
    wire_start,
    wire_stride,
)
from .powersgd_triangle import DEPENDENT, DEPENDENT_FP64, diagonal, triangle

NUM_WARPS = 8


@triton.jit
def _orthonormalise_blocks_kernel(
    wire_ptr,
    p_ptr,
    matrices_ptr,
    epsilon: tl.float64,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute what _orthonormalise_kernel does, for any RANK, RANK_BLOCK columns at a time, in fp64.

    This is block Gram–Schmidt: each block against the blocks before it, then within, twice (with epsilon
    once).
    Grid: one program per matrix, however long it is: ranks beyond 32 are rare. Each time it reads a block
    about 5 times, and 5 times more per block before it.
    """
    TOLERANCE: tl.constexpr = DEPENDENT_FP64 if p_ptr.dtype.element_ty == tl.float64 else DEPENDENT
    matrix_ptr = matrices_ptr + tl.program_id(0).to(tl.int64) * MATRIX_FIELDS
    n = tl.load(matrix_ptr + ROWS).to(tl.int32)
    r = tl.load(matrix_ptr + MATRIX_RANK).to(tl.int32)
    source_ptr = wire_start(wire_ptr, tl.load(matrix_ptr + P_WIRE))
    wire_length = wire_stride(n, wire_ptr.dtype.element_ty)
    out_ptr, stride = panel(p_ptr, matrix_ptr, P_PANEL, P_STRIDE, MIN_BLOCK_ROWS)
    stride = stride.to(tl.int32)
    added = tl.zeros((RANK_BLOCK,), tl.float64) + epsilon

    for rank_start in range(0, RANK, RANK_BLOCK):
        block_ptr = out_ptr + rank_start * stride
        cols = tl.minimum(r - rank_start, RANK_BLOCK)
        from_ptr = source_ptr + rank_start * wire_length
        copy_panel(from_ptr, wire_length, block_ptr, stride, wire_length, cols, RANK_BLOCK, BLOCK)
        tl.debug_barrier()
        for _ in range(tl.where(epsilon == 0.0, 2, 1)):
            own = diagonal(gram(block_ptr, stride, stride, cols, RANK_BLOCK, BLOCK), RANK_BLOCK)
            for done in range(0, rank_start, RANK_BLOCK):
                subtract_projection(block_ptr, out_ptr + done * stride, stride, n, cols, RANK_BLOCK, BLOCK)
            products = gram(block_ptr, stride, stride, cols, RANK_BLOCK, BLOCK)
            transform, _, _ = triangle(products, products, own, added, TOLERANCE, RANK_BLOCK)
            multiply(
                block_ptr, stride, block_ptr, stride, 0, stride, stride, n, cols, transform,
                RANK_BLOCK, BLOCK, True,
            )  # fmt: skip
            tl.debug_barrier()


def orthonormalise_blocks(
    wire: torch.Tensor, matrices: torch.Tensor, *, out: torch.Tensor, rank: int, epsilon: float, block: int
) -> None:
    """Do what powersgd_orthonormalise.py's orthonormalise does, for a rank that is a multiple of 32."""
    launch(_orthonormalise_blocks_kernel, len(matrices))(
        wire,
        out,
        matrices,
        epsilon,
        RANK=rank,
        RANK_BLOCK=32,
        BLOCK=block,
        num_warps=NUM_WARPS,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=True,
    )
