"""Orthonormalize all panels of P in a bucket: two launches up to rank 32, one launch beyond it.

Up to rank 32: Gram–Schmidt in the inner product of P's Gram matrix. Every panel is read twice, at any rank.

Beyond rank 32: block Gram–Schmidt, 32 columns at a time, one program per matrix.
"""

import torch
import triton
import triton.language as tl

from ..device import is_fp64_slow
from ..launch import MAX_REGISTERS, Launch
from . import gram_schmidt as in_fp64
from . import gram_schmidt_pairs as in_pairs
from .gram_schmidt import copy_panel, gram, multiply, subtract_projection
from .tile import (
    MATRIX_FIELDS,
    MATRIX_RANK,
    MIN_BLOCK_ROWS,
    P_PANEL,
    P_STRIDE,
    P_WIRE,
    ROWS,
    WORK_FIELDS,
    panel,
    wire_start,
    wire_stride,
)
from .triangle import DEPENDENT, DEPENDENT_FP64, diagonal, triangle

BLOCKS_NUM_WARPS = 8


@triton.jit
def _orthonormalize_blocks_kernel(
    wire_ptr,
    p_ptr,
    matrices_ptr,
    epsilon: tl.float64,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute P ← P T with (P T)ᵀ(P T) = I, T upper triangular, in fp64, for any RANK.

    This is block Gram–Schmidt with RANK_BLOCK columns at a time. Each block is orthonormalized against the
    blocks before it, then within itself; without epsilon, both are done twice. For the arguments, and for
    zero, dependent and nonfinite columns, see _orthonormalize_kernel.

    Grid: one program per matrix, of any length: ranks beyond 32 are rare.
    Each time it reads a block about 5 times, and 5 times more per block before it.
    """
    TOLERANCE: tl.constexpr = DEPENDENT_FP64 if p_ptr.dtype.element_ty == tl.float64 else DEPENDENT
    matrix_ptr = matrices_ptr + tl.program_id(0).to(tl.int64) * MATRIX_FIELDS
    n = tl.load(matrix_ptr + ROWS).to(tl.int32)
    r = tl.load(matrix_ptr + MATRIX_RANK).to(tl.int32)
    source_ptr = wire_start(wire_ptr, tl.load(matrix_ptr + P_WIRE))
    wire_length = wire_stride(n, wire_ptr.dtype.element_ty)
    out_ptr, stride = panel(p_ptr, matrix_ptr, P_PANEL, P_STRIDE, MIN_BLOCK_ROWS)
    stride = stride.to(tl.int32)
    added = tl.zeros((RANK_BLOCK,), tl.float64) + epsilon

    for rank_start in range(0, RANK, RANK_BLOCK):
        block_ptr = out_ptr + rank_start * stride
        cols = tl.minimum(r - rank_start, RANK_BLOCK)
        from_ptr = source_ptr + rank_start * wire_length
        copy_panel(from_ptr, wire_length, block_ptr, stride, wire_length, cols, RANK_BLOCK, BLOCK)
        tl.debug_barrier()
        for _ in range(tl.where(epsilon == 0.0, 2, 1)):
            own = diagonal(gram(block_ptr, stride, stride, cols, RANK_BLOCK, BLOCK), RANK_BLOCK)
            for done in range(0, rank_start, RANK_BLOCK):
                subtract_projection(block_ptr, out_ptr + done * stride, stride, n, cols, RANK_BLOCK, BLOCK)
            products = gram(block_ptr, stride, stride, cols, RANK_BLOCK, BLOCK)
            transform, _, _ = triangle(products, products, own, added, TOLERANCE, RANK_BLOCK)
            multiply(
                block_ptr, stride, block_ptr, stride, 0, stride, stride, n, cols, transform,
                RANK_BLOCK, BLOCK, True,
            )  # fmt: skip
            tl.debug_barrier()


def orthonormalize_blocks(
    wire: torch.Tensor, matrices: torch.Tensor, *, out: torch.Tensor, rank: int, epsilon: float, block: int
) -> Launch:
    """Return the launch that orthonormalizes panels of more than 32 columns; see `orthonormalize`.

    rank: padded, a multiple of 32.
    block: the number of rows that a program processes at once.
    """
    return Launch(
        _orthonormalize_blocks_kernel,
        len(matrices),
        wire,
        out,
        matrices,
        epsilon,
        RANK=rank,
        RANK_BLOCK=32,
        BLOCK=block,
        num_warps=BLOCKS_NUM_WARPS,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=True,
    )


# Every warp repeats the r×r computations, which would take longer in more warps. A long panel has more
# programs instead.
NUM_WARPS = 4


@triton.jit
def chunk_on_wire(wire_ptr, matrices_ptr, work):
    """Return (pointer to a program's panel, its stride, n, r, first row, one past the last, matrix_ptr).

    On the wire, rows from n to the stride are zeros. The last program's rows include the padding of P's
    panel, which is longer than the padding on the wire.
    """
    matrix_ptr = matrices_ptr + tl.load(work) * MATRIX_FIELDS
    n = tl.load(matrix_ptr + ROWS).to(tl.int32)
    r = tl.load(matrix_ptr + MATRIX_RANK).to(tl.int32)
    panel_ptr = wire_start(wire_ptr, tl.load(matrix_ptr + P_WIRE))
    # start and stop are multiples already; dividing shows the compiler that they are.
    start = tl.load(work + 1).to(tl.int32) // MIN_BLOCK_ROWS * MIN_BLOCK_ROWS
    stop = tl.load(work + 2).to(tl.int32) // MIN_BLOCK_ROWS * MIN_BLOCK_ROWS
    return panel_ptr, wire_stride(n, wire_ptr.dtype.element_ty), n, r, start, stop, matrix_ptr


@triton.jit
def _gram_kernel(
    wire_ptr,
    scratch_ptr,
    matrices_ptr,
    work_ptr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Compute PᵀP over a chunk of a panel's rows: in fp64, or with PAIRS in pairs of fp32.

    wire_ptr: the panels, all-reduced.
    scratch_ptr: slots. The first slots get the results, one per program.
    Grid: one program per row of work_ptr (PowerSGDWork._orthonormalize_work).
    Reads the panels once. With PAIRS it reads them once more for the scale, and from the cache once per pair
    of column blocks.
    """
    program = tl.program_id(0).to(tl.int64)
    work = work_ptr + program * WORK_FIELDS
    panel_ptr, stride, _n, r, start, stop, _ = chunk_on_wire(wire_ptr, matrices_ptr, work)
    panel_ptr += start
    length = tl.minimum(stop, stride) - start
    if PAIRS:
        slot_ptr = scratch_ptr + program * (2 * RANK * (RANK + 1))
        in_pairs.store_scale(panel_ptr, stride, length, r, slot_ptr, RANK, BLOCK)
        tl.debug_barrier()
        in_pairs.store_gram(
            panel_ptr, stride, length, length, r, slot_ptr, slot_ptr,
            RANK, BLOCK, LOG2_BLOCK, COLS, False,
        )  # fmt: skip
    else:
        products = in_fp64.gram(panel_ptr, stride, length, r, RANK, BLOCK)
        offs = tl.arange(0, RANK)[:, None] * RANK + tl.arange(0, RANK)[None, :]
        tl.store(scratch_ptr + program * (RANK * (RANK + 1)) + offs, products)


@triton.jit
def chunk_in_fp64(
    panel_ptr, stride, out_ptr, out_stride, start, stop, n, r, slots_ptr, count, epsilon,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Orthonormalize one program's rows in fp64; see _orthonormalize_kernel.

    start, stop: the program's rows.
    slots_ptr, count: the partial Gram matrices of the matrix, and their number.
    """
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    TOLERANCE: tl.constexpr = DEPENDENT_FP64 if TYPE == tl.float64 else DEPENDENT
    last = tl.minimum(n, stop)  # rows from here on are padding, or another program's
    products = in_fp64.sum_chunks(slots_ptr, count, RANK)
    own = diagonal(products, RANK)
    transform, _lo, again = triangle(products, products, own, epsilon, TOLERANCE, RANK)
    in_fp64.multiply(
        panel_ptr, stride, out_ptr, out_stride, start, stop, stride, n, r, transform, RANK, BLOCK, False
    )
    if (again != 0) & (epsilon == 0.0):
        products = in_fp64.gram_of_product(panel_ptr, stride, stride, n, r, transform, TYPE, RANK, BLOCK)
        own = diagonal(products, RANK)
        second, _lo, again = triangle(products, products, own, epsilon, TOLERANCE, RANK)
        tl.debug_barrier()
        in_fp64.multiply(
            out_ptr, out_stride, out_ptr, out_stride, start, stop, stop, last, r, second, RANK, BLOCK, True
        )


@triton.jit
def chunk_in_pairs(
    panel_ptr, stride, out_ptr, out_stride, start, stop, n, r, slots_ptr, count,
    triangle_ptr, gram_ptr, epsilon, RANK: tl.constexpr, BLOCK: tl.constexpr, GRAM_BLOCK: tl.constexpr,
    LOG2_BLOCK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Orthonormalize one program's rows in pairs of fp32; see _orthonormalize_kernel.

    start, stop: the program's rows.
    slots_ptr, count: the partial Gram matrices of the matrix, and their number.
    triangle_ptr, gram_ptr: slots of the program alone.
    """
    last = tl.minimum(n, stop)  # rows from here on are padding, or another program's
    hi, lo, scale = in_pairs.sum_chunks(slots_ptr, count, triangle_ptr, RANK)
    epsilon = (tl.full((), 1.0, tl.float64) * epsilon).to(tl.float32)
    added = scale * epsilon
    hi, lo, again = triangle(hi, lo, diagonal(hi, RANK), added, DEPENDENT, RANK)
    in_pairs.store_transpose(triangle_ptr, hi, lo, RANK)
    tl.debug_barrier()
    in_pairs.multiply(
        panel_ptr, stride, out_ptr, out_stride, start, stop, stride, last, r, triangle_ptr,
        RANK, BLOCK, COLS, False,
    )  # fmt: skip
    if (again != 0) & (epsilon == 0.0):
        in_pairs.store_gram(
            panel_ptr, stride, stride, n, r, triangle_ptr, gram_ptr,
            RANK, GRAM_BLOCK, LOG2_BLOCK, COLS, True,
        )  # fmt: skip
        tl.debug_barrier()
        hi, lo = in_pairs.load_square(gram_ptr, RANK)
        hi, lo, again = triangle(hi, lo, diagonal(hi, RANK), added, DEPENDENT, RANK)
        in_pairs.store_transpose(triangle_ptr, hi, lo, RANK)
        tl.store(triangle_ptr + 2 * RANK * RANK + tl.arange(0, RANK), tl.full((RANK,), 1.0, tl.float32))
        tl.debug_barrier()
        in_pairs.multiply(
            out_ptr, out_stride, out_ptr, out_stride, start, stop, stop, last, r, triangle_ptr,
            RANK, BLOCK, COLS, True,
        )  # fmt: skip


@triton.jit
def _orthonormalize_kernel(
    wire_ptr,
    scratch_ptr,
    p_ptr,
    matrices_ptr,
    work_ptr,
    epsilon: tl.float64,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    GRAM_BLOCK: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Compute P ← P T with (P T)ᵀ(P T) = I, T upper triangular, for a chunk of a panel's rows.

    wire_ptr: the panels, all-reduced.
    scratch_ptr: slots, with _gram_kernel's results in the first ones.
    p_ptr: the padded panels, written whole. Zero and dependent columns become zeros. A panel with anything
        not finite becomes NaN.
    epsilon: added to the length by which a column is divided.
    Grid: one program per row of work_ptr (PowerSGDWork._orthonormalize_work).

    Every program adds up all partial Gram matrices of its matrix, and computes T. All programs of a matrix
    start from equal bits, so they get equal T. If P is ill-conditioned, every program also computes the Gram
    matrix of P T over the whole panel, instead of waiting for the other programs.
    Reads the panel once and writes it once.
    """
    program = tl.program_id(0).to(tl.int64)
    work = work_ptr + program * WORK_FIELDS
    panel_ptr, stride, n, r, start, stop, matrix_ptr = chunk_on_wire(wire_ptr, matrices_ptr, work)
    first_slot = tl.load(work + 3)
    count = tl.load(work + 4).to(tl.int32)
    out_ptr, out_stride = panel(p_ptr, matrix_ptr, P_PANEL, P_STRIDE, MIN_BLOCK_ROWS)
    out_stride = out_stride.to(tl.int32)
    if PAIRS:
        SIZE: tl.constexpr = 2 * RANK * (RANK + 1)
        own_ptr = scratch_ptr + (tl.num_programs(0) + 2 * program) * SIZE
        chunk_in_pairs(
            panel_ptr, stride, out_ptr, out_stride, start, stop, n, r,
            scratch_ptr + first_slot * SIZE, count, own_ptr, own_ptr + SIZE, epsilon,
            RANK, BLOCK, GRAM_BLOCK, LOG2_BLOCK, COLS,
        )  # fmt: skip
    else:
        chunk_in_fp64(
            panel_ptr, stride, out_ptr, out_stride, start, stop, n, r,
            scratch_ptr + first_slot * (RANK * (RANK + 1)), count, epsilon, RANK, BLOCK,
        )  # fmt: skip


def launch_shape(rank: int, itemsize: int) -> int:
    """Return BLOCK in fp64: as many rows at a time as the registers hold.

    rank: padded.
    itemsize: bytes of an element in the panels.
    """
    if rank <= 4:
        return min(8192 // (rank * rank), 1024)
    if rank == 32:
        return 32  # 64 rows spill where products in fp64 are FMAs (sm_100, Triton 3.7)
    return 16384 // itemsize // rank if rank == 16 else 64


def orthonormalize(
    wire: torch.Tensor,
    matrices: torch.Tensor,
    work: torch.Tensor,
    *,
    scratch: torch.Tensor,
    out: torch.Tensor,
    rank: int,
    epsilon: float = 0.0,
    pairs: bool | None = None,
) -> list[Launch]:
    """Return the launches that orthonormalize P of every matrix of a bucket: two, or one beyond rank 32.

    This is step 4 of PowerSGD (Vogels et al. 2019, algorithm 1).

    wire: the all-reduced p_wire.
    matrices: int64, PowerSGDWork's matrix_table.
    work: int64, PowerSGDWork's orthonormalize_work.
    scratch: fp64, PowerSGDWork's orthonormalize_numel elements.
    out: the padded panels, fp32 (fp64 for an fp64 bucket).
    rank: PowerSGDWork's.
    epsilon: torch's orthogonalization_epsilon, added to the length by which a column is divided (beyond rank
        32 up to a relative difference of epsilon / length). With epsilon, ill-conditioned panels get no
        second pass: it would undo the effect of epsilon.
    pairs: compute in pairs of fp32, not in fp64; by default, if the device's fp64 is slow. An fp64 bucket and
        ranks beyond 32 are always computed in fp64.
    """
    if rank > 32:
        block = launch_shape(rank, out.itemsize)
        return [orthonormalize_blocks(wire, matrices, out=out, rank=rank, epsilon=epsilon, block=block)]
    pairs = is_fp64_slow(wire.device) if pairs is None else pairs
    pairs = pairs and out.dtype == torch.float32
    return both_launches(wire, scratch, out, matrices, work, epsilon, rank, pairs=pairs)


def both_launches(
    wire: torch.Tensor,
    scratch: torch.Tensor,
    out: torch.Tensor,
    matrices: torch.Tensor,
    work: torch.Tensor,
    epsilon: float,
    rank: int,
    *,
    pairs: bool,
) -> list[Launch]:
    """Return the launches of _gram_kernel and _orthonormalize_kernel.

    scratch: three slots per program. First come the partial Gram matrices of all programs. Then, for pairs,
        every program has two slots of its own: for its triangle, and for the Gram matrix of its second pass.
    """
    columns = min(rank, 8)
    block = launch_shape(rank, out.itemsize)
    gram_block = 4096 // (columns * columns) if pairs else block
    constants = {"RANK": rank, "LOG2_BLOCK": gram_block.bit_length() - 1, "COLS": columns, "PAIRS": pairs}
    # In pairs a fused product would be wrong. Up to rank 8, several lanes compute and store one element: if
    # they fused differently, its last bit would differ.
    options = {"num_warps": NUM_WARPS, "maxnreg": MAX_REGISTERS, "enable_fp_fusion": rank > 8 and not pairs}
    scratch = scratch.view(torch.float32) if pairs else scratch
    return [
        Launch(
            _gram_kernel,
            len(work),
            wire,
            scratch,
            matrices,
            work,
            BLOCK=gram_block,
            **constants,
            **options,
        ),
        Launch(
            _orthonormalize_kernel,
            len(work),
            wire,
            scratch,
            out,
            matrices,
            work,
            epsilon,
            BLOCK=512 if pairs else block,
            GRAM_BLOCK=gram_block,
            **constants,
            **options,
        ),
    ]
