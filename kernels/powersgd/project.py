"""PowerSGD's first pass over a bucket: add the error to every matrix, keep it, and project it on Q.

The error is finite, rounded, and shortened where float16 needs it.
"""

import torch
import triton
import triton.language as tl

from ..launch import Launch, Slot, registers
from ..tile import round_to
from .random import direction
from .tile import (
    MAX_FMA_RANK,
    P_PANEL,
    P_STRIDE,
    Q_PANEL,
    Q_STRIDE,
    SHRINK,
    dot_rank_block,
    gradient_matrix,
    gradient_tile,
    is_16_byte_aligned,
    memory_matrix,
    memory_tile,
    panel,
    work_of,
)

# The norm that a row or a column of a float16 error may have, so that its sum with the next gradients fits.
LIMIT_FLOAT16 = tl.constexpr(0.75 * 65504)
# Halfway between the largest number and what would follow it.
INFINITE_FLOAT16, INFINITE_BFLOAT16 = tl.constexpr(65520.0), tl.constexpr((2 - 2**-8) * 2.0**127)


@triton.jit
def shortening(squares, length, BLOCK: tl.constexpr):
    """Return the factor for each row (or column) of a float16 matrix's tile; length: the matrix's row length.

    squares: the squared norms of the rows within the tile. LIMIT_FLOAT16² is divided equally among the tiles
    of a row. A row that exceeds its limit is scaled to a third of it, so that it isn't too long again in the
    next step.
    """
    limit = tl.div_rn(LIMIT_FLOAT16 * LIMIT_FLOAT16, tl.cdiv(length, BLOCK).to(tl.float32))
    return tl.where(squares > limit, tl.sqrt_rn(tl.div_rn(limit, tl.maximum(9 * squares, limit))), 1.0)


@triton.jit
def fit_float16(error, rows, cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Return a tile of the error, shortened where the factors of a float16 matrix might overflow float16.

    No element of M Q or Mᵀ P, with Q and P orthonormal, is larger than the norm of M's longest row or column.
    """
    # If even the largest element in every position of a row or column would fit, none is too long.
    largest = tl.max(tl.abs(error))
    longest = tl.maximum(rows + BLOCK_ROWS, cols + BLOCK_COLS).to(tl.float32)
    if largest * largest * longest > LIMIT_FLOAT16 * LIMIT_FLOAT16:
        by_row = shortening(tl.sum(error * error, axis=1), cols, BLOCK_COLS)
        by_col = shortening(tl.sum(error * error, axis=0), rows, BLOCK_ROWS)
        error *= tl.minimum(by_row[:, None], by_col[None, :])
    return error


@triton.jit
def add_error(
    gradient, exists, memory_ptrs, memory_mask, approximation, rows, cols,
    TYPE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Store M = gradient + (M_prev − P_prev Q_prevᵀ) over M_prev. Returns M as stored, not yet upcast.

    approximation: P_prev Q_prevᵀ. It is rounded to TYPE, the bucket's dtype, as it was for the output, so
    that the error includes the rounding of the output. Outside the matrix, and where it or M isn't finite in
    TYPE, the error counts as zero (that is how PowerSGD recovers from inf and NaN). rows, cols: the matrix's.
    """
    # Once rounded to TYPE.
    INFINITE: tl.constexpr = (
        INFINITE_FLOAT16
        if TYPE == tl.float16
        else (INFINITE_BFLOAT16 if TYPE == tl.bfloat16 else float("inf"))
    )
    previous = tl.load(memory_ptrs, mask=memory_mask, other=0.0).to(gradient.dtype)
    error = previous - round_to(approximation, TYPE).to(gradient.dtype)
    error = tl.where(exists & (tl.abs(error) < INFINITE), error, 0.0)
    if TYPE == tl.float16:
        error = fit_float16(error, rows, cols, BLOCK_ROWS, BLOCK_COLS)
    total = gradient + error
    matrix = round_to(tl.where(tl.abs(total) < INFINITE, total, gradient), TYPE)
    tl.store(memory_ptrs, matrix, mask=memory_mask)
    return matrix


# A dot product over more columns at once takes more registers than there are.
NARROW_COLS = 32


@triton.jit
def project_fma(
    grad_ptr, memory_ptr, p_ptr, q_ptr, q_hat, factor, partial, matrix_ptr, row_block, first, last,
    RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    FEEDBACK: tl.constexpr, RELOADED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Do the work of one program of _project_kernel in FMAs. partial: the start of its partial P."""
    TYPE: tl.constexpr = grad_ptr.dtype.element_ty
    COMPUTE: tl.constexpr = tl.float64 if TYPE == tl.float64 else tl.float32
    FOLD: tl.constexpr = 128 // TYPE.primitive_bitwidth
    offs_row = tl.arange(0, BLOCK_ROWS)
    offs_col = tl.arange(0, BLOCK_COLS)
    p_panel, p_stride = panel(p_ptr, matrix_ptr, P_PANEL, P_STRIDE, BLOCK_ROWS)
    q_panel, q_stride = panel(q_ptr, matrix_ptr, Q_PANEL, Q_STRIDE, BLOCK_COLS)
    bucket = gradient_matrix(grad_ptr, matrix_ptr)
    if FEEDBACK:
        memory = memory_matrix(memory_ptr, matrix_ptr, ALIGNED)

    acc = ()
    for _ in tl.static_range(RANK):
        # Sums over neighboring columns stay within a thread; sums over threads wait for the end.
        acc = acc + (tl.zeros((BLOCK_ROWS, BLOCK_COLS // FOLD), COMPUTE),)
    for col_block in range(first, last):
        if RELOADED:
            bucket = gradient_matrix(grad_ptr, matrix_ptr)
            if FEEDBACK:
                memory = memory_matrix(memory_ptr, matrix_ptr, ALIGNED)
        grad_ptrs, exists = gradient_tile(bucket, row_block, col_block, BLOCK_ROWS, BLOCK_COLS, ALIGNED)
        matrix = tl.load(grad_ptrs, mask=exists, other=0.0).to(COMPUTE)
        offs_q = col_block * BLOCK_COLS + offs_col
        if FEEDBACK:
            memory_ptrs, mask = memory_tile(memory, row_block, col_block, BLOCK_ROWS, BLOCK_COLS)
            approximation = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)
            for j in tl.static_range(RANK):
                p = tl.load(p_panel + j * p_stride + row_block * BLOCK_ROWS + offs_row) * (1.0 / SHRINK)
                q = tl.load(q_panel + j * q_stride + offs_q)
                approximation += p[:, None] * q[None, :]
            matrix = add_error(
                matrix, exists, memory_ptrs, mask, approximation, bucket[1], bucket[2],
                TYPE, BLOCK_ROWS, BLOCK_COLS,
            ).to(COMPUTE)  # fmt: skip
        new = ()
        for j in tl.static_range(RANK):
            q = tl.load(q_hat[j] + offs_q) * factor[j]
            products = tl.reshape(matrix * q[None, :], (BLOCK_ROWS, BLOCK_COLS // FOLD, FOLD))
            new = new + (acc[j] + tl.sum(products, axis=2),)
        acc = new

    for j in tl.static_range(RANK):
        tl.store(partial + j * BLOCK_ROWS + offs_row, tl.sum(acc[j], axis=1))


@triton.jit
def project_dot(
    grad_ptr, memory_ptr, p_ptr, q_ptr, norms_ptr, partial, matrix_ptr, row_block, first, last,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    FEEDBACK: tl.constexpr, RELOADED: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Do the same in matrix products, tf32x3 or fp64, reading M once for each RANK_BLOCK columns of P."""
    TYPE: tl.constexpr = grad_ptr.dtype.element_ty
    COMPUTE: tl.constexpr = tl.float64 if TYPE == tl.float64 else tl.float32
    PRECISION: tl.constexpr = "ieee" if TYPE == tl.float64 else "tf32x3"
    offs_row = tl.arange(0, BLOCK_ROWS)
    offs_col = tl.arange(0, BLOCK_COLS)
    offs_rank = tl.arange(0, RANK_BLOCK)
    p_panel, p_stride = panel(p_ptr, matrix_ptr, P_PANEL, P_STRIDE, BLOCK_ROWS)
    q_panel, q_stride = panel(q_ptr, matrix_ptr, Q_PANEL, Q_STRIDE, BLOCK_COLS)
    p_panel += row_block * BLOCK_ROWS
    bucket = gradient_matrix(grad_ptr, matrix_ptr)
    if FEEDBACK:
        memory = memory_matrix(memory_ptr, matrix_ptr, ALIGNED)

    for rank_start in range(0, RANK, RANK_BLOCK):
        if FEEDBACK and rank_start > 0:
            tl.debug_barrier()  # other threads' part of M has to have arrived
        start, factor = direction(
            q_ptr, norms_ptr, matrix_ptr, rank_start + offs_rank, RANK, BLOCK_COLS, UNIT
        )
        q_hat = q_ptr + (start // BLOCK_COLS * BLOCK_COLS + (rank_start + offs_rank) * q_stride)
        factor = factor.to(COMPUTE)
        acc = tl.zeros((BLOCK_ROWS, RANK_BLOCK), COMPUTE)
        for col_block in range(first, last):
            offs_q = col_block * BLOCK_COLS + offs_col
            if RELOADED:
                bucket = gradient_matrix(grad_ptr, matrix_ptr)
                if FEEDBACK:
                    memory = memory_matrix(memory_ptr, matrix_ptr, ALIGNED)
            if FEEDBACK:
                memory_ptrs, mask = memory_tile(memory, row_block, col_block, BLOCK_ROWS, BLOCK_COLS)
                if rank_start == 0:
                    grad_ptrs, grad_mask = gradient_tile(
                        bucket, row_block, col_block, BLOCK_ROWS, BLOCK_COLS, ALIGNED
                    )
                    gradient = tl.load(grad_ptrs, mask=grad_mask, other=0.0)
                    approximation = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)
                    for k in range(0, RANK, RANK_BLOCK):
                        p = tl.load(p_panel + (k + offs_rank)[None, :] * p_stride + offs_row[:, None])
                        q = tl.load(q_panel + (k + offs_rank)[:, None] * q_stride + offs_q[None, :])
                        approximation = tl.dot(
                            p, q, approximation, input_precision=PRECISION, out_dtype=COMPUTE
                        )
                    matrix = add_error(
                        gradient.to(COMPUTE), grad_mask, memory_ptrs, mask, approximation * (1.0 / SHRINK),
                        bucket[1], bucket[2], TYPE, BLOCK_ROWS, BLOCK_COLS,
                    )  # fmt: skip
                else:
                    matrix = tl.load(memory_ptrs, mask=mask, other=0.0)
            else:
                grad_ptrs, grad_mask = gradient_tile(
                    bucket, row_block, col_block, BLOCK_ROWS, BLOCK_COLS, ALIGNED
                )
                matrix = tl.load(grad_ptrs, mask=grad_mask, other=0.0)
            q = tl.load(q_hat[None, :] + offs_q[:, None]) * factor[None, :]
            acc = tl.dot(matrix.to(COMPUTE), q, acc, input_precision=PRECISION, out_dtype=COMPUTE)
        offs_partial = (rank_start + offs_rank)[None, :] * BLOCK_ROWS + offs_row[:, None]
        tl.store(partial + offs_partial, acc)


@triton.jit
def project_tiles(
    grad_ptr, memory_ptr, p_ptr, q_ptr, norms_ptr, q_hat, factor, partial, matrix_ptr, row_block, first, last,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    FEEDBACK: tl.constexpr, RELOADED: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Choose between FMAs and matrix products by RANK."""
    if RANK <= MAX_FMA_RANK:
        project_fma(
            grad_ptr, memory_ptr, p_ptr, q_ptr, q_hat, factor, partial, matrix_ptr, row_block, first, last,
            RANK, BLOCK_ROWS, BLOCK_COLS, FEEDBACK, RELOADED, ALIGNED,
        )  # fmt: skip
    else:
        project_dot(
            grad_ptr, memory_ptr, p_ptr, q_ptr, norms_ptr, partial, matrix_ptr, row_block, first, last,
            RANK, RANK_BLOCK, BLOCK_ROWS, BLOCK_COLS, FEEDBACK, RELOADED, UNIT, ALIGNED,
        )  # fmt: skip


@triton.jit
def _project_kernel(
    grad_ptr,
    memory_ptr,
    p_ptr,
    q_ptr,
    norms_ptr,
    partial_ptr,
    matrices_ptr,
    work_ptr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    SPLIT: tl.constexpr,
    FEEDBACK: tl.constexpr,
    RELOADED: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Compute M = gradient + (M_prev − P_prev Q_prevᵀ), and partial P = M Q̂ over some columns.

    Q̂: the columns of Q_prev, scaled (see direction, which takes UNIT). memory_ptr: M_prev, becomes M. Without
    FEEDBACK it isn't touched, and M is the gradient. RELOADED: see is_reloaded. p_ptr, q_ptr: panels.
    partial_ptr: [programs, RANK, BLOCK_ROWS]. Grid: one program per row of work_ptr (_project_work).
    BLOCK_COLS: a SPLIT-th of PowerSGDWork's.
    Moves 12 B per matrix element in fp32 (4 B without feedback), and 4 · RANK · BLOCK_ROWS B of partial sums
    per program; P and Q come from the cache.
    """
    program = tl.program_id(0).to(tl.int64)
    matrix_ptr, row_block, first, last = work_of(program, matrices_ptr, work_ptr)
    partial = partial_ptr + program * (RANK * BLOCK_ROWS)
    q_hat = ()
    factor = ()
    if RANK <= MAX_FMA_RANK:
        # Before the branch: within it, they would take more registers.
        stride = tl.load(matrix_ptr + Q_STRIDE) // BLOCK_COLS * BLOCK_COLS
        for j in tl.static_range(RANK):
            column = tl.full((1,), j, tl.int32)
            start, scale = direction(q_ptr, norms_ptr, matrix_ptr, column, RANK, BLOCK_COLS, UNIT)
            q_hat = q_hat + (q_ptr + tl.sum(start, axis=0) // BLOCK_COLS * BLOCK_COLS + j * stride,)
            factor = factor + (tl.sum(scale, axis=0).to(p_ptr.dtype.element_ty),)
    if is_16_byte_aligned(grad_ptr, matrix_ptr, (row_block + 1) * BLOCK_ROWS):
        project_tiles(
            grad_ptr, memory_ptr, p_ptr, q_ptr, norms_ptr, q_hat, factor, partial, matrix_ptr,
            row_block, first * SPLIT, last * SPLIT,
            RANK, RANK_BLOCK, BLOCK_ROWS, BLOCK_COLS, FEEDBACK, RELOADED, UNIT, True,
        )  # fmt: skip
    else:
        project_tiles(
            grad_ptr, memory_ptr, p_ptr, q_ptr, norms_ptr, q_hat, factor, partial, matrix_ptr,
            row_block, first * SPLIT, last * SPLIT,
            RANK, RANK_BLOCK, BLOCK_ROWS, BLOCK_COLS, FEEDBACK, RELOADED, UNIT, False,
        )  # fmt: skip


def is_reloaded(rank: int, dtype: torch.dtype) -> bool:
    """Return whether a matrix's row of the table is loaded for each tile, by way of shared memory.

    Otherwise it is loaded once, which takes more registers than shortening fp16's error leaves, or fp32 at
    rank 4 on sm_100, or fp64 at rank 32 on sm_90 under Triton 3.6; and at rank 32 in fp32 makes the compiler
    place tiles so that two programs don't fit 100 KiB.
    """
    ranks = {torch.float16: (rank,), torch.float32: (4, 32), torch.float64: (32,)}
    return rank in ranks.get(dtype, ())


def launch_options(rank: int, dtype: torch.dtype) -> dict[str, int]:
    """Return how _project_kernel is compiled for a padded rank and the gradient's dtype."""
    # In matrix products a tile's rows keep 4 warps busy: more would repeat the same products. But in fp64
    # beyond rank 32 the registers of 4 don't suffice.
    is_large = dtype == torch.float64 and rank > 32
    num_warps = 8 if rank <= 4 or is_large else 4
    # Where registers are left, three programs fit a multiprocessor. Shortening fp16's error takes more, and
    # so does rank 2 on sm_100.
    num_programs = 3 if rank == 1 and dtype in (torch.float32, torch.bfloat16) else 1 if is_large else 2
    # Matrix products take tiles that are loaded one step ahead, by way of shared memory; with RELOADED the
    # table's elements before them. In fp64 that takes more registers than there are, and so do the table's
    # elements in fp16 beyond rank 32, on sm_86 under Triton 3.9.
    num_stages = 3
    if rank > MAX_FMA_RANK.value:
        is_ahead = is_reloaded(rank, dtype) and rank <= 32
        num_stages = 1 if dtype == torch.float64 else 3 if is_ahead else 2
    return {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": registers(num_warps, num_programs)}


def project(
    grad: torch.Tensor | Slot,
    memory: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    norms: torch.Tensor,
    matrices: torch.Tensor,
    work: torch.Tensor,
    *,
    out: torch.Tensor,
    rank: int,
    block_rows: int,
    block_cols: int,
    feedback: bool,
    unit: bool,
) -> Launch:
    """Steps 1 and 2 of PowerSGD (Vogels et al. 2019, algorithm 1) for every matrix of a bucket, one launch.

    grad: the bucket's flat buffer. memory: M of the last step, becomes this step's M; any tensor without
    feedback. p, q: the panels of the last step's factors, fp32 (fp64 for an fp64 bucket). norms: fp64, see
    reconstruct. matrices, work: int64 tables of PowerSGDWork (matrix_table, project_work).
    out: [len(work), rank, block_rows], the partial sums of P, in p's dtype.
    rank, block_rows, block_cols: PowerSGDWork's. unit: whether columns of Q are scaled to length 1, for which
    P's length matters, rather than by a power of two.
    """
    # FMAs at rank 8 in fp32 take all registers for a tile of 64 columns.
    is_narrow = rank > MAX_FMA_RANK.value or (rank == 8 and grad.dtype == torch.float32)
    cols = min(block_cols, NARROW_COLS) if is_narrow else block_cols
    return Launch(
        _project_kernel,
        len(work),
        grad,
        memory,
        p,
        q,
        norms,
        out,
        matrices,
        work,
        RANK=rank,
        RANK_BLOCK=dot_rank_block(rank),
        BLOCK_ROWS=block_rows,
        BLOCK_COLS=cols,
        SPLIT=block_cols // cols,
        FEEDBACK=feedback,
        RELOADED=is_reloaded(rank, grad.dtype),
        UNIT=unit,
        enable_fp_fusion=True,
        **launch_options(rank, grad.dtype),
    )
