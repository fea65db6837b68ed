"""Orthonormalize all panels of P in a bucket: two launches up to rank 32, one launch beyond it.

Up to rank 32: Gram–Schmidt in the inner product of P's Gram matrix. Every panel is read twice, at any rank.
Beyond rank 32: block Gram–Schmidt, 32 columns at a time, one program per matrix. All arithmetic is in fp64.

Panels have whole columns.

stride: the number of elements from one column to the next.
length: the number of rows that may be loaded. Rows behind the panel's last row are zeros. The compiler must
    see that length, pointer and stride are multiples of 16 bytes, so that loads are 128 bits wide.
"""

import triton
import triton.language as tl

from ..launch import MAX_REGISTERS, Launch
from .bucket import PowerSGDBucket
from .tile import MATRIX_FIELDS, MIN_BLOCK_ROWS, WORK_FIELDS, factor_on_wire, panel

# A column is dependent if Gram–Schmidt leaves less than this fraction of its squared length. fp32 arithmetic
# leaves about 1e-14 of a dependent column; a condition number of 1e6 leaves 1e-12.
DEPENDENT_FP32 = tl.constexpr(1e-13)
# In fp64, a Gram matrix can't distinguish fractions below about 1e-15 from zero.
DEPENDENT_FP64 = tl.constexpr(1e-14)
# One pass leaves ‖PᵀP−I‖ of about 3e-14 / remaining fraction. If that may exceed 3e-7, a second pass follows.
SECOND_PASS_BELOW = tl.constexpr(1e-7)


@triton.jit
def load_panel(panel_ptr, stride, first, length, r, BLOCK: tl.constexpr, COLS: tl.constexpr):
    """Load [BLOCK, COLS] rows of a panel of r columns, from row `first` on, in fp64, with zeros outside."""
    row = (first + tl.arange(0, BLOCK))[:, None]
    col = tl.arange(0, COLS)[None, :]
    p = tl.load(panel_ptr + row + col * stride, mask=(row < length) & (col < r), other=0.0)
    if panel_ptr.dtype.element_ty.primitive_bitwidth == 16:
        # A product in fp64 of values loaded in 16 bits doesn't compile. Triton finds the load through
        # conversions, but not through a sum: here a sum of one term.
        p = tl.sum(p.to(tl.float32)[:, :, None], axis=2)
    return p.to(tl.float64)


@triton.jit
def gram(panel_ptr, stride, length, r, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Compute PᵀP of a panel P of r columns, [RANK, RANK] in fp64, with zeros outside."""
    if RANK <= 8:
        acc = tl.zeros((BLOCK, RANK, RANK), tl.float64)
        offs_row = tl.arange(0, BLOCK)[:, None, None]
        offs_i = tl.arange(0, RANK)[None, :, None]
        offs_j = tl.arange(0, RANK)[None, None, :]
        for first in tl.range(0, length, BLOCK, num_stages=2):
            row = first + offs_row
            ptrs = panel_ptr + row
            left = tl.load(ptrs + offs_i * stride, mask=(row < length) & (offs_i < r), other=0.0)
            right = tl.load(ptrs + offs_j * stride, mask=(row < length) & (offs_j < r), other=0.0)
            acc += left.to(tl.float64) * right.to(tl.float64)
        result = tl.sum(acc, axis=0)
    else:
        result = tl.zeros((RANK, RANK), tl.float64)
        for first in tl.range(0, length, BLOCK, num_stages=1):  # loads ahead spill: see multiply
            p = load_panel(panel_ptr, stride, first, length, r, BLOCK, RANK)
            result = tl.dot(tl.trans(p), p, result, input_precision="ieee", out_dtype=tl.float64)
    return result


@triton.jit
def sum_chunks(slots_ptr, count, RANK: tl.constexpr):
    """Return the sum of a matrix's partial Gram matrices, in the order of their chunks."""
    GROUP: tl.constexpr = 4 if RANK == 32 else 8
    offs = tl.arange(0, RANK)[:, None] * RANK + tl.arange(0, RANK)[None, :]
    total = tl.zeros((RANK, RANK), tl.float64)
    for first in range(0, count, GROUP):
        slot = (first + tl.arange(0, GROUP))[:, None, None]
        ptrs = slots_ptr + slot * (RANK * RANK) + offs[None, :, :]
        total += tl.sum(tl.load(ptrs, mask=slot < count, other=0.0), axis=0)
    return total


@triton.jit
def multiply_block(
    source_ptr, stride, first, length, n, r, transform, RANK: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute rows first .. first + BLOCK of source · transformᵀ, with zeros from row n on."""
    if RANK <= 8:
        row = (first + tl.arange(0, BLOCK))[:, None, None]
        offs_j = tl.arange(0, RANK)[None, None, :]
        ptrs = source_ptr + row + offs_j * stride
        p = tl.load(ptrs, mask=(row < length) & (offs_j < r), other=0.0).to(tl.float64)
        result = tl.sum(p * transform[None, :, :], axis=2)
    else:
        p = load_panel(source_ptr, stride, first, length, r, BLOCK, RANK)
        result = tl.dot(p, tl.trans(transform), input_precision="ieee", out_dtype=tl.float64)
    # The padding must stay zero even if the transform is NaN.
    return tl.where((first + tl.arange(0, BLOCK))[:, None] < n, result, 0.0)


@triton.jit
def multiply(
    source_ptr, stride, out_ptr, out_stride, start, stop, length, n, r, transform,
    RANK: tl.constexpr, BLOCK: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Write rows start .. stop of source · transformᵀ to out, a panel of whole columns with padding.

    IN_PLACE: source is out.
    """
    # Loads ahead of products in fp64 spill on sm_100 (Triton 3.6): larger blocks hide the latency instead.
    NUM_STAGES: tl.constexpr = 3 if RANK <= 8 and not IN_PLACE else 1
    out_type: tl.constexpr = out_ptr.dtype.element_ty
    offs_row = tl.arange(0, BLOCK)[:, None]
    offs = offs_row + tl.arange(0, RANK)[None, :] * out_stride
    for first in tl.range(start, stop, BLOCK, num_stages=NUM_STAGES):
        result = multiply_block(source_ptr, stride, first, length, n, r, transform, RANK, BLOCK)
        if IN_PLACE:
            tl.debug_barrier()  # all threads must have read before any thread writes
        tl.store(out_ptr + first + offs, result.to(out_type), mask=first + offs_row < stop)


@triton.jit
def gram_of_product(
    source_ptr, stride, length, n, r, transform, TYPE: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute WᵀW, [RANK, RANK] in fp64, for W = source · transformᵀ (n×r, rounded to TYPE)."""
    result = tl.zeros((RANK, RANK), tl.float64)
    for first in tl.range(0, n, BLOCK, num_stages=1):
        w = multiply_block(source_ptr, stride, first, length, n, r, transform, RANK, BLOCK)
        w = w.to(TYPE).to(tl.float64)
        if RANK <= 8:
            result += tl.sum(w[:, :, None] * w[:, None, :], axis=0)
        else:
            result = tl.dot(tl.trans(w), w, result, input_precision="ieee", out_dtype=tl.float64)
    return result


@triton.jit
def copy_panel(source_ptr, stride, out_ptr, out_stride, length, r, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a panel of r columns from source to out. Columns of out are padded with zeros."""
    offs_row = tl.arange(0, BLOCK)[:, None]
    offs = offs_row + tl.arange(0, RANK)[None, :] * out_stride
    for first in tl.range(0, out_stride, BLOCK, num_stages=1):
        values = load_panel(source_ptr, stride, first, length, r, BLOCK, RANK)
        tl.store(
            out_ptr + first + offs, values.to(out_ptr.dtype.element_ty), mask=first + offs_row < out_stride
        )


@triton.jit
def subtract_projection(block_ptr, done_ptr, stride, n, cols, RANK_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """Compute block ← block − done (doneᵀ block).

    block_ptr: a panel of n rows and cols columns, with zeros behind the rows.
    done_ptr: a panel of n rows and RANK_BLOCK columns, orthonormal or zero, with zeros behind the rows.
    """
    common = tl.zeros((RANK_BLOCK, RANK_BLOCK), tl.float64)
    for first in tl.range(0, n, BLOCK, num_stages=1):
        done = load_panel(done_ptr, stride, first, stride, RANK_BLOCK, BLOCK, RANK_BLOCK)
        block = load_panel(block_ptr, stride, first, stride, cols, BLOCK, RANK_BLOCK)
        common = tl.dot(tl.trans(done), block, common, input_precision="ieee", out_dtype=tl.float64)
    tl.debug_barrier()
    offs = tl.arange(0, RANK_BLOCK)[None, :]
    for first in tl.range(0, n, BLOCK, num_stages=1):
        done = load_panel(done_ptr, stride, first, stride, RANK_BLOCK, BLOCK, RANK_BLOCK)
        block = load_panel(block_ptr, stride, first, stride, cols, BLOCK, RANK_BLOCK)
        block -= tl.dot(done, common, input_precision="ieee", out_dtype=tl.float64)
        tl.debug_barrier()  # all threads must have read before any thread writes
        row = first + tl.arange(0, BLOCK)[:, None]
        # Masked by n, so the padding stays zero even if done is NaN. The alternative, 128-bit stores that put
        # zeros into the padding, spills in fp64 on sm_100.
        values = block.to(block_ptr.dtype.element_ty)
        tl.store(block_ptr + row + offs * stride, values, mask=(row < n) & (offs < cols))
    tl.debug_barrier()


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
        gram = tl.where((row > j) & (col == j), 0.0, gram) + factor[:, None] * subtracted[None, :]
    keep = remainders > 0.0
    again = tl.max((keep & (remainders < own * SECOND_PASS_BELOW)).to(tl.int32), axis=0)
    inverse = tl.where(keep, 1.0 / (tl.sqrt(tl.where(keep, remainders, 1.0)) + epsilon), 0.0)
    transform = tl.where(row == col, 1.0, gram) * inverse[:, None]
    transform = tl.where(col <= row, transform, 0.0)
    return tl.where(finite, transform, float("nan")), again


@triton.jit
def _orthonormalize_blocks_kernel(
    wire_ptr, p_ptr, matrices_ptr, epsilon: tl.float64,
    RANK: tl.constexpr, BLOCK: tl.constexpr, HAS_EPSILON: tl.constexpr,
):  # fmt: skip
    """Compute P ← P T with (P T)ᵀ(P T) = I, T upper triangular, in fp64, for any RANK.

    This is block Gram–Schmidt with 32 columns at a time. Each block is orthonormalized against the blocks
    before it, then within itself; without epsilon, both are done twice. For the arguments, and for zero,
    dependent and nonfinite columns, see _orthonormalize_kernel.

    Grid: one program per matrix, of any length: ranks beyond 32 are rare.
    Each time it reads a block about 5 times, and 5 times more per block before it.
    """
    RANK_BLOCK: tl.constexpr = 32
    matrix_ptr = matrices_ptr + tl.program_id(0).to(tl.int64) * MATRIX_FIELDS
    source_ptr, wire_length, n, r = factor_on_wire(wire_ptr, matrix_ptr, "P")
    out_ptr, stride = panel(p_ptr, matrix_ptr, "P", MIN_BLOCK_ROWS)
    stride = stride.to(tl.int32)

    for rank_start in range(0, RANK, RANK_BLOCK):
        block_ptr = out_ptr + rank_start * stride
        cols = tl.minimum(r - rank_start, RANK_BLOCK)
        from_ptr = source_ptr + rank_start * wire_length
        copy_panel(from_ptr, wire_length, block_ptr, stride, wire_length, cols, RANK_BLOCK, BLOCK)
        tl.debug_barrier()
        for _ in range(1 if HAS_EPSILON else 2):
            own = diagonal(gram(block_ptr, stride, stride, cols, RANK_BLOCK, BLOCK), RANK_BLOCK)
            for done in range(0, rank_start, RANK_BLOCK):
                subtract_projection(block_ptr, out_ptr + done * stride, stride, n, cols, RANK_BLOCK, BLOCK)
            products = gram(block_ptr, stride, stride, cols, RANK_BLOCK, BLOCK)
            transform, _ = triangle(products, own, epsilon, HAS_EPSILON, p_ptr.dtype.element_ty, RANK_BLOCK)
            multiply(
                block_ptr, stride, block_ptr, stride, 0, stride, stride, n, cols, transform,
                RANK_BLOCK, BLOCK, True,
            )  # fmt: skip
            tl.debug_barrier()


# Every warp repeats the r×r computations, which would take longer in more warps. A long panel has more
# programs instead, but beyond rank 32 only one.
NUM_WARPS, BLOCKS_NUM_WARPS = 4, 8


@triton.jit
def chunk_on_wire(wire_ptr, matrices_ptr, work):
    """Return (pointer to a program's panel, its stride, n, r, first row, one past the last, matrix_ptr).

    On the wire, rows from n to the stride are zeros. The last program's rows include the padding of P's
    panel, which is longer than the padding on the wire.
    """
    matrix_ptr = matrices_ptr + tl.load(work) * MATRIX_FIELDS
    panel_ptr, stride, n, r = factor_on_wire(wire_ptr, matrix_ptr, "P")
    # start and stop are multiples already; dividing shows the compiler that they are.
    start = tl.load(work + 1).to(tl.int32) // MIN_BLOCK_ROWS * MIN_BLOCK_ROWS
    stop = tl.load(work + 2).to(tl.int32) // MIN_BLOCK_ROWS * MIN_BLOCK_ROWS
    return panel_ptr, stride, n, r, start, stop, matrix_ptr


@triton.jit
def _gram_kernel(wire_ptr, grams_ptr, matrices_ptr, work_ptr, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Compute PᵀP in fp64 over a chunk of a panel's rows.

    wire_ptr: the panels, all-reduced.
    grams_ptr: [programs, RANK, RANK], the results.
    Grid: one program per row of work_ptr (PowerSGDWork._orthonormalize_work).
    Reads the panels once.
    """
    program = tl.program_id(0).to(tl.int64)
    work = work_ptr + program * WORK_FIELDS
    panel_ptr, stride, _n, r, start, stop, _ = chunk_on_wire(wire_ptr, matrices_ptr, work)
    products = gram(panel_ptr + start, stride, tl.minimum(stop, stride) - start, r, RANK, BLOCK)
    offs = tl.arange(0, RANK)[:, None] * RANK + tl.arange(0, RANK)[None, :]
    tl.store(grams_ptr + program * (RANK * RANK) + offs, products)


@triton.jit
def _orthonormalize_kernel(
    wire_ptr, grams_ptr, p_ptr, matrices_ptr, work_ptr, epsilon: tl.float64,
    RANK: tl.constexpr, BLOCK: tl.constexpr, HAS_EPSILON: tl.constexpr,
):  # fmt: skip
    """Compute P ← P T with (P T)ᵀ(P T) = I, T upper triangular, for a chunk of a panel's rows.

    wire_ptr: the panels, all-reduced.
    grams_ptr: _gram_kernel's results.
    p_ptr: the padded panels, written whole. Zero and dependent columns become zeros. A panel with anything
        not finite becomes NaN.
    epsilon: added to the length by which a column is divided.
    HAS_EPSILON: whether epsilon isn't zero.
    Grid: one program per row of work_ptr (PowerSGDWork._orthonormalize_work).

    Every program adds up all partial Gram matrices of its matrix, and computes T. All programs of a matrix
    start from equal bits, so they get equal T. If P is ill-conditioned, every program also computes the Gram
    matrix of P T over the whole panel, instead of waiting for the other programs.
    Reads the panel once and writes it once.
    """
    TYPE: tl.constexpr = p_ptr.dtype.element_ty
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    panel_ptr, stride, n, r, start, stop, matrix_ptr = chunk_on_wire(wire_ptr, matrices_ptr, work)
    out_ptr, out_stride = panel(p_ptr, matrix_ptr, "P", MIN_BLOCK_ROWS)
    out_stride = out_stride.to(tl.int32)
    first_ptr = grams_ptr + tl.load(work + 3) * (RANK * RANK)
    products = sum_chunks(first_ptr, tl.load(work + 4).to(tl.int32), RANK)
    transform, again = triangle(products, diagonal(products, RANK), epsilon, HAS_EPSILON, TYPE, RANK)
    multiply(panel_ptr, stride, out_ptr, out_stride, start, stop, stride, n, r, transform, RANK, BLOCK, False)
    if (again != 0) & (not HAS_EPSILON):
        products = gram_of_product(panel_ptr, stride, stride, n, r, transform, TYPE, RANK, BLOCK)
        second, again = triangle(products, diagonal(products, RANK), epsilon, HAS_EPSILON, TYPE, RANK)
        tl.debug_barrier()
        last = tl.minimum(n, stop)  # rows from here on are padding, or another program's
        multiply(
            out_ptr, out_stride, out_ptr, out_stride, start, stop, stop, last, r, second, RANK, BLOCK, True
        )


def block_of(rank: int, itemsize: int) -> int:
    """Return BLOCK: as many rows at a time as the registers hold. itemsize: of the panels."""
    if rank <= 4:
        return min(8192 // (rank * rank), 1024)
    if rank == 32:
        return 32  # 64 rows spill where products in fp64 are FMAs (sm_100, Triton 3.7)
    return 16384 // itemsize // rank if rank == 16 else 64


def orthonormalize(bucket: PowerSGDBucket) -> list[Launch]:
    """Return the launches that orthonormalize P of every matrix: two, or one beyond rank 32.

    This is step 4 of PowerSGD (Vogels et al. 2019, algorithm 1). All arithmetic is in fp64. With epsilon,
    which is added to the length by which a column is divided (beyond rank 32 up to a relative difference of
    epsilon / length), ill-conditioned panels get no second pass: it would undo the effect of epsilon.
    """
    rank, table = bucket.work.rank, bucket.tables["orthonormalize"]
    options = {
        "RANK": rank,
        "BLOCK": block_of(rank, bucket.p.itemsize),
        "num_warps": NUM_WARPS if rank <= 32 else BLOCKS_NUM_WARPS,
        "maxnreg": MAX_REGISTERS,
        # Up to rank 8, several lanes compute and store one element: if they fused differently, its last bit
        # would differ.
        "enable_fp_fusion": rank > 8,
    }
    if rank > 32:
        arguments = (bucket.p_wire, bucket.p, bucket.matrices, bucket.epsilon)
        options["HAS_EPSILON"] = bucket.has_epsilon
        return [Launch(_orthonormalize_blocks_kernel, len(bucket.matrices), *arguments, **options)]
    grams = Launch(_gram_kernel, len(table), bucket.p_wire, bucket.grams, bucket.matrices, table, **options)
    bases = Launch(
        _orthonormalize_kernel, len(table), bucket.p_wire, bucket.grams, bucket.p, bucket.matrices, table,
        bucket.epsilon, HAS_EPSILON=bucket.has_epsilon, **options,
    )  # fmt: skip
    return [grams, bases]
