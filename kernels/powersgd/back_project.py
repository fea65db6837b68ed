"""PowerSGD's second pass over a bucket: project every matrix on its orthonormal P."""

import triton
import triton.language as tl

from ...device import dot_precision
from ..launch import Launch, Slot, registers
from .bucket import SCALE, PowerSGDBucket
from .tile import (
    MAX_FMA_RANK,
    SHRINK,
    WORK_FIELDS,
    add_up,
    dot_rank_block,
    gradient_matrix,
    is_16_byte_aligned,
    is_adding,
    launches_that_add_up,
    memory_matrix,
    panel,
    tile_at,
    tiles_of,
)

NUM_WARPS = 4
# Programs on a multiprocessor by padded rank: as many as their registers allow.
PROGRAMS = {1: 4, 2: 4, 4: 4, 8: 3}


@triton.jit
def back_project_tiles(
    source_ptr, p_ptr, partial, matrix_ptr, col_block, first, last,
    RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    FEEDBACK: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute one program's partial Q: in FMAs up to MAX_FMA_RANK, otherwise in matrix products.

    For products M is read once for each dot_rank_block columns of Q.

    partial: pointer to the program's partial Q.
    col_block, first, last: the column block, the first row block and one past the last.
    For the other arguments see _back_project_kernel.
    """
    COMPUTE: tl.constexpr = p_ptr.dtype.element_ty
    RANK_BLOCK: tl.constexpr = dot_rank_block(RANK)
    # The rows of a tile that 128 threads hold with 16 bytes each.
    ROWS_AT_ONCE: tl.constexpr = 128 * (128 // source_ptr.dtype.element_ty.primitive_bitwidth) // BLOCK_COLS
    FOLD: tl.constexpr = BLOCK_ROWS // ROWS_AT_ONCE
    offs_row = tl.arange(0, BLOCK_ROWS)
    offs_col = tl.arange(0, BLOCK_COLS)
    p_panel, p_stride = panel(p_ptr, matrix_ptr, "P", BLOCK_ROWS)
    if FEEDBACK:
        source = memory_matrix(source_ptr, matrix_ptr, False)
    else:
        source = gradient_matrix(source_ptr, matrix_ptr, ALIGNED)
    if RANK <= MAX_FMA_RANK:
        acc = ()
        for _ in tl.static_range(RANK):
            # Sums over a thread's rows stay within the thread. Sums over threads wait for the end.
            acc = acc + (tl.zeros((ROWS_AT_ONCE, BLOCK_COLS), COMPUTE),)
        for row_block in tl.range(first, last, loop_unroll_factor=2):
            ptrs, mask = tile_at(source, row_block, col_block, BLOCK_ROWS, BLOCK_COLS, ALIGNED)
            matrix = tl.load(ptrs, mask=mask, other=0.0).to(COMPUTE)
            new = ()
            for j in tl.static_range(RANK):
                p = tl.load(p_panel + j * p_stride + row_block * BLOCK_ROWS + offs_row) * SHRINK
                products = tl.reshape(matrix * p[:, None], (FOLD, ROWS_AT_ONCE, BLOCK_COLS))
                new = new + (acc[j] + tl.sum(products, axis=0),)
            acc = new
        for j in tl.static_range(RANK):
            tl.store(partial + j * BLOCK_COLS + offs_col, tl.sum(acc[j], axis=0))
    else:
        for rank_start in range(0, RANK, RANK_BLOCK):
            offs_rank = rank_start + tl.arange(0, RANK_BLOCK)
            total = tl.zeros((RANK_BLOCK, BLOCK_COLS), COMPUTE)
            for row_block in range(first, last):
                ptrs, mask = tile_at(source, row_block, col_block, BLOCK_ROWS, BLOCK_COLS, ALIGNED)
                matrix = tl.load(ptrs, mask=mask, other=0.0).to(COMPUTE)
                offs_p = offs_rank[:, None] * p_stride + (row_block * BLOCK_ROWS + offs_row)[None, :]
                p = tl.load(p_panel + offs_p) * SHRINK
                # Compute Qᵀ, not Q: a transposed M would be copied to shared memory 32 bits at a time.
                total = tl.dot(p, matrix, total, input_precision=PRECISION, out_dtype=COMPUTE)
            tl.store(partial + offs_rank[:, None] * BLOCK_COLS + offs_col[None, :], total)


@triton.jit
def _back_project_kernel(
    source_ptr, p_ptr, partial_ptr, arrived_ptr, wire_ptr, matrices_ptr, work_ptr, scale: tl.float64,
    RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FEEDBACK: tl.constexpr,
    PRECISION: tl.constexpr, STORES: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Compute SHRINK · scale · Q = SHRINK · scale · Mᵀ P.

    source_ptr: `memory` with FEEDBACK, without it the bucket.
    p_ptr: the panels of P, orthonormal.
    partial_ptr: [programs, RANK, BLOCK_COLS], partial sums of Q over some rows of M.
    arrived_ptr, wire_ptr, scale, PRECISION, STORES, ADDS: see _project_kernel.
    Grid: one program per row of work_ptr (PowerSGDWork._walk).
    Moves 4 B per matrix element in fp32, and 8 · RANK · BLOCK_COLS B of partial sums per program. P comes
    from the cache, and so do most partial sums when they are added up.
    """
    program = tl.program_id(0).to(tl.int64)
    work = work_ptr + program * WORK_FIELDS
    matrix_ptr, col_block, first, last = tiles_of(work, matrices_ptr)
    partial = partial_ptr + program * (RANK * BLOCK_COLS)
    is_aligned = FEEDBACK or is_16_byte_aligned(source_ptr, matrix_ptr, last.to(tl.int64) * BLOCK_ROWS)
    for ALIGNED in tl.static_range(2):
        if STORES and is_aligned == ALIGNED:
            back_project_tiles(
                source_ptr, p_ptr, partial, matrix_ptr, col_block, first, last,
                RANK, BLOCK_ROWS, BLOCK_COLS, FEEDBACK, PRECISION, ALIGNED,
            )  # fmt: skip
    if ADDS and is_adding(arrived_ptr, work, STORES):
        add_up(partial_ptr, wire_ptr, matrix_ptr, work, scale, "Q", RANK, BLOCK_COLS)


def back_project(bucket: PowerSGDBucket) -> list[Launch]:
    """Return the launches that fill q_wire: one, on ROCm two. Slots: scale; without feedback, buffer.

    This is step 5 of PowerSGD (Vogels et al. 2019, algorithm 1).
    """
    work, feedback = bucket.work, bucket.error_feedback
    block_cols, block_rows = work.tiles["back_project"]
    return launches_that_add_up(
        _back_project_kernel, len(work.back_project_work),
        bucket.memory if feedback else Slot("buffer", bucket.dtype), bucket.p, bucket.partial, bucket.arrived,
        bucket.q_wire, bucket.matrices, bucket.tables["back_project"], SCALE,
        RANK=work.rank, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, FEEDBACK=feedback,
        PRECISION=dot_precision(bucket.p.dtype), num_warps=NUM_WARPS,
        maxnreg=registers(NUM_WARPS, PROGRAMS.get(work.rank, 2)), enable_fp_fusion=True,
    )  # fmt: skip
