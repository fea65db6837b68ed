"""Orthonormalise all P panels of a bucket in one launch: Gram–Schmidt in the Gram matrix's inner product."""

import torch
import triton
import triton.language as tl

from .powersgd_tile import MATRIX_FIELDS, MATRIX_RANK, MAX_REGISTERS, P_PANEL, P_STRIDE, P_WIRE, ROWS

# A column is dependent when Gram–Schmidt leaves less than this part of its squared length. What fp32 arithmetic
# leaves of a dependent column is about 1e-14, and a condition number of 1e6 leaves 1e-12.
DEPENDENT = tl.constexpr(1e-13)
# In fp64 the Gram matrix itself can't tell less than about 1e-15 from nothing.
DEPENDENT_FP64 = tl.constexpr(1e-14)
# One pass leaves ‖PᵀP−I‖ of about 3e-14 / remaining part: a second one when that may exceed 3e-7.
AGAIN = tl.constexpr(1e-7)


@triton.jit
def load_panel(
    panel_ptr, first_row, num_rows, num_cols, row_stride, col_stride, BLOCK: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """[BLOCK, COLS] rows of an n×r panel in fp64, zeros outside."""
    offs_row = (first_row + tl.arange(0, BLOCK))[:, None]
    offs_col = tl.arange(0, COLS)[None, :]
    mask = (offs_row < num_rows) & (offs_col < num_cols)
    return tl.load(panel_ptr + offs_row * row_stride + offs_col * col_stride, mask=mask, other=0.0).to(
        tl.float64
    )


@triton.jit
def gram(panel_ptr, n, r, row_stride, col_stride, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """PᵀP of an n×r panel, [RANK, RANK] in fp64, zeros outside."""
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
    offs = tl.arange(0, RANK)
    return tl.sum(tl.where(offs[:, None] == offs[None, :], matrix, 0.0), axis=0)


@triton.jit
def triangle(products, own, epsilon, DEPENDENT: tl.constexpr, RANK: tl.constexpr):
    """(Tᵀ, smallest remaining part) with T upper triangular and Tᵀ products T = I (zero for dependent columns).

    own: [RANK] squared lengths that a column's remaining squared length is compared with. epsilon is added
    to every remaining length before dividing by it. All of T is NaN if anything in products isn't finite.

    Gaussian elimination on products with the row operations collected in Tᵀ; with epsilon the column that is
    taken away is shorter than 1, as in torch, hence the last factor (1 without epsilon).
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
    """Rows first .. first + BLOCK of source · transformᵀ, zeros from row n on."""
    if RANK <= 8:
        row = (first + tl.arange(0, BLOCK))[:, None, None]
        offs_j = tl.arange(0, RANK)[None, None, :]
        ptrs = source_ptr + row * row_stride + offs_j * col_stride
        p = tl.load(ptrs, mask=(row < n) & (offs_j < r), other=0.0).to(tl.float64)
        result = tl.sum(p * transform[None, :, :], axis=2)
    else:
        p = load_panel(source_ptr, first, n, r, row_stride, col_stride, BLOCK, RANK)
        result = tl.dot(p, tl.trans(transform), input_precision="ieee", out_dtype=tl.float64)
    # Where the transform is NaN, the padding must not become so.
    return tl.where((first + tl.arange(0, BLOCK))[:, None] < n, result, 0.0)


@triton.jit
def multiply(
    source_ptr, row_stride, col_stride, out_ptr, out_stride, n, r, transform, RANK: tl.constexpr,
    BLOCK: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """out = source · transformᵀ: out a panel of whole columns, padding included; IN_PLACE, source is out."""
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
    """out = source, an n×r panel: out whole columns, with zeros for padding."""
    offs_row = tl.arange(0, BLOCK)[:, None]
    offs = offs_row + tl.arange(0, RANK)[None, :] * out_stride
    for first in tl.range(0, out_stride, BLOCK, num_stages=1):
        values = load_panel(source_ptr, first, n, r, row_stride, col_stride, BLOCK, RANK)
        tl.store(
            out_ptr + first + offs, values.to(out_ptr.dtype.element_ty), mask=first + offs_row < out_stride
        )


@triton.jit
def turn(
    source_ptr, row_stride, col_stride, out_ptr, out_stride, n, r, epsilon, RANK: tl.constexpr,
    BLOCK: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """out = source T with orthonormal columns; returns the smallest part of a column that was left."""
    TOLERANCE: tl.constexpr = DEPENDENT_FP64 if out_ptr.dtype.element_ty == tl.float64 else DEPENDENT
    products = gram(source_ptr, n, r, row_stride, col_stride, RANK, BLOCK)
    transform, smallest = triangle(products, diagonal(products, RANK), epsilon, TOLERANCE, RANK)
    multiply(source_ptr, row_stride, col_stride, out_ptr, out_stride, n, r, transform, RANK, BLOCK, IN_PLACE)
    return smallest


@triton.jit
def _orthonormalise_kernel(
    wire_ptr,
    p_ptr,
    matrices_ptr,
    epsilon: tl.float64,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """P ← P T with (P T)ᵀ(P T) = I, T upper triangular, for one panel; RANK <= 32.

    wire_ptr: the panels n×r, row-major, all-reduced. p_ptr: the padded panels, written whole. Zero and
    dependent columns become zeros; a panel with anything not finite becomes NaN. Grid: one program per matrix.
    Reads the panel twice and writes it once; twice as much if it is ill-conditioned.
    """
    matrix_ptr = matrices_ptr + tl.program_id(0).to(tl.int64) * MATRIX_FIELDS
    n = tl.load(matrix_ptr + ROWS).to(tl.int32)
    r = tl.load(matrix_ptr + MATRIX_RANK).to(tl.int32)
    source_ptr = wire_ptr + tl.load(matrix_ptr + P_WIRE)
    out_ptr = p_ptr + tl.load(matrix_ptr + P_PANEL)
    stride = tl.load(matrix_ptr + P_STRIDE).to(tl.int32)
    # Triton 3.6 fails on a product in fp64 of what it loads in 16 bits: let it load the copy in fp32.
    COPY: tl.constexpr = RANK > 8 and wire_ptr.dtype.element_ty.primitive_bitwidth == 16

    if COPY:
        copy_panel(source_ptr, r, 1, out_ptr, stride, n, r, RANK, BLOCK)
        tl.debug_barrier()
        smallest = turn(out_ptr, 1, stride, out_ptr, stride, n, r, epsilon, RANK, BLOCK, True)
    else:
        smallest = turn(source_ptr, r, 1, out_ptr, stride, n, r, epsilon, RANK, BLOCK, False)
    if (smallest < AGAIN) & (epsilon == 0.0):
        tl.debug_barrier()
        turn(out_ptr, 1, stride, out_ptr, stride, n, r, epsilon, RANK, BLOCK, True)


@triton.jit
def subtract_projection(block_ptr, done_ptr, stride, n, cols, RANK_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """block −= done (doneᵀ block), both [n, RANK_BLOCK] panels, the columns of done orthonormal (or zero)."""
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


@triton.jit
def _orthonormalise_blocks_kernel(
    wire_ptr,
    p_ptr,
    matrices_ptr,
    epsilon: tl.float64,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same as _orthonormalise_kernel for any RANK, RANK_BLOCK columns at a time.

    Block Gram–Schmidt, each block twice (with epsilon once): against the blocks before it, then within. Grid: one
    program per matrix. Each time it walks through a block about 5 times, and 5 times more for each one before it.
    """
    TOLERANCE: tl.constexpr = DEPENDENT_FP64 if p_ptr.dtype.element_ty == tl.float64 else DEPENDENT
    matrix_ptr = matrices_ptr + tl.program_id(0).to(tl.int64) * MATRIX_FIELDS
    n = tl.load(matrix_ptr + ROWS).to(tl.int32)
    r = tl.load(matrix_ptr + MATRIX_RANK).to(tl.int32)
    source_ptr = wire_ptr + tl.load(matrix_ptr + P_WIRE)
    out_ptr = p_ptr + tl.load(matrix_ptr + P_PANEL)
    stride = tl.load(matrix_ptr + P_STRIDE).to(tl.int32)

    for rank_start in range(0, RANK, RANK_BLOCK):
        block_ptr = out_ptr + rank_start * stride
        cols = tl.minimum(r - rank_start, RANK_BLOCK)
        copy_panel(source_ptr + rank_start, r, 1, block_ptr, stride, n, cols, RANK_BLOCK, BLOCK)
        tl.debug_barrier()
        for _ in range(tl.where(epsilon == 0.0, 2, 1)):
            own = diagonal(gram(block_ptr, n, cols, 1, stride, RANK_BLOCK, BLOCK), RANK_BLOCK)
            for done in range(0, rank_start, RANK_BLOCK):
                subtract_projection(block_ptr, out_ptr + done * stride, stride, n, cols, RANK_BLOCK, BLOCK)
            products = gram(block_ptr, n, cols, 1, stride, RANK_BLOCK, BLOCK)
            transform, _ = triangle(products, own, epsilon, TOLERANCE, RANK_BLOCK)
            multiply(block_ptr, 1, stride, block_ptr, stride, n, cols, transform, RANK_BLOCK, BLOCK, True)
            tl.debug_barrier()


def launch_shape(rank: int, itemsize: int) -> tuple[int, int]:
    """(BLOCK, num_warps): rows of a panel at a time, as many as the registers hold for a padded rank.

    itemsize: bytes per element of the panels.
    """
    if rank <= 4:
        return min(8192 // (rank * rank), 1024), 8
    # At rank 32, 128 rows spill where products in fp64 are FMAs (sm_100 and sm_120, Triton 3.7).
    return (16384 // itemsize // rank if rank == 16 else 64), 8


def orthonormalise(
    wire: torch.Tensor,
    matrices: torch.Tensor,
    *,
    out: torch.Tensor,
    rank: int,
    epsilon: float = 0.0,
) -> None:
    """Step 4 of PowerSGD (Vogels et al. 2019, algorithm 1) for every matrix of a bucket, one launch.

    wire: the all-reduced wire buffer, P's panels n×r in front. matrices: int64 matrix_table of LowRankWork.
    out: the padded panels, fp32 (fp64 for an fp64 bucket). epsilon: as torch's orthogonalization_epsilon, added
    to the length by which a column is divided (beyond rank 32 up to a relative difference of epsilon / length).
    With one, the second pass over ill-conditioned panels is left out, for it would undo what epsilon does.
    """
    if not len(matrices):
        return
    block, num_warps = launch_shape(rank, out.itemsize)
    # With a program per matrix, more of them on a multiprocessor would gain nothing. Up to rank 8, several lanes compute
    # the same element and all of them store it: fused differently, they would differ in the last bit.
    options = {"num_warps": num_warps, "maxnreg": MAX_REGISTERS, "enable_fp_fusion": rank > 8}
    arguments = (wire, out, matrices, epsilon)
    if rank <= 32:
        _orthonormalise_kernel[(len(matrices),)](*arguments, RANK=rank, BLOCK=block, **options)
    else:
        _orthonormalise_blocks_kernel[(len(matrices),)](
            *arguments, RANK=rank, RANK_BLOCK=32, BLOCK=block, **options
        )
