"""The random Q of PowerSGD's first projection: the same on every rank, and independent of all generators."""

import torch
import triton
import triton.language as tl

from .launch import launch
from .powersgd_tile import (
    COLS,
    FIRST_RANDOM,
    MATRIX_FIELDS,
    MATRIX_RANK,
    Q_STRIDE,
    RANDOM_PANEL,
    WORK_FIELDS,
    panel,
)

NUM_WARPS = 4


@triton.jit
def upper_23_bits(x):
    """Return the upper 23 of 32 bits."""
    return (x.to(tl.uint32, bitcast=True) >> 9).to(tl.int32)


@triton.jit
def randomise(
    q_ptr,
    matrix_ptr,
    first,
    last,
    seed,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill blocks first .. last of the random Q with numbers of variance 1/m, and its padding with zeros.

    An element depends only on the seed and on its position among all Q of the bucket, row-major. It is a sum
    of four uniform numbers, which is close to normal, added as integers. Only one division and one square
    root round, both to nearest, so that no two devices differ, whatever their compiler fuses.
    """
    random_panel, stride = panel(q_ptr, matrix_ptr, RANDOM_PANEL, Q_STRIDE, BLOCK)
    m = tl.load(matrix_ptr + COLS)
    r = tl.load(matrix_ptr + MATRIX_RANK)
    first_random = tl.load(matrix_ptr + FIRST_RANDOM)
    # The sum of four uniform numbers has variance 1/3. They are integers below 2²³, whose sum fp32 holds
    # exactly.
    spread = tl.sqrt_rn(tl.div_rn(m.to(tl.float32), tl.full((), 3.0, tl.float32))) * 8388608.0
    for block in range(first, last):
        offs_row = (block * BLOCK + tl.arange(0, BLOCK))[:, None]
        for rank_start in range(0, RANK, RANK_BLOCK):
            offs_rank = (rank_start + tl.arange(0, RANK_BLOCK))[None, :]
            a, b, c, d = tl.randint4x(seed, (first_random + offs_row * r + offs_rank).to(tl.int32))
            total = upper_23_bits(a) + upper_23_bits(b) + upper_23_bits(c) + upper_23_bits(d)
            value = tl.div_rn((total - 16777216).to(tl.float32), spread)
            value = tl.where((offs_row < m) & (offs_rank < r), value, 0.0)
            tl.store(random_panel + offs_rank * stride + offs_row, value.to(q_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["seed"])
def _random_q_kernel(
    q_ptr,
    matrices_ptr,
    work_ptr,
    seed: tl.int64,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill all random panels. Grid: one program per NEXT_Q row of work_ptr, which are the first rows."""
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    matrix_ptr = matrices_ptr + tl.load(work + 1) * MATRIX_FIELDS
    first = tl.load(work + 3).to(tl.int32)
    last = tl.load(work + 4).to(tl.int32)
    randomise(q_ptr, matrix_ptr, first, last, seed, RANK, RANK_BLOCK, BLOCK)


def random_q(
    matrices: torch.Tensor,
    work: torch.Tensor,
    *,
    out: torch.Tensor,
    num_programs: int,
    seed: int,
    rank: int,
    block_cols: int,
) -> None:
    """Fill the random panels of out, which stand in for columns of Q that are zero or not finite.

    Needed once, before the first step. matrices, work: int64 tables of LowRankWork (matrix_table,
    reconstruct_work), of which the first num_programs (num_norms) rows are used. out: q of project.
    """
    if num_programs:
        launch(_random_q_kernel, num_programs)(
            out,
            matrices,
            work,
            seed,
            RANK=rank,
            RANK_BLOCK=min(rank, 32),
            BLOCK=block_cols,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
