"""PowerSGD's last pass over a bucket: write P Qᵀ, unpack the averages, and keep Q for the next step."""

import triton
import triton.language as tl

from ...device import dot_precision
from ..launch import Launch, Slot, registers
from ..tile import copy_tile, round_to
from .bucket import SEED, PowerSGDBucket
from .random import randomize
from .tile import (
    COPY,
    COPY_BLOCK,
    MAX_FMA_RANK,
    NEXT_Q,
    SHRINK,
    WORK_FIELDS,
    dot_rank_block,
    factor_on_wire,
    gradient_matrix,
    is_16_byte_aligned,
    is_lost,
    memory_matrix,
    panel,
    tile_at,
    tiles_of,
)
from .work import factor_tile

NUM_WARPS = 4
# Programs on a multiprocessor by padded rank: as many as their registers allow.
PROGRAMS = {1: 5, 2: 5, 4: 4, 8: 3}


@triton.jit
def next_q(
    wire_ptr, q_ptr, norms_ptr, matrix_ptr, norm, first, last, RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WARM_START: tl.constexpr,
):  # fmt: skip
    """Copy blocks first .. last of the averaged SHRINK · Q to its panel; store squared lengths of columns.

    norm: the row of norms_ptr that gets the squared lengths over these blocks. Without WARM_START it gets
        zeros, which make project take the random Q.
    ROWS: rows of Q at a time, enough for every access to be 128 bits wide.
    """
    q_panel, stride = panel(q_ptr, matrix_ptr, "Q", BLOCK)
    source_ptr, m, _, r = factor_on_wire(wire_ptr, matrix_ptr, "Q")
    for rank_start in range(0, RANK, RANK_BLOCK):
        offs_rank = rank_start + tl.arange(0, RANK_BLOCK)
        squares = tl.zeros((RANK_BLOCK, ROWS), tl.float64)
        for first_row in range(first * BLOCK, last * BLOCK, ROWS):
            offs_row = (first_row + tl.arange(0, ROWS))[None, :]
            mask = (offs_row < tl.minimum(m, last * BLOCK)) & (offs_rank < r)[:, None]
            value = tl.load(source_ptr + offs_rank[:, None] * m + offs_row, mask=mask, other=0.0)
            value = value.to(q_ptr.dtype.element_ty)
            if wire_ptr.dtype.element_ty == tl.float16:
                value *= SHRINK
            tl.store(q_panel + offs_rank[:, None] * stride + offs_row, value, mask=offs_row < last * BLOCK)
            squares += value.to(tl.float64) * value.to(tl.float64)
        squared = tl.sum(squares, axis=1)
        if not WARM_START:
            squared = tl.zeros((RANK_BLOCK,), tl.float64)
        tl.store(norms_ptr + norm * RANK + offs_rank, squared)


@triton.jit
def reconstruct_tiles(
    grad_ptr, q_wire_ptr, p_ptr, matrix_ptr, col_block, first, last,
    RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute gradient = P Qᵀ for row blocks first .. last of one block of columns."""
    COMPUTE: tl.constexpr = p_ptr.dtype.element_ty
    RANK_BLOCK: tl.constexpr = dot_rank_block(RANK)
    GROW: tl.constexpr = 1.0 if q_wire_ptr.dtype.element_ty == tl.float16 else 1.0 / SHRINK
    # m with padding: beyond Q's last row the wire holds zeros.
    q_panel, m, _, r = factor_on_wire(q_wire_ptr, matrix_ptr, "Q")
    p_panel, p_stride = panel(p_ptr, matrix_ptr, "P", BLOCK_ROWS)
    bucket = gradient_matrix(grad_ptr, matrix_ptr, ALIGNED)
    offs_row = tl.arange(0, BLOCK_ROWS)
    offs_col = col_block.to(tl.int32) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    if RANK <= MAX_FMA_RANK:
        q = ()
        for j in tl.static_range(RANK):
            exists = offs_col < tl.where(r > j, m, 0)
            q = q + (tl.load(q_panel + j * m + offs_col, mask=exists, other=0.0).to(COMPUTE),)
    for row_block in range(first, last):
        p_rows = p_panel + row_block * BLOCK_ROWS
        tile = tl.zeros((BLOCK_ROWS, BLOCK_COLS), COMPUTE)
        if RANK <= MAX_FMA_RANK:
            for j in tl.static_range(RANK):
                p = tl.load(p_rows + j * p_stride + offs_row) * GROW
                tile += p[:, None] * q[j][None, :]
        else:
            for rank_start in range(0, RANK, RANK_BLOCK):
                offs_rank = rank_start + tl.arange(0, RANK_BLOCK)
                p = tl.load(p_rows + offs_rank[None, :] * p_stride + offs_row[:, None])
                mask = (offs_rank < r)[:, None] & (offs_col < m)[None, :]
                offs_q = offs_rank[:, None] * m + offs_col[None, :]
                columns = tl.load(q_panel + offs_q, mask=mask, other=0.0).to(COMPUTE)
                tile = tl.dot(p, columns, tile, input_precision=PRECISION, out_dtype=COMPUTE)
            tile *= GROW
            # Loaded here: known before the loop, offsets would take registers throughout.
            bucket = gradient_matrix(grad_ptr, matrix_ptr, ALIGNED)
        ptrs, mask = tile_at(bucket, row_block, col_block, BLOCK_ROWS, BLOCK_COLS, ALIGNED)
        tl.store(ptrs, round_to(tile, grad_ptr.dtype.element_ty), mask=mask)


@triton.jit
def take_gradient_off(
    grad_ptr, memory_ptr, matrix_ptr, col_block, first, last,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Compute error = M − gradient, in place of M, where project has stored M; up to rounding."""
    TYPE: tl.constexpr = grad_ptr.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if TYPE == tl.float64 else tl.float32
    bucket = gradient_matrix(grad_ptr, matrix_ptr, False)
    memory = memory_matrix(memory_ptr, matrix_ptr, False)
    for row_block in range(first, last):
        ptrs, mask = tile_at(bucket, row_block, col_block, BLOCK_ROWS, BLOCK_COLS, False)
        memory_ptrs, _ = tile_at(memory, row_block, col_block, BLOCK_ROWS, BLOCK_COLS, True)
        gradient = tl.load(ptrs, mask=mask, other=0.0).to(WIDE)
        error = tl.load(memory_ptrs, mask=mask, other=0.0).to(WIDE) - gradient
        tl.store(memory_ptrs, round_to(error, TYPE), mask=mask & (tl.abs(gradient) < float("inf")))
    tl.debug_barrier()  # before other threads overwrite the gradient


@triton.jit(do_not_specialize=["seed"])
def _reconstruct_kernel(
    grad_ptr, memory_ptr, p_wire_ptr, q_wire_ptr, p_ptr, q_ptr, norms_ptr, matrices_ptr, work_ptr,
    seed: tl.int64,
    RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, NEXT_BLOCK: tl.constexpr,
    NEXT_ROWS: tl.constexpr, NEXT_COLS: tl.constexpr, WARM_START: tl.constexpr, FEEDBACK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write P Qᵀ and the uncompressed averages to the bucket; keep Q and its lengths for the next step.

    grad_ptr: the bucket.
    memory_ptr: M. Written only with FEEDBACK, for matrices that are lost; see is_lost.
    p_wire_ptr: the uncompressed averages are at its end.
    q_wire_ptr: the averaged Q, column after column.
    p_ptr: orthonormal panels.
    q_ptr, norms_ptr: written, see PowerSGDBucket. Without WARM_START there is a new random Q.
    work_ptr: PowerSGDWork's reconstruct_work: rows of _next_q_work, _copies and _walk.
    NEXT_BLOCK: rows of a block of Q's panel.
    PRECISION: see dot_precision.
    Grid: one program per row of work_ptr.
    Writes 4 B per matrix element in fp32, plus the factors.
    """
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    work_type = tl.load(work)
    if work_type == COPY:
        source_ptr = p_wire_ptr + tl.load(work + 2)
        copy_tile(source_ptr, grad_ptr + tl.load(work + 1), tl.load(work + 3), 1.0, COPY_BLOCK)
    else:
        matrix_ptr, block, first, last = tiles_of(work, matrices_ptr)
        if work_type == NEXT_Q:
            next_q(
                q_wire_ptr, q_ptr, norms_ptr, matrix_ptr, block, first, last,
                RANK, NEXT_COLS, NEXT_ROWS, NEXT_BLOCK, WARM_START,
            )  # fmt: skip
            if not WARM_START:
                randomize(q_ptr, matrix_ptr, first, last, seed, RANK, NEXT_BLOCK)
        else:
            if FEEDBACK and is_lost(p_ptr, matrix_ptr):
                take_gradient_off(
                    grad_ptr, memory_ptr, matrix_ptr, block, first, last, BLOCK_ROWS, BLOCK_COLS
                )
            is_aligned = is_16_byte_aligned(grad_ptr, matrix_ptr, last.to(tl.int64) * BLOCK_ROWS)
            for ALIGNED in tl.static_range(2):
                if is_aligned == ALIGNED:
                    reconstruct_tiles(
                        grad_ptr, q_wire_ptr, p_ptr, matrix_ptr, block, first, last,
                        RANK, BLOCK_ROWS, BLOCK_COLS, PRECISION, ALIGNED,
                    )  # fmt: skip


def reconstruct(bucket: PowerSGDBucket) -> Launch:
    """Return the launch of _reconstruct_kernel: it writes the bucket and keeps Q. Slots: buffer, seed.

    This is step 7 of PowerSGD (Vogels et al. 2019, algorithm 1).
    """
    work = bucket.work
    next_rows, next_cols = factor_tile(work.rank, work.block_cols, bucket.q.itemsize)
    block_cols, block_rows = work.tiles["reconstruct"]
    return Launch(
        _reconstruct_kernel, len(work.reconstruct_work), Slot("buffer", bucket.dtype), bucket.memory,
        bucket.p_wire, bucket.q_wire, bucket.p, bucket.q, bucket.norms, bucket.matrices,
        bucket.tables["reconstruct"], SEED,
        RANK=work.rank, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, NEXT_BLOCK=work.block_cols,
        NEXT_ROWS=next_rows, NEXT_COLS=next_cols, WARM_START=bucket.warm_start,
        FEEDBACK=bucket.error_feedback, PRECISION=dot_precision(bucket.p.dtype), num_warps=NUM_WARPS,
        maxnreg=registers(NUM_WARPS, PROGRAMS.get(work.rank, 2)), enable_fp_fusion=True,
    )  # fmt: skip
