"""The error that project adds to a tile: finite, rounded, and shortened where float16 needs it."""

import triton
import triton.language as tl

from .tile import round_to

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
