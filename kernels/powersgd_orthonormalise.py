"""Orthonormalise all P panels of a bucket in one launch: Gram–Schmidt in the Gram matrix's inner product."""

import torch
import triton
import triton.language as tl

from .launch import launch
from .powersgd_gram_schmidt import (
    DEPENDENT,
    DEPENDENT_FP64,
    copy_panel,
    diagonal,
    gram,
    multiply,
    orthonormalise_panel,
    subtract_projection,
    triangle,
)
from .powersgd_tile import (
    MATRIX_FIELDS,
    MATRIX_RANK,
    MAX_REGISTERS,
    P_PANEL,
    P_STRIDE,
    P_WIRE,
    ROWS,
    wire_start,
    wire_stride,
)

# One pass leaves ‖PᵀP−I‖ of about 3e-14 / remaining fraction. A second one follows when that may exceed 3e-7.
SECOND_PASS_BELOW = tl.constexpr(1e-7)


@triton.jit
def _orthonormalise_kernel(
    wire_ptr,
    p_ptr,
    matrices_ptr,
    epsilon: tl.float64,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute P ← P T with (P T)ᵀ(P T) = I, T upper triangular, for one panel with RANK <= 32.

    wire_ptr: the panels n×r, column after column (powersgd_work), all-reduced. p_ptr: the padded panels,
    written whole. Zero and dependent columns become zeros; a panel with anything not finite becomes NaN.
    Grid: one program per matrix. Reads the panel twice and writes it once; twice as much if it is
    ill-conditioned.
    """
    matrix_ptr = matrices_ptr + tl.program_id(0).to(tl.int64) * MATRIX_FIELDS
    n = tl.load(matrix_ptr + ROWS).to(tl.int32)
    r = tl.load(matrix_ptr + MATRIX_RANK).to(tl.int32)
    source_ptr = wire_start(wire_ptr, tl.load(matrix_ptr + P_WIRE))
    source_stride = wire_stride(n, wire_ptr.dtype.element_ty)
    out_ptr = p_ptr + tl.load(matrix_ptr + P_PANEL)
    stride = tl.load(matrix_ptr + P_STRIDE).to(tl.int32)
    # Triton 3.6 fails on a product in fp64 of values loaded in 16 bits, so it loads a copy in fp32.
    COPY: tl.constexpr = RANK > 8 and wire_ptr.dtype.element_ty.primitive_bitwidth == 16

    if COPY:
        copy_panel(source_ptr, 1, source_stride, out_ptr, stride, n, r, RANK, BLOCK)
        tl.debug_barrier()
        smallest = orthonormalise_panel(out_ptr, 1, stride, out_ptr, stride, n, r, epsilon, RANK, BLOCK, True)
    else:
        smallest = orthonormalise_panel(
            source_ptr, 1, source_stride, out_ptr, stride, n, r, epsilon, RANK, BLOCK, False
        )
    if (smallest < SECOND_PASS_BELOW) & (epsilon == 0.0):
        tl.debug_barrier()
        orthonormalise_panel(out_ptr, 1, stride, out_ptr, stride, n, r, epsilon, RANK, BLOCK, True)


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
    """Compute what _orthonormalise_kernel does, for any RANK, RANK_BLOCK columns at a time.

    This is block Gram–Schmidt: each block against the blocks before it, then within, twice (with epsilon
    once).
    Grid: one program per matrix. Each time it reads a block about 5 times, and 5 times more per block before
    it.
    """
    TOLERANCE: tl.constexpr = DEPENDENT_FP64 if p_ptr.dtype.element_ty == tl.float64 else DEPENDENT
    matrix_ptr = matrices_ptr + tl.program_id(0).to(tl.int64) * MATRIX_FIELDS
    n = tl.load(matrix_ptr + ROWS).to(tl.int32)
    r = tl.load(matrix_ptr + MATRIX_RANK).to(tl.int32)
    source_ptr = wire_start(wire_ptr, tl.load(matrix_ptr + P_WIRE))
    source_stride = wire_stride(n, wire_ptr.dtype.element_ty)
    out_ptr = p_ptr + tl.load(matrix_ptr + P_PANEL)
    stride = tl.load(matrix_ptr + P_STRIDE).to(tl.int32)

    for rank_start in range(0, RANK, RANK_BLOCK):
        block_ptr = out_ptr + rank_start * stride
        cols = tl.minimum(r - rank_start, RANK_BLOCK)
        columns_ptr = source_ptr + rank_start * source_stride
        copy_panel(columns_ptr, 1, source_stride, block_ptr, stride, n, cols, RANK_BLOCK, BLOCK)
        tl.debug_barrier()
        for _ in range(tl.where(epsilon == 0.0, 2, 1)):
            own = diagonal(gram(block_ptr, n, cols, 1, stride, RANK_BLOCK, BLOCK), RANK_BLOCK)
            for done in range(0, rank_start, RANK_BLOCK):
                subtract_projection(block_ptr, out_ptr + done * stride, stride, n, cols, RANK_BLOCK, BLOCK)
            products = gram(block_ptr, n, cols, 1, stride, RANK_BLOCK, BLOCK)
            transform, _ = triangle(products, own, epsilon, TOLERANCE, RANK_BLOCK)
            multiply(block_ptr, 1, stride, block_ptr, stride, n, cols, transform, RANK_BLOCK, BLOCK, True)
            tl.debug_barrier()


def launch_shape(rank: int, itemsize: int) -> tuple[int, int]:
    """Return (BLOCK, num_warps) for a padded rank: BLOCK rows at a time are as many as the registers hold.

    itemsize: bytes per element of the panels.
    """
    if rank <= 4:
        return min(8192 // (rank * rank), 1024), 8
    # At rank 32, 128 rows spill where products in fp64 are FMAs (sm_100 and sm_120, Triton 3.7).
    return (16384 // itemsize // rank if rank == 16 else 64), 8


def orthonormalise(
    wire: torch.Tensor,
    matrices: torch.Tensor,
    *,
    out: torch.Tensor,
    rank: int,
    epsilon: float = 0.0,
) -> None:
    """Step 4 of PowerSGD (Vogels et al. 2019, algorithm 1) for every matrix of a bucket, one launch.

    wire: the all-reduced wire buffer, which begins with all P. matrices: LowRankWork's int64
    matrix_table.
    out: the padded panels, fp32 (fp64 for an fp64 bucket). epsilon: as torch's orthogonalization_epsilon,
    added to the length by which a column is divided (beyond rank 32 up to a relative difference of epsilon /
    length). With epsilon there is no second pass over ill-conditioned panels, because it would undo what
    epsilon does.
    """
    if not len(matrices):
        return
    block, num_warps = launch_shape(rank, out.itemsize)
    # With one program per matrix, more programs on a multiprocessor would gain nothing. Up to rank 8, several
    # lanes
    # compute and store the same element: with different fusing they would differ in the last bit.
    options = {"num_warps": num_warps, "maxnreg": MAX_REGISTERS, "enable_fp_fusion": rank > 8}
    arguments = (wire, out, matrices, epsilon)
    if rank <= 32:
        launch(_orthonormalise_kernel, len(matrices))(*arguments, RANK=rank, BLOCK=block, **options)
    else:
        launch(_orthonormalise_blocks_kernel, len(matrices))(
            *arguments, RANK=rank, RANK_BLOCK=32, BLOCK=block, **options
        )
