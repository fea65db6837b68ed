"""The triangle of Gram–Schmidt, in fp64 or in pairs of fp32.

For a small Gram matrix G it is the upper triangular T with Tᵀ G T = I.
"""

import triton
import triton.language as tl

from .pairs import add, inverse_root, multiply

# A column is dependent if Gram–Schmidt leaves less than this fraction of its squared length. fp32 arithmetic
# leaves about 1e-14 of a dependent column; a condition number of 1e6 leaves 1e-12.
DEPENDENT = tl.constexpr(1e-13)
# In fp64, a Gram matrix can't distinguish fractions below about 1e-15 from zero.
DEPENDENT_FP64 = tl.constexpr(1e-14)
# One pass leaves ‖PᵀP−I‖ of about 3e-14 / remaining fraction. If that may exceed 3e-7, a second pass follows.
SECOND_PASS_BELOW = tl.constexpr(1e-7)


@triton.jit
def diagonal(matrix, RANK: tl.constexpr):
    """Return the diagonal of a [RANK, RANK] matrix."""
    offs = tl.arange(0, RANK)
    return tl.sum(tl.where(offs[:, None] == offs[None, :], matrix, 0.0), axis=0)


@triton.jit
def element(vector, j, RANK: tl.constexpr):
    """Return element j of a [RANK] vector."""
    return tl.sum(tl.where(tl.arange(0, RANK) == j, vector, 0.0), axis=0)


@triton.jit
def triangle(hi, lo, own, epsilon, DEPENDENT: tl.constexpr, RANK: tl.constexpr):
    """Return (Tᵀ, its lo, whether a second pass is due: 0 or 1), with T upper triangular and Tᵀ G T = I.

    T has zero columns for dependent columns. All of T is NaN if anything in G isn't finite.

    hi, lo: G, [RANK, RANK] pairs of fp32; or hi is G in fp64, and lo anything of its shape.
    own: [RANK], the squared lengths that columns' remaining squared lengths are compared with.
    epsilon: added to every remaining length before dividing by it. A number or [RANK] in fp64; [RANK] in
        pairs, because columns are scaled.
    DEPENDENT: a column is dependent unless it has more than this fraction of own left.

    This is Gaussian elimination on G in place. Below the diagonal, an eliminated column would leave zeros:
    row operations are stored there instead. They are Tᵀ, except for the lengths of its rows. The rest of G
    stays symmetric: right of the diagonal, row j equals column j, so only the row is gathered from threads.
    With epsilon the subtracted column is shorter than 1, as in torch. Hence `left`: it is 1 without epsilon.
    """
    TYPE: tl.constexpr = hi.dtype
    offs = tl.arange(0, RANK)
    row = offs[:, None]
    col = offs[None, :]
    finite = tl.sum(tl.sum(tl.abs(hi), axis=0), axis=0) < float("inf")
    inverse = tl.zeros((RANK,), TYPE)
    inverse_lo = tl.zeros((RANK,), TYPE)
    remainders = tl.full((RANK,), 1.0, TYPE)
    two = tl.full((), 2.0, TYPE)
    zero = tl.full((), 0.0, TYPE)
    for j in range(RANK):
        of_row = tl.sum(tl.where(row == j, hi, 0.0), axis=0)
        of_row_lo = tl.sum(tl.where(row == j, lo, 0.0), axis=0)
        # remaining is zero if the column is dependent.
        remaining = element(tl.where(of_row > own * DEPENDENT, of_row, 0.0), j, RANK)
        remaining_lo = element(of_row_lo, j, RANK)
        keep = remaining > 0.0
        safe, safe_lo = tl.where(keep, remaining, 1.0), tl.where(keep, remaining_lo, 0.0)
        added = epsilon if TYPE == tl.float64 else element(epsilon, j, RANK)
        root, root_lo = inverse_root(safe, safe_lo, added)
        root, root_lo = tl.where(keep, root, 0.0), tl.where(keep, root_lo, 0.0)
        part, part_lo = multiply(root, root_lo, root, root_lo)
        length, length_lo = multiply(safe, safe_lo, part, part_lo)
        left, left_lo = add(two, zero, -length, -length_lo)
        factor, factor_lo = multiply(of_row, of_row_lo, -part, -part_lo)
        factor, factor_lo = tl.where(offs > j, factor, 0.0), tl.where(offs > j, factor_lo, 0.0)
        scaled, scaled_lo = multiply(of_row, of_row_lo, left, left_lo)
        of_row = tl.where(offs == j, 1.0, tl.where(offs > j, scaled, of_row))
        of_row_lo = tl.where(offs == j, 0.0, tl.where(offs > j, scaled_lo, of_row_lo))
        change, change_lo = multiply(factor[:, None], factor_lo[:, None], of_row[None, :], of_row_lo[None, :])
        gone = (row > j) & (col == j)
        hi, lo = add(tl.where(gone, 0.0, hi), tl.where(gone, 0.0, lo), change, change_lo)
        inverse, inverse_lo = tl.where(offs == j, root, inverse), tl.where(offs == j, root_lo, inverse_lo)
        remainders = tl.where(offs == j, remaining, remainders)
    again = tl.max(((inverse > 0.0) & (remainders < own * SECOND_PASS_BELOW)).to(tl.int32), axis=0)
    hi = tl.where(row == col, 1.0, hi)
    lo = tl.where(row == col, 0.0, lo)
    hi, lo = multiply(hi, lo, inverse[:, None], inverse_lo[:, None])
    hi, lo = tl.where(col <= row, hi, 0.0), tl.where(col <= row, lo, 0.0)
    return tl.where(finite, hi, float("nan")), lo, again
