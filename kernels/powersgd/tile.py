"""Columns of tables, and access to tiles, panels and wires: shared by PowerSGD's kernels.

work.py builds the tables (int64), and describes the layout of memory, panels and wires. Base addresses have
64 bits, offsets within a tile 32.
"""

import triton
import triton.language as tl

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

MAX_NORMS = tl.constexpr(powersgd_work.MAX_NORMS)
# Up to this rank products are FMAs, above it matrix products on tensor cores.
MAX_FMA_RANK = tl.constexpr(8)
MIN_BLOCK_ROWS = tl.constexpr(32)  # divides BLOCK_ROWS and the length of P's panels

# What a program does: the first column of its row of work.
COPY = tl.constexpr(powersgd_work.COPY)
NEXT_Q = tl.constexpr(powersgd_work.NEXT_Q)


def dot_rank_block(rank: int) -> int:
    """Return how many columns of a factor one pass over a matrix computes.

    rank: padded.
    """
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
def gradient_matrix(grad_ptr, matrix_ptr):
    """Return a matrix in the bucket: (pointer, n, m, number of its elements in the bucket).

    Kernels call this and memory_matrix before their loops. Within a loop, the compiler would load the table's
    elements ahead, through shared memory.
    """
    start_ptr = grad_ptr + tl.load(matrix_ptr + GRADIENT)
    return start_ptr, tl.load(matrix_ptr + ROWS), tl.load(matrix_ptr + COLS), tl.load(matrix_ptr + NUMEL)


@triton.jit
def memory_matrix(memory_ptr, matrix_ptr, ALIGNED: tl.constexpr):
    """Return a matrix in `memory`: (pointer, n, length of its padded rows)."""
    # If ALIGNED, COLS equals MEMORY_COLS. Loading COLS shows the compiler that gradient_tile's offsets serve.
    cols = tl.load(matrix_ptr + (COLS if ALIGNED else MEMORY_COLS))
    VECTOR: tl.constexpr = 128 // memory_ptr.dtype.element_ty.primitive_bitwidth
    start = tl.load(matrix_ptr + MEMORY) // VECTOR * VECTOR
    return memory_ptr + start, tl.load(matrix_ptr + ROWS), cols


@triton.jit
def gradient_tile(
    matrix, row_block, col_block, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return (pointers, mask) of a tile of a matrix in the bucket.

    matrix: gradient_matrix's result.
    ALIGNED: is_16_byte_aligned's result. If true, every access is 128 bits wide. Kernels branch on it around
        their loops: a branch around each access would make the compiler keep tiles in two layouts.
    """
    start_ptr, rows, cols, numel = matrix
    TYPE: tl.constexpr = start_ptr.dtype.element_ty
    VECTOR: tl.constexpr = 128 // TYPE.primitive_bitwidth
    start = cols * (row_block * BLOCK_ROWS) + col_block * BLOCK_COLS
    rows_left = (rows - row_block * BLOCK_ROWS).to(tl.int32)
    cols_left = (cols - col_block * BLOCK_COLS).to(tl.int32)
    stride = cols.to(tl.int32)
    tile_ptr = start_ptr + start
    offs_row = tl.arange(0, BLOCK_ROWS)[:, None]
    offs_col = tl.arange(0, BLOCK_COLS)[None, :]
    if ALIGNED:
        # They are multiples already; rounding down shows the compiler that they are.
        address = tile_ptr.to(tl.uint64) // 16 * 16
        tile_ptr = tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)
        stride = stride // VECTOR * VECTOR
        cols_left = cols_left // VECTOR * VECTOR
    offs = offs_row * stride + offs_col
    mask = (offs_row < rows_left) & (offs_col < cols_left)
    if not ALIGNED:
        left = tl.minimum(numel - start, 2**31 - 1).to(tl.int32)
        mask = mask & (offs < left)
    return tile_ptr + offs, mask


@triton.jit
def memory_tile(matrix, row_block, col_block, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Return (pointers, mask) of a tile of a matrix in `memory`. Every access is 128 bits wide.

    matrix: memory_matrix's result.
    """
    start_ptr, rows, cols = matrix
    VECTOR: tl.constexpr = 128 // start_ptr.dtype.element_ty.primitive_bitwidth
    start = cols * (row_block * BLOCK_ROWS) + col_block * BLOCK_COLS
    rows_left = (rows - row_block * BLOCK_ROWS).to(tl.int32)
    # They are multiples of VECTOR already; dividing shows the compiler that they are.
    cols_left = (cols - col_block * BLOCK_COLS).to(tl.int32) // VECTOR * VECTOR
    stride = cols.to(tl.int32) // VECTOR * VECTOR
    offs_row = tl.arange(0, BLOCK_ROWS)[:, None]
    offs_col = tl.arange(0, BLOCK_COLS)[None, :]
    mask = (offs_row < rows_left) & (offs_col < cols_left)
    return start_ptr + start // VECTOR * VECTOR + offs_row * stride + offs_col, mask


@triton.jit
def panel(panel_ptr, matrix_ptr, START: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return (pointer to a factor's panel, its stride), both visible to the compiler as multiples of BLOCK.

    START, STRIDE: columns of matrix_table.
    """
    start = tl.load(matrix_ptr + START) // BLOCK * BLOCK
    stride = tl.load(matrix_ptr + STRIDE) // BLOCK * BLOCK
    return panel_ptr + start, stride


@triton.jit
def wire_stride(length, TYPE: tl.constexpr):
    """Return work.wire_stride(length), visible to the compiler as a multiple of 16 bytes.

    TYPE: the wire's dtype.
    """
    VECTOR: tl.constexpr = 128 // TYPE.primitive_bitwidth
    return (length + (VECTOR - 1)) // VECTOR * VECTOR


@triton.jit
def wire_start(wire_ptr, first):
    """Return a pointer to element `first` of a wire, visible to the compiler as a multiple of 16 bytes."""
    VECTOR: tl.constexpr = 128 // wire_ptr.dtype.element_ty.primitive_bitwidth
    return wire_ptr + first // VECTOR * VECTOR
