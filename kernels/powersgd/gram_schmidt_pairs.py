"""Gram matrices of factor panels, and products of panels with a triangle, in pairs of fp32.

gram_schmidt.py has the same operations in fp64, and describes panels, stride and length.

A Gram matrix or a triangle T is stored in scratch, in a slot [hi | lo | scale]:
    hi, lo: RANK² fp32 each, row by row.
    scale: RANK powers of two. A panel's columns are multiplied by them (exactly), so their squares neither
        overflow nor underflow.

A product of panels is a sum of exact products with compensation (Dot2 of Ogita, Rump and Oishi): 10 fp32
instructions per term.

COLS: the number of columns in a block of columns. Blocks below the diagonal aren't computed: a Gram matrix is
    symmetric, and a triangle has zeros there.
"""

import triton
import triton.language as tl

from .pairs import add, inverse_power, power_of_two, sum_first_axis, two_product, two_sum
from .tile import MAX_CHUNKS


@triton.jit
def store_scale(panel_ptr, stride, length, r, matrix_ptr, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Store for each column the power of two that brings its largest absolute value into 1 .. 2."""
    offs_row = tl.arange(0, BLOCK)[:, None]
    offs_col = tl.arange(0, RANK)[None, :]
    largest = tl.zeros((BLOCK, RANK), tl.float32)
    least = tl.zeros((BLOCK, RANK), tl.float32)
    for first in tl.range(0, length, BLOCK, num_stages=3):
        row = first + offs_row
        ptrs = panel_ptr + row + offs_col * stride
        p = tl.load(ptrs, mask=(row < length) & (offs_col < r), other=0.0).to(tl.float32)
        largest = tl.maximum(largest, p)
        least = tl.minimum(least, p)
    scale = power_of_two(tl.max(tl.maximum(largest, -least), axis=0))
    tl.store(matrix_ptr + 2 * RANK * RANK + tl.arange(0, RANK), scale)


@triton.jit
def product_block(
    panel_ptr, stride, first, length, n, r, first_col, triangle_ptr,
    RANK: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Compute [BLOCK, COLS] of panel · scale · T, rounded to fp32, with zeros from row n on.

    first, first_col: the first row and column.
    triangle_ptr: the slot of scale and T.
    """
    row = first + tl.arange(0, BLOCK)
    offs_col = first_col + tl.arange(0, COLS)[None, :]
    hi = tl.zeros((BLOCK, COLS), tl.float32)
    lo = tl.zeros((BLOCK, COLS), tl.float32)
    for i in range(first_col + COLS):
        p = tl.load(panel_ptr + row + i * stride, mask=row < tl.where(i < r, length, 0), other=0.0)
        p = p.to(tl.float32)
        p = (p * tl.load(triangle_ptr + 2 * RANK * RANK + i))[:, None]
        t = tl.load(triangle_ptr + i * RANK + offs_col)
        t_lo = tl.load(triangle_ptr + RANK * RANK + i * RANK + offs_col)
        product, error = two_product(p, t)
        hi, rounding = two_sum(hi, product)
        lo += (rounding + error) + p * t_lo
    # The padding must stay zero even if the triangle is NaN.
    return tl.where(row[:, None] < n, hi + lo, 0.0)


@triton.jit
def multiply(
    source_ptr, stride, out_ptr, out_stride, start, stop, length, n, r, triangle_ptr,
    RANK: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Write rows start .. stop of source · scale · T to out, a panel of whole columns with padding.

    triangle_ptr: the slot of scale and T.
    IN_PLACE: source is out.
    """
    offs_row = tl.arange(0, BLOCK)[:, None]
    for first in range(start, stop, BLOCK):
        for block in range(RANK // COLS):
            # Last columns first: no other columns are computed from them, so they can be overwritten.
            first_col = RANK - COLS - block * COLS
            result = product_block(
                source_ptr, stride, first, length, n, r, first_col, triangle_ptr, RANK, BLOCK, COLS
            )
            if IN_PLACE:
                tl.debug_barrier()  # all threads must have read before any thread writes
            offs_col = first_col + tl.arange(0, COLS)[None, :]
            ptrs = out_ptr + first + offs_row + offs_col * out_stride
            tl.store(ptrs, result, mask=first + offs_row < stop)


@triton.jit
def factor(
    panel_ptr, stride, first, length, r, first_col, AXIS: tl.constexpr, matrix_ptr,
    RANK: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Load [BLOCK, COLS] of panel · scale, with a third axis of length 1 at AXIS.

    first, first_col: the first row and column.
    matrix_ptr: the slot of scale.
    """
    row = tl.expand_dims(first + tl.arange(0, BLOCK)[:, None], AXIS)
    col = tl.expand_dims(first_col + tl.arange(0, COLS)[None, :], AXIS)
    mask = (row < length) & (col < r)
    p = tl.load(panel_ptr + row + col * stride, mask=mask, other=0.0).to(tl.float32)
    return p * tl.load(matrix_ptr + 2 * RANK * RANK + col)


@triton.jit
def store_gram_block(
    panel_ptr, stride, length, n, r, first_row, first_col, triangle_ptr, matrix_ptr,
    RANK: tl.constexpr, BLOCK: tl.constexpr, LOG2_BLOCK: tl.constexpr, COLS: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """Store [COLS, COLS] of a Gram matrix, and its transpose on the other side of the diagonal.

    first_row, first_col: of the block in the Gram matrix. For the other arguments see store_gram.
    """
    hi = tl.zeros((BLOCK, COLS, COLS), tl.float32)
    lo = tl.zeros((BLOCK, COLS, COLS), tl.float32)
    for first in tl.range(0, length, BLOCK, num_stages=1 if PRODUCT else 2):
        if PRODUCT:
            left = product_block(
                panel_ptr, stride, first, length, n, r, first_row, triangle_ptr, RANK, BLOCK, COLS
            )[:, :, None]
            right = product_block(
                panel_ptr, stride, first, length, n, r, first_col, triangle_ptr, RANK, BLOCK, COLS
            )[:, None, :]
        else:
            left = factor(panel_ptr, stride, first, length, r, first_row, 2, matrix_ptr, RANK, BLOCK, COLS)
            right = factor(panel_ptr, stride, first, length, r, first_col, 1, matrix_ptr, RANK, BLOCK, COLS)
        product, error = two_product(left, right)
        hi, rounding = two_sum(hi, product)
        lo += rounding + error
    hi, lo = sum_first_axis(hi, lo, BLOCK, LOG2_BLOCK, COLS, COLS)
    row = first_row + tl.arange(0, COLS)[:, None]
    col = first_col + tl.arange(0, COLS)[None, :]
    for part in tl.static_range(2):
        value = hi if part == 0 else lo
        tl.store(matrix_ptr + part * RANK * RANK + row * RANK + col, value)
        if first_row != first_col:
            tl.store(matrix_ptr + part * RANK * RANK + col * RANK + row, value)


@triton.jit
def store_gram(
    panel_ptr, stride, length, n, r, triangle_ptr, matrix_ptr,
    RANK: tl.constexpr, BLOCK: tl.constexpr, LOG2_BLOCK: tl.constexpr, COLS: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """Store WᵀW, without its scale, for W = panel · scale.

    With PRODUCT, W = panel · scale · T, rounded to fp32.

    triangle_ptr: the slot of scale and T, with PRODUCT.
    matrix_ptr: the slot of WᵀW. Without PRODUCT it has the scale already.
    """
    for first_row in range(0, RANK, COLS):
        for first_col in range(first_row, RANK, COLS):
            store_gram_block(
                panel_ptr, stride, length, n, r, first_row, first_col, triangle_ptr, matrix_ptr,
                RANK, BLOCK, LOG2_BLOCK, COLS, PRODUCT,
            )  # fmt: skip


@triton.jit
def sum_chunks(slots_ptr, count, triangle_ptr, RANK: tl.constexpr):
    """Return (hi, lo, scale), the sum of a matrix's partial Gram matrices with a common scale.

    A column's common scale is the least of all chunks. It is also stored.

    slots_ptr, count: the partial Gram matrices, and their number.
    triangle_ptr: the slot that gets the scale.
    """
    SIZE: tl.constexpr = 2 * RANK * (RANK + 1)
    SCALE: tl.constexpr = 2 * RANK * RANK
    GROUP: tl.constexpr = 4 if RANK == 32 else 8
    LOG2_GROUP: tl.constexpr = 2 if RANK == 32 else 3
    offs = tl.arange(0, RANK)
    chunk = tl.arange(0, MAX_CHUNKS)[:, None]
    scales = tl.load(slots_ptr + chunk * SIZE + SCALE + offs[None, :], mask=chunk < count, other=float("inf"))
    common = tl.min(scales, axis=0)
    tl.store(triangle_ptr + SCALE + offs, common)
    tl.debug_barrier()
    row = offs[None, :, None]
    col = offs[None, None, :]
    common_row = tl.load(triangle_ptr + SCALE + row)
    common_col = tl.load(triangle_ptr + SCALE + col)
    total = tl.zeros((RANK, RANK), tl.float32)
    total_lo = tl.zeros((RANK, RANK), tl.float32)
    for first in range(0, count, GROUP):
        slot = first + tl.arange(0, GROUP)[:, None, None]
        ptrs = slots_ptr + slot * SIZE
        mask = slot < count
        by_row = common_row * inverse_power(tl.load(ptrs + SCALE + row, mask=mask, other=1.0))
        by_col = common_col * inverse_power(tl.load(ptrs + SCALE + col, mask=mask, other=1.0))
        hi = tl.load(ptrs + row * RANK + col, mask=mask, other=0.0) * by_row * by_col
        lo = tl.load(ptrs + RANK * RANK + row * RANK + col, mask=mask, other=0.0) * by_row * by_col
        hi, lo = sum_first_axis(hi, lo, GROUP, LOG2_GROUP, RANK, RANK)
        total, total_lo = add(total, total_lo, hi, lo)
    return total, total_lo, common


@triton.jit
def load_square(matrix_ptr, RANK: tl.constexpr):
    """Load (hi, lo) of a [RANK, RANK] matrix of pairs."""
    offs = tl.arange(0, RANK)[:, None] * RANK + tl.arange(0, RANK)[None, :]
    return tl.load(matrix_ptr + offs), tl.load(matrix_ptr + RANK * RANK + offs)


@triton.jit
def store_transpose(matrix_ptr, hi, lo, RANK: tl.constexpr):
    """Store the transpose of a [RANK, RANK] matrix of pairs."""
    offs = tl.arange(0, RANK)[:, None] + tl.arange(0, RANK)[None, :] * RANK
    tl.store(matrix_ptr + offs, hi)
    tl.store(matrix_ptr + RANK * RANK + offs, lo)
