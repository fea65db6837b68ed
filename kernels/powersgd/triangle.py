"""The triangle of Gram–Schmidt: for a small Gram matrix G, the upper triangular T with Tᵀ G T = I."""

import triton
import triton.language as tl

# A column is dependent if Gram–Schmidt leaves less than this fraction of its squared length. fp32 arithmetic
# leaves about 1e-14 of a dependent column; a condition number of 1e6 leaves 1e-12.
DEPENDENT_FP32 = tl.constexpr(1e-13)
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
def triangle(gram, own, epsilon, HAS_EPSILON: tl.constexpr, TYPE: tl.constexpr, RANK: tl.constexpr):
    """Return (Tᵀ, whether a second pass is due: 0 or 1), with T upper triangular and Tᵀ G T = I.

    T has zero columns for dependent columns. All of T is NaN if anything in G isn't finite.

    gram: G, [RANK, RANK] in fp64.
    own: [RANK], the squared lengths that columns' remaining squared lengths are compared with.
    epsilon: added to every remaining length before dividing by it.
    HAS_EPSILON: whether epsilon isn't zero.
    TYPE: the panels' dtype. It decides which fraction of own a column must have left.

    This is Gaussian elimination on G in place. Below the diagonal, an eliminated column would leave zeros:
    row operations are stored there instead. They are Tᵀ, except for the lengths of its rows. The rest of G
    stays symmetric: right of the diagonal, row j equals column j, so only the row is gathered from threads.
    Lengths follow at the end, for all columns at once: one column after another waits for a reciprocal only.
    With epsilon a subtracted column q is shorter than 1, as in torch: (I − q qᵀ)² = I − (2 − ‖q‖²) q qᵀ.
    """
    DEPENDENT: tl.constexpr = DEPENDENT_FP64 if TYPE == tl.float64 else DEPENDENT_FP32
    offs = tl.arange(0, RANK)
    row = offs[:, None]
    col = offs[None, :]
    finite = tl.sum(tl.sum(tl.abs(gram), axis=0), axis=0) < float("inf")
    remainders = tl.zeros((RANK,), tl.float64)
    for j in range(RANK):
        of_row = tl.sum(tl.where(row == j, gram, 0.0), axis=0)
        # remaining is zero if the column is dependent.
        remaining = tl.sum(tl.where((offs == j) & (of_row > own * DEPENDENT), of_row, 0.0), axis=0)
        remainders = tl.where(offs == j, remaining, remainders)
        keep = remaining > 0.0
        safe = tl.where(keep, remaining, 1.0)
        if HAS_EPSILON:
            root = 1.0 / (tl.sqrt(safe) + epsilon)
            part = root * root
            subtracted = tl.where(offs > j, of_row * (2.0 - safe * part), of_row)
        else:
            part = 1.0 / safe
            subtracted = of_row
        factor = tl.where(offs > j, of_row * tl.where(keep, -part, 0.0), 0.0)
        subtracted = tl.where(offs == j, 1.0, subtracted)
        gone = (row > j) & (col == j)
        gram = tl.where(gone, 0.0, gram) + factor[:, None] * subtracted[None, :]
    keep = remainders > 0.0
    again = tl.max((keep & (remainders < own * SECOND_PASS_BELOW)).to(tl.int32), axis=0)
    inverse = tl.where(keep, 1.0 / (tl.sqrt(tl.where(keep, remainders, 1.0)) + epsilon), 0.0)
    transform = tl.where(row == col, 1.0, gram) * inverse[:, None]
    transform = tl.where(col <= row, transform, 0.0)
    return tl.where(finite, transform, float("nan")), again
