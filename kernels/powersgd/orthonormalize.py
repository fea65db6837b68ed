"""Orthonormalize all panels of P in a bucket: two launches up to rank 32, one launch beyond it.

Up to rank 32: Gram–Schmidt in the inner product of P's Gram matrix. Every panel is read twice, at any rank.

Beyond rank 32: block Gram–Schmidt, 32 columns at a time, one program per matrix.
"""

import triton
import triton.language as tl

from ..launch import MAX_REGISTERS, Launch
from .bucket import PowerSGDBucket
from .gram_schmidt import (
    copy_panel,
    diagonal,
    gram,
    gram_of_product,
    multiply,
    subtract_projection,
    sum_chunks,
    triangle,
)
from .tile import (
    MATRIX_FIELDS,
    MIN_BLOCK_ROWS,
    P_PANEL,
    P_STRIDE,
    P_WIRE,
    ROWS,
    WORK_FIELDS,
    factor_on_wire,
    panel,
)


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
    source_ptr, wire_length, n, r = factor_on_wire(wire_ptr, matrix_ptr, ROWS, P_WIRE)
    out_ptr, stride = panel(p_ptr, matrix_ptr, P_PANEL, P_STRIDE, MIN_BLOCK_ROWS)
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
    panel_ptr, stride, n, r = factor_on_wire(wire_ptr, matrix_ptr, ROWS, P_WIRE)
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
    out_ptr, out_stride = panel(p_ptr, matrix_ptr, P_PANEL, P_STRIDE, MIN_BLOCK_ROWS)
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
    """Return BLOCK: as many rows at a time as the registers hold.

    rank: padded.
    itemsize: bytes of an element in the panels.
    """
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
