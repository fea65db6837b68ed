"""Columns of tables, and access to tiles, panels and wires: shared by PowerSGD's kernels.

work.py builds the tables (int64), and describes the layout of memory, panels and wires. Base addresses have
64 bits, offsets within a tile 32.
"""

import triton
import triton.language as tl

from ..tile import on_16_bytes
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
FIRST_RANDOM = _column("first_random")  # number of elements in all earlier matrices' Q
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
    first = tl.load(work + 3).to(tl.int32)
    last = tl.load(work + 4).to(tl.int32)
    return matrix_ptr, tl.load(work + 2), first, last


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
        left = tl.minimum(numel - start, 2**31 - 1).to(tl.int32)
        mask = mask & (offs < left)
    return start_ptr + offs, mask


@triton.jit
def panel(panel_ptr, matrix_ptr, START: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return (pointer to a factor's panel, its stride), both visible to the compiler as multiples of BLOCK.

    START, STRIDE: columns of matrix_table.
    """
    start = tl.load(matrix_ptr + START) // BLOCK * BLOCK
    stride = tl.load(matrix_ptr + STRIDE) // BLOCK * BLOCK
    return panel_ptr + start, stride


@triton.jit
def factor_on_wire(wire_ptr, matrix_ptr, LENGTH: tl.constexpr, START: tl.constexpr):
    """Return (pointer to a factor on its wire, its stride, its rows, its columns); see work.py.

    The compiler sees that pointer and stride are multiples of 16 bytes.

    LENGTH, START: columns of matrix_table.
    """
    VECTOR: tl.constexpr = 128 // wire_ptr.dtype.element_ty.primitive_bitwidth
    length = tl.load(matrix_ptr + LENGTH).to(tl.int32)
    stride = (length + (VECTOR - 1)) // VECTOR * VECTOR
    start = tl.load(matrix_ptr + START) // VECTOR * VECTOR
    return wire_ptr + start, stride, length, tl.load(matrix_ptr + MATRIX_RANK).to(tl.int32)
