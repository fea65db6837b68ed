"""PowerSGD's first pass over a bucket: add the error to every matrix, keep the sum, and project it on Q.

The error is made finite, rounded, and shortened where float16 needs it.
"""

import torch
import triton
import triton.language as tl

from ...device import dot_precision
from ..launch import Launch, Slot, registers
from ..tile import round_to
from .bucket import SCALE, PowerSGDBucket
from .random import direction
from .tile import (
    COPY,
    MAX_FMA_RANK,
    Q_STRIDE,
    SHRINK,
    WORK_FIELDS,
    add_up,
    copy_to_wire,
    dot_rank_block,
    gradient_matrix,
    is_16_byte_aligned,
    is_adding,
    is_lost,
    launches_that_add_up,
    memory_matrix,
    panel,
    tile_at,
    tiles_of,
)

# The largest norm of a row or a column of a float16 error: its sum with the next gradients fits float16.
LIMIT_FLOAT16 = tl.constexpr(0.75 * 65504)
# Halfway between the largest number and the next one: from here on, rounding gives infinity.
INFINITE_FLOAT16, INFINITE_BFLOAT16 = tl.constexpr(65520.0), tl.constexpr((2 - 2**-8) * 2.0**127)


@triton.jit
def shortening(squares, length, BLOCK: tl.constexpr):
    """Return the factor for each row (or column) of a tile of a float16 matrix.

    squares: the squared norms of the tile's rows.
    length: the length of the matrix's rows.
    BLOCK: the length of the tile's rows.

    LIMIT_FLOAT16² is divided equally among the tiles of a row. A row above its limit is scaled to a third of
    the limit, so it isn't too long again in the next step.
    """
    limit = tl.div_rn(LIMIT_FLOAT16 * LIMIT_FLOAT16, tl.cdiv(length, BLOCK).to(tl.float32))
    return tl.where(squares > limit, tl.sqrt_rn(tl.div_rn(limit, tl.maximum(9 * squares, limit))), 1.0)


@triton.jit
def fit_float16(error, rows, cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Return a tile of the error, shortened where the factors of a float16 matrix might overflow float16.

    With orthonormal Q and P, no element of M Q or Mᵀ P exceeds the norm of M's longest row or column.

    rows, cols: the shape of M.
    """
    # If a row or column full of the largest element would fit, none is too long.
    largest = tl.max(tl.abs(error))
    longest = tl.maximum(rows + BLOCK_ROWS, cols + BLOCK_COLS).to(tl.float32)
    if largest * largest * longest > LIMIT_FLOAT16 * LIMIT_FLOAT16:
        by_row = shortening(tl.sum(error * error, axis=1), cols, BLOCK_COLS)
        by_col = shortening(tl.sum(error * error, axis=0), rows, BLOCK_ROWS)
        error *= tl.minimum(by_row[:, None], by_col[None, :])
    return error


@triton.jit
def add_error(
    gradient, exists, memory_ptrs, memory_mask, approximation, has_average, rows, cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Store M = gradient + (M_prev − P_prev Q_prevᵀ) over M_prev. Return M, in the bucket's dtype.

    gradient: in the dtype of the arithmetic.
    exists: the mask of elements that are in the bucket.
    memory_ptrs, memory_mask: tile_at's result, for M_prev.
    approximation: P_prev Q_prevᵀ. It is rounded as the last step's output was, so that the error includes the
        output's rounding.
    has_average: False if M_prev is the error already, see is_lost.
    rows, cols: the shape of M.

    The error counts as zero outside the matrix, and where the error or M isn't finite in the bucket's dtype.
    Where the gradient isn't finite, the error is stored instead of M. This is how PowerSGD recovers from inf
    and NaN.
    """
    TYPE: tl.constexpr = memory_ptrs.dtype.element_ty
    # From this number on, rounding to TYPE gives infinity.
    INFINITE: tl.constexpr = (
        INFINITE_FLOAT16
        if TYPE == tl.float16
        else (INFINITE_BFLOAT16 if TYPE == tl.bfloat16 else float("inf"))
    )
    previous = tl.load(memory_ptrs, mask=memory_mask, other=0.0).to(gradient.dtype)
    error = previous - tl.where(has_average, round_to(approximation, TYPE).to(gradient.dtype), 0.0)
    error = tl.where(exists & (tl.abs(error) < INFINITE), error, 0.0)
    if TYPE == tl.float16:
        error = fit_float16(error, rows, cols, BLOCK_ROWS, BLOCK_COLS)
    total = gradient + error
    matrix = round_to(tl.where(tl.abs(total) < INFINITE, total, gradient), TYPE)
    kept = tl.where(tl.abs(gradient) < float("inf"), matrix, round_to(error, TYPE))
    tl.store(memory_ptrs, kept, mask=memory_mask)
    return matrix


@triton.jit
def project_fma(
    grad_ptr, memory_ptr, p_ptr, q_ptr, q_hat, factor, partial, matrix_ptr, row_block, first, last,
    RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    FEEDBACK: tl.constexpr, RELOADED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute one program's partial P in FMAs; see _project_kernel.

    q_hat, factor: pointers to the unscaled columns of Q̂, and the factors that scale them.
    partial: pointer to the program's partial P.
    row_block, first, last: the row block, the first column block and one past the last.
    """
    COMPUTE: tl.constexpr = p_ptr.dtype.element_ty
    FOLD: tl.constexpr = 128 // grad_ptr.dtype.element_ty.primitive_bitwidth
    offs_row = tl.arange(0, BLOCK_ROWS)
    offs_col = tl.arange(0, BLOCK_COLS)
    p_panel, p_stride = panel(p_ptr, matrix_ptr, "P", BLOCK_ROWS)
    q_panel, q_stride = panel(q_ptr, matrix_ptr, "Q", BLOCK_COLS)
    bucket = gradient_matrix(grad_ptr, matrix_ptr, ALIGNED)
    if FEEDBACK:
        memory = memory_matrix(memory_ptr, matrix_ptr, ALIGNED)
        has_average = not is_lost(p_ptr, matrix_ptr)

    acc = ()
    for _ in tl.static_range(RANK):
        # Sums over neighboring columns stay within a thread. Sums over threads wait for the end.
        acc = acc + (tl.zeros((BLOCK_ROWS, BLOCK_COLS // FOLD), COMPUTE),)
    for col_block in range(first, last):
        if RELOADED:
            bucket = gradient_matrix(grad_ptr, matrix_ptr, ALIGNED)
            if FEEDBACK:
                memory = memory_matrix(memory_ptr, matrix_ptr, ALIGNED)
        grad_ptrs, exists = tile_at(bucket, row_block, col_block, BLOCK_ROWS, BLOCK_COLS, ALIGNED)
        matrix = tl.load(grad_ptrs, mask=exists, other=0.0).to(COMPUTE)
        offs_q = col_block * BLOCK_COLS + offs_col
        if FEEDBACK:
            memory_ptrs, mask = tile_at(memory, row_block, col_block, BLOCK_ROWS, BLOCK_COLS, True)
            approximation = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)
            for j in tl.static_range(RANK):
                p = tl.load(p_panel + j * p_stride + row_block * BLOCK_ROWS + offs_row) * (1.0 / SHRINK)
                q = tl.load(q_panel + j * q_stride + offs_q)
                approximation += p[:, None] * q[None, :]
            matrix = add_error(
                matrix, exists, memory_ptrs, mask, approximation, has_average, bucket[1], bucket[2],
                BLOCK_ROWS, BLOCK_COLS,
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
    RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FEEDBACK: tl.constexpr,
    RELOADED: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute one program's partial P in matrix products; see project_fma for the arguments.

    M is read once for each dot_rank_block columns of P.
    """
    COMPUTE: tl.constexpr = p_ptr.dtype.element_ty
    RANK_BLOCK: tl.constexpr = dot_rank_block(RANK)
    offs_row, offs_col = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLS)
    offs_rank = tl.arange(0, RANK_BLOCK)
    p_panel, p_stride = panel(p_ptr, matrix_ptr, "P", BLOCK_ROWS)
    q_panel, q_stride = panel(q_ptr, matrix_ptr, "Q", BLOCK_COLS)
    p_panel += row_block * BLOCK_ROWS
    bucket = gradient_matrix(grad_ptr, matrix_ptr, ALIGNED)
    if FEEDBACK:
        memory = memory_matrix(memory_ptr, matrix_ptr, ALIGNED)
        has_average = not is_lost(p_ptr, matrix_ptr)

    for rank_start in range(0, RANK, RANK_BLOCK):
        if FEEDBACK and rank_start > 0:
            tl.debug_barrier()  # wait for other threads' stores of M
        start, factor = direction(
            q_ptr, norms_ptr, matrix_ptr, rank_start + offs_rank, RANK, BLOCK_COLS, UNIT
        )
        q_hat = q_ptr + (start // BLOCK_COLS * BLOCK_COLS + (rank_start + offs_rank) * q_stride)
        factor = factor.to(COMPUTE)
        acc = tl.zeros((BLOCK_ROWS, RANK_BLOCK), COMPUTE)
        for col_block in range(first, last):
            offs_q = col_block * BLOCK_COLS + offs_col
            if RELOADED:
                bucket = gradient_matrix(grad_ptr, matrix_ptr, ALIGNED)
                if FEEDBACK:
                    memory = memory_matrix(memory_ptr, matrix_ptr, ALIGNED)
            if FEEDBACK:
                memory_ptrs, mask = tile_at(memory, row_block, col_block, BLOCK_ROWS, BLOCK_COLS, True)
                if rank_start == 0:
                    grad_ptrs, exists = tile_at(bucket, row_block, col_block, BLOCK_ROWS, BLOCK_COLS, ALIGNED)
                    gradient = tl.load(grad_ptrs, mask=exists, other=0.0)
                    approximation = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)
                    for k in range(0, RANK, RANK_BLOCK):
                        p = tl.load(p_panel + (k + offs_rank)[None, :] * p_stride + offs_row[:, None])
                        q = tl.load(q_panel + (k + offs_rank)[:, None] * q_stride + offs_q[None, :])
                        approximation = tl.dot(
                            p, q, approximation, input_precision=PRECISION, out_dtype=COMPUTE
                        )
                    matrix = add_error(
                        gradient.to(COMPUTE), exists, memory_ptrs, mask, approximation * (1.0 / SHRINK),
                        has_average, bucket[1], bucket[2], BLOCK_ROWS, BLOCK_COLS,
                    )  # fmt: skip
                else:
                    matrix = tl.load(memory_ptrs, mask=mask, other=0.0)
            else:
                grad_ptrs, exists = tile_at(bucket, row_block, col_block, BLOCK_ROWS, BLOCK_COLS, ALIGNED)
                matrix = tl.load(grad_ptrs, mask=exists, other=0.0)
            q = tl.load(q_hat[None, :] + offs_q[:, None]) * factor[None, :]
            acc = tl.dot(matrix.to(COMPUTE), q, acc, input_precision=PRECISION, out_dtype=COMPUTE)
        offs_partial = (rank_start + offs_rank)[None, :] * BLOCK_ROWS + offs_row[:, None]
        tl.store(partial + offs_partial, acc)


@triton.jit
def _project_kernel(
    grad_ptr, memory_ptr, p_ptr, q_ptr, norms_ptr, partial_ptr, arrived_ptr, wire_ptr, matrices_ptr, work_ptr,
    scale: tl.float64,
    RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FEEDBACK: tl.constexpr,
    RELOADED: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    STORES: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Compute M = gradient + (M_prev − P_prev Q_prevᵀ), and SHRINK · scale · P = SHRINK · scale · M Q̂.

    Q̂ has the scaled columns of Q_prev, see direction. Uncompressed tensors are copied to the wire behind P.

    grad_ptr: the bucket.
    memory_ptr: M_prev, replaced by M. Without FEEDBACK it isn't touched, and M is the gradient.
    p_ptr, q_ptr: the panels of P_prev and of SHRINK · Q_prev.
    norms_ptr: the squared lengths of Q_prev's columns, see PowerSGDBucket.
    partial_ptr: [programs, RANK, BLOCK_ROWS], partial sums of P over some columns of M.
    arrived_ptr: see is_adding.
    wire_ptr: see add_up.
    scale: 1 / world size. It makes the all-reduced sum the average, and never overflows 16 bits needlessly.
    RELOADED: load the matrix's row of the table again for each tile, see launch_options.
    UNIT: scale columns of Q to length 1, rather than by a power of two. Needed where P's length matters.
    PRECISION: see dot_precision.
    STORES, ADDS: see launches_that_add_up.
    Grid: one program per row of work_ptr: tiles (PowerSGDWork._walk), or a copy (_copies).
    Moves 12 B per matrix element in fp32 (4 B without FEEDBACK), and 8 · RANK · BLOCK_ROWS B of partial sums
    per program. P and Q come from the cache, and so do most partial sums when they are added up.
    """
    program = tl.program_id(0).to(tl.int64)
    work = work_ptr + program * WORK_FIELDS
    if tl.load(work) == COPY:
        if STORES:
            copy_to_wire(grad_ptr, wire_ptr, work, scale)
    else:
        matrix_ptr, row_block, first, last = tiles_of(work, matrices_ptr)
        if STORES:
            partial = partial_ptr + program * (RANK * BLOCK_ROWS)
            q_hat = ()
            factor = ()
            if RANK <= MAX_FMA_RANK:
                # Computed before the branch: within it, the pointers and factors would take more registers.
                stride = tl.load(matrix_ptr + Q_STRIDE) // BLOCK_COLS * BLOCK_COLS
                for j in tl.static_range(RANK):
                    column = tl.full((1,), j, tl.int32)
                    start, length = direction(q_ptr, norms_ptr, matrix_ptr, column, RANK, BLOCK_COLS, UNIT)
                    q_hat = q_hat + (q_ptr + tl.sum(start, axis=0) // BLOCK_COLS * BLOCK_COLS + j * stride,)
                    factor = factor + (tl.sum(length, axis=0).to(p_ptr.dtype.element_ty),)
            is_aligned = is_16_byte_aligned(grad_ptr, matrix_ptr, (row_block + 1) * BLOCK_ROWS)
            for ALIGNED in tl.static_range(2):
                if is_aligned == ALIGNED:
                    if RANK <= MAX_FMA_RANK:
                        project_fma(
                            grad_ptr, memory_ptr, p_ptr, q_ptr, q_hat, factor, partial, matrix_ptr,
                            row_block, first, last,
                            RANK, BLOCK_ROWS, BLOCK_COLS, FEEDBACK, RELOADED, ALIGNED,
                        )  # fmt: skip
                    else:
                        project_dot(
                            grad_ptr, memory_ptr, p_ptr, q_ptr, norms_ptr, partial, matrix_ptr,
                            row_block, first, last,
                            RANK, BLOCK_ROWS, BLOCK_COLS, FEEDBACK, RELOADED, UNIT, PRECISION, ALIGNED,
                        )  # fmt: skip
        if ADDS and is_adding(arrived_ptr, work, STORES):
            add_up(partial_ptr, wire_ptr, matrix_ptr, work, scale, "P", RANK, BLOCK_ROWS)


def launch_options(rank: int, dtype: torch.dtype) -> dict[str, int]:
    """Return how _project_kernel is compiled. rank: padded."""
    # In float16 shortening the error takes registers, and in fp64 so does everything: there a matrix's row of
    # the table is loaded again for each tile, through shared memory. Elsewhere it is loaded once, which takes
    # more registers.
    is_reloaded = dtype in (torch.float16, torch.float64)
    # In matrix products a tile's rows keep 4 warps busy: more warps would repeat the same products. But in
    # fp64 from rank 32 on the registers of 4 warps don't suffice.
    is_large = dtype == torch.float64 and rank >= 32
    num_warps = 8 if rank <= 4 or is_large else 4
    # Three programs fit a multiprocessor if registers are left: none are for fp16, nor at rank 2 on sm_100.
    num_programs = 3 if rank == 1 and dtype in (torch.float32, torch.bfloat16) else 1 if is_large else 2
    # Matrix products take tiles that were loaded one step ahead, through shared memory; a table's elements
    # that are loaded again, another step ahead. In fp64, loading ahead takes more registers than there are.
    # In fp16 beyond rank 32, loading the table's elements ahead does (sm_86, Triton 3.9).
    num_stages = 3
    if rank > MAX_FMA_RANK.value:
        num_stages = 1 if dtype == torch.float64 else 3 if is_reloaded and rank <= 32 else 2
    return {
        "RELOADED": is_reloaded,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "maxnreg": registers(num_warps, num_programs),
    }


def project(bucket: PowerSGDBucket) -> list[Launch]:
    """Return the launches that fill p_wire: one, on ROCm two. Slots: buffer, scale.

    These are steps 1 and 2 of PowerSGD (Vogels et al. 2019, algorithm 1).
    """
    work, dtype = bucket.work, bucket.dtype
    block_rows, block_cols = work.tiles["project"]
    return launches_that_add_up(
        _project_kernel, len(work.project_work), Slot("buffer", dtype), bucket.memory, bucket.p, bucket.q,
        bucket.norms, bucket.partial, bucket.arrived, bucket.p_wire, bucket.matrices,
        bucket.tables["project"], SCALE,
        RANK=work.rank, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, FEEDBACK=bucket.error_feedback,
        UNIT=bucket.has_epsilon, PRECISION=dot_precision(bucket.p.dtype), enable_fp_fusion=True,
        **launch_options(work.rank, dtype),
    )  # fmt: skip
