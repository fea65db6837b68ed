"""Gram–Schmidt on one factor panel, in the inner product of its Gram matrix."""

import triton
import triton.language as tl

# A column is dependent when Gram–Schmidt leaves less than this fraction of its squared length. fp32
# arithmetic leaves about 1e-14 of a dependent column; a condition number of 1e6 leaves 1e-12.
DEPENDENT = tl.constexpr(1e-13)
# In fp64 the Gram matrix itself can't distinguish less than about 1e-15 from zero.
DEPENDENT_FP64 = tl.constexpr(1e-14)


@triton.jit
def load_panel(
    panel_ptr, first_row, num_rows, num_cols, row_stride, col_stride, BLOCK: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Load [BLOCK, COLS] rows of an n×r panel in fp64, with zeros outside."""
    offs_row = (first_row + tl.arange(0, BLOCK))[:, None]
    offs_col = tl.arange(0, COLS)[None, :]
    mask = (offs_row < num_rows) & (offs_col < num_cols)
    return tl.load(panel_ptr + offs_row * row_stride + offs_col * col_stride, mask=mask, other=0.0).to(
        tl.float64
    )


@triton.jit
def gram(panel_ptr, n, r, row_stride, col_stride, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Compute PᵀP of an n×r panel, [RANK, RANK] in fp64, with zeros outside."""
    if RANK <= 8:
        acc = tl.zeros((BLOCK, RANK, RANK), tl.float64)
        offs_row = tl.arange(0, BLOCK)[:, None, None]
        offs_i = tl.arange(0, RANK)[None, :, None]
        offs_j = tl.arange(0, RANK)[None, None, :]
        for first in tl.range(0, n, BLOCK, num_stages=3):
            row = first + offs_row
            ptrs = panel_ptr + row * row_stride
            left = tl.load(ptrs + offs_i * col_stride, mask=(row < n) & (offs_i < r), other=0.0)
            right = tl.load(ptrs + offs_j * col_stride, mask=(row < n) & (offs_j < r), other=0.0)
            acc += left.to(tl.float64) * right.to(tl.float64)
        result = tl.sum(acc, axis=0)
    else:
        result = tl.zeros((RANK, RANK), tl.float64)
        for first in tl.range(0, n, BLOCK, num_stages=1):  # see multiply
            p = load_panel(panel_ptr, first, n, r, row_stride, col_stride, BLOCK, RANK)
            result = tl.dot(tl.trans(p), p, result, input_precision="ieee", out_dtype=tl.float64)
    return result


@triton.jit
def diagonal(matrix, RANK: tl.constexpr):
    """Return the diagonal of a [RANK, RANK] matrix."""
    offs = tl.arange(0, RANK)
    return tl.sum(tl.where(offs[:, None] == offs[None, :], matrix, 0.0), axis=0)


@triton.jit
def triangle(products, own, epsilon, DEPENDENT: tl.constexpr, RANK: tl.constexpr):
    """Return (Tᵀ, smallest remaining fraction), with T upper triangular and Tᵀ products T = I.

    T has zero columns for dependent ones. own: [RANK] squared lengths that a column's remaining squared
    length is compared with. epsilon is added to every remaining length before dividing by it. All of T is NaN
    if anything in products isn't finite.

    This is Gaussian elimination on products, with the row operations collected in Tᵀ. With epsilon the column
    that is subtracted is shorter than 1, as in torch, hence the last factor (1 without epsilon).
    """
    offs = tl.arange(0, RANK)
    row = offs[:, None]
    col = offs[None, :]
    finite = tl.sum(tl.sum(tl.abs(products), axis=0), axis=0) < float("inf")
    transform = tl.where(row == col, 1.0, 0.0).to(tl.float64)
    smallest = tl.full((), 1.0, tl.float64)
    for j in range(RANK):
        of_row = tl.sum(tl.where(row == j, products, 0.0), axis=0)  # [RANK] over columns
        factors = tl.sum(tl.where(col == j, products, 0.0), axis=1)  # [RANK] over rows
        combination = tl.sum(tl.where(row == j, transform, 0.0), axis=0)
        remaining = tl.sum(tl.where(offs == j, of_row, 0.0), axis=0)
        before = tl.sum(tl.where(offs == j, own, 0.0), axis=0)
        keep = remaining > before * DEPENDENT
        safe = tl.where(keep, remaining, 1.0)
        inverse = tl.where(keep, 1.0 / (tl.sqrt(safe) + epsilon), 0.0)
        smallest = tl.where(keep, tl.minimum(smallest, remaining / tl.where(keep, before, 1.0)), smallest)
        part = inverse * inverse
        factors = tl.where(offs > j, factors, 0.0) * part
        transform -= factors[:, None] * combination[None, :]
        products -= factors[:, None] * of_row[None, :] * (2.0 - remaining * part)
        transform = tl.where(row == j, transform * inverse, transform)
    return tl.where(finite, transform, float("nan")), smallest


@triton.jit
def multiply_block(
    source_ptr,
    row_stride,
    col_stride,
    first,
    n,
    r,
    transform,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute rows first .. first + BLOCK of source · transformᵀ, with zeros from row n on."""
    if RANK <= 8:
        row = (first + tl.arange(0, BLOCK))[:, None, None]
        offs_j = tl.arange(0, RANK)[None, None, :]
        ptrs = source_ptr + row * row_stride + offs_j * col_stride
        p = tl.load(ptrs, mask=(row < n) & (offs_j < r), other=0.0).to(tl.float64)
        result = tl.sum(p * transform[None, :, :], axis=2)
    else:
        p = load_panel(source_ptr, first, n, r, row_stride, col_stride, BLOCK, RANK)
        result = tl.dot(p, tl.trans(transform), input_precision="ieee", out_dtype=tl.float64)
    # Where the transform is NaN, the padding must stay zero.
    return tl.where((first + tl.arange(0, BLOCK))[:, None] < n, result, 0.0)


@triton.jit
def multiply(
    source_ptr, row_stride, col_stride, out_ptr, out_stride, n, r, transform, RANK: tl.constexpr,
    BLOCK: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Write source · transformᵀ to out, a panel of whole columns with padding. IN_PLACE: source is out."""
    # Loads ahead of products in fp64 spill on sm_100 (Triton 3.6): larger blocks hide the latency instead.
    NUM_STAGES: tl.constexpr = 3 if RANK <= 8 else 1
    out_type: tl.constexpr = out_ptr.dtype.element_ty
    offs_row = tl.arange(0, BLOCK)[:, None]
    offs = offs_row + tl.arange(0, RANK)[None, :] * out_stride
    if IN_PLACE:
        for first in tl.range(0, out_stride, BLOCK, num_stages=1):
            result = multiply_block(source_ptr, row_stride, col_stride, first, n, r, transform, RANK, BLOCK)
            tl.debug_barrier()  # everyone has to have read before anyone writes
            tl.store(out_ptr + first + offs, result.to(out_type), mask=first + offs_row < out_stride)
    else:
        for first in tl.range(0, out_stride, BLOCK, num_stages=NUM_STAGES):
            result = multiply_block(source_ptr, row_stride, col_stride, first, n, r, transform, RANK, BLOCK)
            tl.store(out_ptr + first + offs, result.to(out_type), mask=first + offs_row < out_stride)


@triton.jit
def copy_panel(
    source_ptr, row_stride, col_stride, out_ptr, out_stride, n, r, RANK: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy an n×r panel from source to out, in whole columns padded with zeros."""
    offs_row = tl.arange(0, BLOCK)[:, None]
    offs = offs_row + tl.arange(0, RANK)[None, :] * out_stride
    for first in tl.range(0, out_stride, BLOCK, num_stages=1):
        values = load_panel(source_ptr, first, n, r, row_stride, col_stride, BLOCK, RANK)
        tl.store(
            out_ptr + first + offs, values.to(out_ptr.dtype.element_ty), mask=first + offs_row < out_stride
        )


@triton.jit
def orthonormalise_panel(
    source_ptr, row_stride, col_stride, out_ptr, out_stride, n, r, epsilon, RANK: tl.constexpr,
    BLOCK: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Write source T, with orthonormal columns, to out. Returns the smallest fraction left of a column."""
    TOLERANCE: tl.constexpr = DEPENDENT_FP64 if out_ptr.dtype.element_ty == tl.float64 else DEPENDENT
    products = gram(source_ptr, n, r, row_stride, col_stride, RANK, BLOCK)
    transform, smallest = triangle(products, diagonal(products, RANK), epsilon, TOLERANCE, RANK)
    multiply(source_ptr, row_stride, col_stride, out_ptr, out_stride, n, r, transform, RANK, BLOCK, IN_PLACE)
    return smallest


@triton.jit
def subtract_projection(block_ptr, done_ptr, stride, n, cols, RANK_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """Subtract done (doneᵀ block) from block; both are [n, RANK_BLOCK] panels, done orthonormal or zero."""
    common = tl.zeros((RANK_BLOCK, RANK_BLOCK), tl.float64)
    for first in tl.range(0, n, BLOCK, num_stages=1):
        done = load_panel(done_ptr, first, n, RANK_BLOCK, 1, stride, BLOCK, RANK_BLOCK)
        block = load_panel(block_ptr, first, n, cols, 1, stride, BLOCK, RANK_BLOCK)
        common = tl.dot(tl.trans(done), block, common, input_precision="ieee", out_dtype=tl.float64)
    tl.debug_barrier()
    offs = tl.arange(0, RANK_BLOCK)[None, :]
    for first in tl.range(0, n, BLOCK, num_stages=1):
        done = load_panel(done_ptr, first, n, RANK_BLOCK, 1, stride, BLOCK, RANK_BLOCK)
        block = load_panel(block_ptr, first, n, cols, 1, stride, BLOCK, RANK_BLOCK)
        block -= tl.dot(done, common, input_precision="ieee", out_dtype=tl.float64)
        tl.debug_barrier()  # everyone has to have read before anyone writes
        row = first + tl.arange(0, BLOCK)[:, None]
        values = block.to(block_ptr.dtype.element_ty)
        tl.store(block_ptr + row + offs * stride, values, mask=(row < n) & (offs < cols))
    tl.debug_barrier()
