"""Columns of tables, and access to tiles, panels and wires: shared by PowerSGD's kernels.

work.py builds the tables (int64), and describes the layout of memory, panels and wires. Base addresses have
64 bits, offsets within a tile 32.

The programs that compute a block of P or Q store partial sums. The last one of them to finish adds these up,
in the order of their indices. So which one is last changes no bits, and no launch waits for another one.
On ROCm a second launch adds them up, to the same bits.
"""

from typing import Any

import triton
import triton.language as tl

from ...device import is_rocm
from ..launch import Launch
from ..tile import copy_tile, on_16_bytes, round_to
from . import work as powersgd_work


def _column(name: str) -> tl.constexpr:
    return tl.constexpr(powersgd_work.MATRIX_FIELDS.index(name))


# Columns of the table of matrices.
GRADIENT = _column("gradient")  # first element in the bucket
ROWS = _column("rows")  # n
COLS = _column("cols")  # m
MATRIX_RANK = _column("rank")  # r
NUMEL = _column("numel")  # elements in the bucket: fewer than n · m for a padded square view
MEMORY = _column("memory")  # first element in `memory`
MEMORY_COLS = _column("memory_cols")  # m padded to 16 B
P_PANEL = _column("p_panel")  # first element of P's panel
P_STRIDE = _column("p_stride")  # elements from one column of P's panel to the next
Q_PANEL = _column("q_panel")
Q_STRIDE = _column("q_stride")
RANDOM_PANEL = _column("random_panel")  # the random Q's panel: in Q's tensor, with Q's stride
P_WIRE = _column("p_wire")  # first element of P on the wire
Q_WIRE = _column("q_wire")
DRAW = _column("draw")  # added to the seed
FIRST_NORM = _column("first_norm")  # first row of Q's partial norms, one row per program
NUM_NORMS = _column("num_norms")
MATRIX_FIELDS = tl.constexpr(len(powersgd_work.MATRIX_FIELDS))
WORK_FIELDS = tl.constexpr(powersgd_work.WORK_FIELDS)
COPY_BLOCK = tl.constexpr(powersgd_work.COPY_BLOCK)

MAX_NORMS = tl.constexpr(powersgd_work.MAX_NORMS)
# Up to this rank products are FMAs, above it matrix products on tensor cores.
MAX_FMA_RANK = tl.constexpr(8)
MIN_BLOCK_ROWS = tl.constexpr(32)  # divides the blocks and the length of P's panels

# What a program does: the first column of its row of work.
COPY = tl.constexpr(powersgd_work.COPY)
NEXT_Q = tl.constexpr(powersgd_work.NEXT_Q)


@triton.constexpr_function
def dot_rank_block(rank):
    """Return how many of a factor's `rank` columns one pass over a matrix computes."""
    return rank if rank <= 32 else 16  # with 32, the loop over passes spills


@triton.jit
def tiles_of(work, matrices_ptr):
    """Return (matrix, block, first, last) from a program's row of work; see PowerSGDWork._walk.

    matrix: pointer to the matrix's row of matrix_table.
    block: in a row of _next_q_work, the index of the norms.
    """
    matrix_ptr = matrices_ptr + tl.load(work + 1) * MATRIX_FIELDS
    return matrix_ptr, tl.load(work + 2), tl.load(work + 3).to(tl.int32), tl.load(work + 4).to(tl.int32)


# P and Q are computed times SHRINK, so in matrices of up to 65,536 rows and columns no sum of finite products
# overflows. It is a power of two and changes no bits, except where a sum nears the smallest numbers. float16
# has few small numbers: a float16 wire holds P and Q without SHRINK.
SHRINK = tl.constexpr(2.0**-16)


@triton.jit
def is_16_byte_aligned(grad_ptr, matrix_ptr, end_row):
    """Return whether a matrix's rows start on 16 bytes in the bucket, and are complete before end_row.

    A square view may lack elements at its end. Only programs that reach its last rows use narrow accesses.
    """
    VECTOR: tl.constexpr = 128 // grad_ptr.dtype.element_ty.primitive_bitwidth
    cols = tl.load(matrix_ptr + COLS)
    address = (grad_ptr + tl.load(matrix_ptr + GRADIENT)).to(tl.uint64)
    exists = tl.load(matrix_ptr + NUMEL) >= cols * tl.minimum(tl.load(matrix_ptr + ROWS), end_row)
    return exists & (address % 16 == 0) & (cols % VECTOR == 0)


@triton.jit
def gradient_matrix(grad_ptr, matrix_ptr, ALIGNED: tl.constexpr):
    """Return a matrix in the bucket, for tile_at: (pointer, n, m, number of its elements in the bucket).

    ALIGNED: is_16_byte_aligned's result. Kernels branch on it around their loops: a branch around each access
        would make the compiler keep tiles in two layouts.

    Kernels call this and memory_matrix before their loops. Within a loop, the compiler would load the table's
    elements ahead, through shared memory.
    """
    start_ptr = grad_ptr + tl.load(matrix_ptr + GRADIENT)
    if ALIGNED:
        start_ptr = on_16_bytes(start_ptr)
    return start_ptr, tl.load(matrix_ptr + ROWS), tl.load(matrix_ptr + COLS), tl.load(matrix_ptr + NUMEL)


@triton.jit
def memory_matrix(memory_ptr, matrix_ptr, ALIGNED: tl.constexpr):
    """Return a matrix in `memory`, for tile_at: (pointer, n, length of its padded rows, their product)."""
    # If ALIGNED, COLS equals MEMORY_COLS. Loading COLS shows the compiler that the gradient's offsets serve.
    cols = tl.load(matrix_ptr + (COLS if ALIGNED else MEMORY_COLS))
    VECTOR: tl.constexpr = 128 // memory_ptr.dtype.element_ty.primitive_bitwidth
    start = tl.load(matrix_ptr + MEMORY) // VECTOR * VECTOR
    rows = tl.load(matrix_ptr + ROWS)
    return memory_ptr + start, rows, cols, rows * cols


@triton.jit
def tile_at(
    matrix, row_block, col_block, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return (pointers, mask) of a tile of a matrix.

    matrix: the result of gradient_matrix or memory_matrix.
    ALIGNED: whether all accesses are 128 bits wide: gradient_matrix's ALIGNED; always in `memory`.
    """
    start_ptr, rows, cols, numel = matrix
    VECTOR: tl.constexpr = 128 // start_ptr.dtype.element_ty.primitive_bitwidth
    start = cols * (row_block * BLOCK_ROWS) + col_block * BLOCK_COLS
    rows_left = (rows - row_block * BLOCK_ROWS).to(tl.int32)
    cols_left = (cols - col_block * BLOCK_COLS).to(tl.int32)
    stride = cols.to(tl.int32)
    if ALIGNED:
        start_ptr += start // VECTOR * VECTOR
        stride = stride // VECTOR * VECTOR
        cols_left = cols_left // VECTOR * VECTOR
    else:
        start_ptr += start
    offs_row = tl.arange(0, BLOCK_ROWS)[:, None]
    offs_col = tl.arange(0, BLOCK_COLS)[None, :]
    offs = offs_row * stride + offs_col
    mask = (offs_row < rows_left) & (offs_col < cols_left)
    if not ALIGNED:
        mask = mask & (offs < tl.minimum(numel - start, 2**31 - 1).to(tl.int32))
    return start_ptr + offs, mask


@triton.jit
def panel(panel_ptr, matrix_ptr, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    """Return (pointer to a factor's panel, its stride), both visible to the compiler as multiples of BLOCK.

    FACTOR: "P", "Q" or "random Q".
    """
    START: tl.constexpr = P_PANEL if FACTOR == "P" else (Q_PANEL if FACTOR == "Q" else RANDOM_PANEL)
    STRIDE: tl.constexpr = P_STRIDE if FACTOR == "P" else Q_STRIDE
    start = tl.load(matrix_ptr + START) // BLOCK * BLOCK
    stride = tl.load(matrix_ptr + STRIDE) // BLOCK * BLOCK
    return panel_ptr + start, stride


@triton.jit
def is_lost(p_ptr, matrix_ptr):
    """Return whether a matrix's P is NaN: some rank's gradients weren't finite. Then all of P is NaN.

    In such a step reconstruct takes the gradient off M again, and the next project doesn't subtract P Qᵀ.
    """
    first = tl.load(p_ptr + tl.load(matrix_ptr + P_PANEL))
    return first != first


@triton.jit
def factor_on_wire(wire_ptr, matrix_ptr, FACTOR: tl.constexpr):
    """Return (pointer to a factor on its wire, its stride, its rows, its columns); see work.py.

    The compiler sees that pointer and stride are multiples of 16 bytes.

    FACTOR: "P" or "Q".
    """
    LENGTH: tl.constexpr = ROWS if FACTOR == "P" else COLS
    START: tl.constexpr = P_WIRE if FACTOR == "P" else Q_WIRE
    VECTOR: tl.constexpr = 128 // wire_ptr.dtype.element_ty.primitive_bitwidth
    length = tl.load(matrix_ptr + LENGTH).to(tl.int32)
    stride = (length + (VECTOR - 1)) // VECTOR * VECTOR
    start = tl.load(matrix_ptr + START) // VECTOR * VECTOR
    return wire_ptr + start, stride, length, tl.load(matrix_ptr + MATRIX_RANK).to(tl.int32)


def launches_that_add_up(*arguments: Any, **constants: Any) -> list[Launch]:
    """Return the launches of a kernel with the constants STORES and ADDS: one, on ROCm two.

    STORES, ADDS: whether the launch stores partial sums, and whether it adds them up.
    arguments, constants: see Launch.

    On ROCm a program can't tell that it is a block's last one. The atomic addition is miscompiled there
    (gfx942, Triton 3.6 and 3.7): it waits neither for the write-back of its cache nor for the stores of the
    program's other waves, so partial sums might be read too early.
    """
    parts = [(True, False), (False, True)] if is_rocm() else [(True, True)]
    return [Launch(*arguments, STORES=stores, ADDS=adds, **constants) for stores, adds in parts]


@triton.jit
def is_adding(arrived_ptr, work, STORES: tl.constexpr):
    """Return whether this program adds up its block's partial sums.

    If STORES, it is the last of the block to have stored its partial sum and called this; else the first.

    arrived_ptr: [programs], int32. A block's programs count themselves at the place of the first one. The
        count is zero before a launch, and after it.
    work: the program's row, see PowerSGDWork._walk.
    """
    if STORES:
        # One thread counts. The barrier puts the other threads' stores before its release; atomic_add has a
        # barrier that puts their loads after its acquire.
        tl.debug_barrier()
        count_ptr = arrived_ptr + tl.load(work + 5)
        adds = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == tl.load(work + 6) - 1
        if adds:
            tl.store(count_ptr, 0)
    else:
        adds = tl.load(work + 5) == tl.program_id(0)
    return adds


@triton.jit
def add_up(
    partial_ptr, wire_ptr, matrix_ptr, work, scale, FACTOR: tl.constexpr, RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write scale · (sum of a block's partial sums, in the order of their indices) to the wire.

    partial_ptr: [programs, RANK, BLOCK], panels column after column, times SHRINK. A float16 wire gets the
        sums without SHRINK, any other wire with it.
    wire_ptr: see work.py. A column's last block also writes the zeros behind the column.
    work: the row of one of the block's programs.
    FACTOR: "P" or "Q".
    """
    ACC: tl.constexpr = partial_ptr.dtype.element_ty
    TYPE: tl.constexpr = wire_ptr.dtype.element_ty
    GROW: tl.constexpr = 1.0 / SHRINK if TYPE == tl.float16 else 1.0
    RANK_BLOCK: tl.constexpr = min(RANK, 32)
    factor = (tl.full((), GROW, tl.float64) * scale).to(ACC)
    wire, stride, length, r = factor_on_wire(wire_ptr, matrix_ptr, FACTOR)
    offs = tl.arange(0, BLOCK)[None, :]
    offs_row = tl.load(work + 2).to(tl.int32) * BLOCK + offs
    partial = partial_ptr + tl.load(work + 5) * (RANK * BLOCK) + offs
    wire += offs_row
    for rank_start in range(0, RANK, RANK_BLOCK):
        offs_rank = rank_start + tl.arange(0, RANK_BLOCK)[:, None]
        mask = (offs_row < stride) & (offs_rank < r)
        acc = tl.zeros((RANK_BLOCK, BLOCK), ACC)
        # Unrolled, so that four loads are under way at once.
        for i in tl.range(0, tl.load(work + 6).to(tl.int32), loop_unroll_factor=4):
            acc += tl.load(partial + i * (RANK * BLOCK) + offs_rank * BLOCK, mask=mask, other=0.0)
        # If P has NaN, sums beyond the last row may be NaN too.
        values = round_to(tl.where(offs_row < length, acc * factor, 0.0), TYPE)
        tl.store(wire + offs_rank * stride, values, mask=mask)


@triton.jit
def copy_to_wire(grad_ptr, wire_ptr, work, scale):
    """Write scale · gradient to the wire, and zeros behind it.

    work: the program's row, see PowerSGDWork._copies.
    """
    wire = wire_ptr + tl.load(work + 2)
    numel = tl.load(work + 3)
    copy_tile(grad_ptr + tl.load(work + 1), wire, numel, scale, COPY_BLOCK)
    VECTOR: tl.constexpr = 128 // wire_ptr.dtype.element_ty.primitive_bitwidth
    offs = tl.arange(0, VECTOR)
    zeros = tl.zeros((VECTOR,), wire_ptr.dtype.element_ty)
    tl.store(wire + numel + offs, zeros, mask=offs < tl.load(work + 4))
