"""PowerSGD's second pass over a bucket: project every matrix on its orthonormal P."""

import torch
import triton
import triton.language as tl

from ..device import dot_precision
from ..launch import Launch, Slot, registers
from .tile import (
    MAX_FMA_RANK,
    P_PANEL,
    P_STRIDE,
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

NUM_WARPS = 4
# Programs on a multiprocessor by padded rank: as many as their registers allow.
PROGRAMS = {1: 4, 2: 4, 4: 4, 8: 3}
PLAIN_DOT_WARPS = 8  # without feedback the kernel has two loops (see gradient_tile); some spill with 4 warps
# A dot product over more rows at once takes more registers than there are for a program.
DOT_ROWS = 32


@triton.jit
def source_matrix(source_ptr, matrix_ptr, FEEDBACK: tl.constexpr):
    """Return M for source_tile: from `memory` with FEEDBACK, without it from the bucket."""
    if FEEDBACK:
        matrix = memory_matrix(source_ptr, matrix_ptr, False)
    else:
        matrix = gradient_matrix(source_ptr, matrix_ptr)
    return matrix


@triton.jit
def source_tile(
    matrix, row_block, col_block, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    FEEDBACK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return (pointers, mask) of a tile of M.

    matrix: source_matrix's result.
    """
    if FEEDBACK:
        ptrs, mask = memory_tile(matrix, row_block, col_block, BLOCK_ROWS, BLOCK_COLS)
    else:
        ptrs, mask = gradient_tile(matrix, row_block, col_block, BLOCK_ROWS, BLOCK_COLS, ALIGNED)
    return ptrs, mask


@triton.jit
def back_project_fma(
    source_ptr, p_ptr, partial, matrix_ptr, col_block, first, last,
    RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    FEEDBACK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute one program's partial Q in FMAs; see _back_project_kernel.

    partial: pointer to the program's partial Q.
    col_block, first, last: the column block, the first row block and one past the last.
    """
    TYPE: tl.constexpr = source_ptr.dtype.element_ty
    COMPUTE: tl.constexpr = tl.float64 if TYPE == tl.float64 else tl.float32
    # The rows of a tile that 128 threads hold with 16 bytes each.
    ROWS_AT_ONCE: tl.constexpr = 128 * (128 // TYPE.primitive_bitwidth) // BLOCK_COLS
    FOLD: tl.constexpr = BLOCK_ROWS // ROWS_AT_ONCE
    offs_row = tl.arange(0, BLOCK_ROWS)
    offs_col = tl.arange(0, BLOCK_COLS)
    p_panel, p_stride = panel(p_ptr, matrix_ptr, P_PANEL, P_STRIDE, BLOCK_ROWS)
    source = source_matrix(source_ptr, matrix_ptr, FEEDBACK)

    acc = ()
    for _ in tl.static_range(RANK):
        # Sums over a thread's rows stay within the thread. Sums over threads wait for the end.
        acc = acc + (tl.zeros((ROWS_AT_ONCE, BLOCK_COLS), COMPUTE),)
    for row_block in range(first, last):
        ptrs, mask = source_tile(source, row_block, col_block, BLOCK_ROWS, BLOCK_COLS, FEEDBACK, ALIGNED)
        matrix = tl.load(ptrs, mask=mask, other=0.0).to(COMPUTE)
        new = ()
        for j in tl.static_range(RANK):
            p = tl.load(p_panel + j * p_stride + row_block * BLOCK_ROWS + offs_row) * SHRINK
            products = tl.reshape(matrix * p[:, None], (FOLD, ROWS_AT_ONCE, BLOCK_COLS))
            new = new + (acc[j] + tl.sum(products, axis=0),)
        acc = new

    for j in tl.static_range(RANK):
        tl.store(partial + j * BLOCK_COLS + offs_col, tl.sum(acc[j], axis=0))


@triton.jit
def back_project_dot(
    source_ptr, p_ptr, partial, matrix_ptr, col_block, first, last,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    FEEDBACK: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute one program's partial Q in matrix products; see _back_project_kernel.

    M is read once for each RANK_BLOCK columns of Q. For the arguments see back_project_fma.
    """
    TYPE: tl.constexpr = source_ptr.dtype.element_ty
    COMPUTE: tl.constexpr = tl.float64 if TYPE == tl.float64 else tl.float32
    offs_row = tl.arange(0, BLOCK_ROWS)
    offs_col = tl.arange(0, BLOCK_COLS)
    p_panel, p_stride = panel(p_ptr, matrix_ptr, P_PANEL, P_STRIDE, BLOCK_ROWS)
    source = source_matrix(source_ptr, matrix_ptr, FEEDBACK)

    for rank_start in range(0, RANK, RANK_BLOCK):
        offs_rank = rank_start + tl.arange(0, RANK_BLOCK)
        acc = tl.zeros((RANK_BLOCK, BLOCK_COLS), COMPUTE)
        for row_block in range(first, last):
            ptrs, mask = source_tile(source, row_block, col_block, BLOCK_ROWS, BLOCK_COLS, FEEDBACK, ALIGNED)
            matrix = tl.load(ptrs, mask=mask, other=0.0).to(COMPUTE)
            offs_p = offs_rank[:, None] * p_stride + (row_block * BLOCK_ROWS + offs_row)[None, :]
            p = tl.load(p_panel + offs_p) * SHRINK
            # Compute Qᵀ, not Q: a transposed M would be copied to shared memory 32 bits at a time.
            acc = tl.dot(p, matrix, acc, input_precision=PRECISION, out_dtype=COMPUTE)
        tl.store(partial + offs_rank[:, None] * BLOCK_COLS + offs_col[None, :], acc)


@triton.jit
def back_project_tiles(
    source_ptr, p_ptr, partial, matrix_ptr, col_block, first, last,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    FEEDBACK: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute one program's partial Q: in FMAs up to MAX_FMA_RANK, above it in matrix products."""
    if RANK <= MAX_FMA_RANK:
        back_project_fma(
            source_ptr, p_ptr, partial, matrix_ptr, col_block, first, last,
            RANK, BLOCK_ROWS, BLOCK_COLS, FEEDBACK, ALIGNED,
        )  # fmt: skip
    else:
        back_project_dot(
            source_ptr, p_ptr, partial, matrix_ptr, col_block, first, last,
            RANK, RANK_BLOCK, BLOCK_ROWS, BLOCK_COLS, FEEDBACK, PRECISION, ALIGNED,
        )  # fmt: skip


@triton.jit
def _back_project_kernel(
    source_ptr,
    p_ptr,
    partial_ptr,
    matrices_ptr,
    work_ptr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    SPLIT: tl.constexpr,
    FEEDBACK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute partial SHRINK · Q = SHRINK · Mᵀ P over some rows.

    source_ptr: `memory` with FEEDBACK, without it the bucket.
    p_ptr: the panels of P.
    partial_ptr: [programs, RANK, BLOCK_COLS].
    BLOCK_ROWS: PowerSGDWork's block_rows, divided by SPLIT.
    PRECISION: see dot_precision.
    Grid: one program per row of work_ptr (PowerSGDWork._back_project_work).
    Moves 4 B per matrix element in fp32, and 4 · RANK · BLOCK_COLS B of partial sums per program. P comes
    from the cache.
    """
    program = tl.program_id(0).to(tl.int64)
    matrix_ptr, col_block, first, last = work_of(program, matrices_ptr, work_ptr)
    partial = partial_ptr + program * (RANK * BLOCK_COLS)
    if FEEDBACK or is_16_byte_aligned(source_ptr, matrix_ptr, last.to(tl.int64) * (SPLIT * BLOCK_ROWS)):
        back_project_tiles(
            source_ptr, p_ptr, partial, matrix_ptr, col_block, first * SPLIT, last * SPLIT,
            RANK, RANK_BLOCK, BLOCK_ROWS, BLOCK_COLS, FEEDBACK, PRECISION, True,
        )  # fmt: skip
    else:
        back_project_tiles(
            source_ptr, p_ptr, partial, matrix_ptr, col_block, first * SPLIT, last * SPLIT,
            RANK, RANK_BLOCK, BLOCK_ROWS, BLOCK_COLS, FEEDBACK, PRECISION, False,
        )  # fmt: skip


def back_project(
    source: torch.Tensor | Slot,
    p: torch.Tensor,
    matrices: torch.Tensor,
    work: torch.Tensor,
    *,
    out: torch.Tensor,
    rank: int,
    block_rows: int,
    block_cols: int,
    feedback: bool,
) -> Launch:
    """Return the launch that projects every matrix of a bucket on its P.

    This is step 5 of PowerSGD (Vogels et al. 2019, algorithm 1).

    source: project's `memory`, which keeps M; without feedback the bucket's flat buffer.
    p: the orthonormal panels.
    matrices: int64, PowerSGDWork's matrix_table.
    work: int64, PowerSGDWork's back_project_work.
    out: [len(work), rank, block_cols], the partial sums of Q, in p's dtype.
    rank, block_rows, block_cols: PowerSGDWork's.
    feedback: whether source is `memory`.
    """
    is_dot = rank > MAX_FMA_RANK.value
    rows = min(block_rows, DOT_ROWS) if is_dot else block_rows
    is_plain_dot = is_dot and not feedback and block_cols == 64
    num_warps = PLAIN_DOT_WARPS if is_plain_dot else NUM_WARPS
    # Beyond rank 32, PLAIN_DOT_WARPS also take more registers than two programs leave (sm_120).
    num_programs = 1 if is_plain_dot and rank > 32 else PROGRAMS.get(rank, 2)
    return Launch(
        _back_project_kernel,
        len(work),
        source,
        p,
        out,
        matrices,
        work,
        RANK=rank,
        RANK_BLOCK=dot_rank_block(rank),
        BLOCK_ROWS=rows,
        BLOCK_COLS=block_cols,
        SPLIT=block_rows // rows,
        FEEDBACK=feedback,
        PRECISION=dot_precision(p.dtype),
        num_warps=num_warps,
        maxnreg=registers(num_warps, num_programs),
        enable_fp_fusion=True,
    )
