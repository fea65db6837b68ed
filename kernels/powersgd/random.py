"""The columns that PowerSGD projects on: Q's own, scaled, or random ones in their place.

The random Q of the first projection is the same on every rank, and independent of all random generators.
"""

import torch
import triton
import triton.language as tl

from ..launch import Launch
from .bucket import SEED, PowerSGDBucket
from .tile import (
    COLS,
    DRAW,
    FIRST_NORM,
    MATRIX_RANK,
    MAX_NORMS,
    NUM_NORMS,
    Q_PANEL,
    RANDOM_PANEL,
    SHRINK,
    WORK_FIELDS,
    dot_rank_block,
    panel,
    tiles_of,
)

NUM_WARPS = 4


@triton.jit
def upper_23_bits(x):
    """Return the upper 23 of 32 bits."""
    return (x.to(tl.uint32, bitcast=True) >> 9).to(tl.int32)


@triton.jit
def randomize(q_ptr, matrix_ptr, first, last, seed, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Fill blocks first .. last of the random Q with numbers of variance 1/m, and its padding with zeros.

    An element depends only on seed + the matrix's draw, and on its row-major position in Q. It is a sum of
    four uniform numbers, which is close to normal. The sum is of integers, so only one division and one
    square root round, both to nearest: all devices get the same bits, no matter what their compilers fuse.
    """
    RANK_BLOCK: tl.constexpr = dot_rank_block(RANK)
    random_panel, stride = panel(q_ptr, matrix_ptr, "random Q", BLOCK)
    m = tl.load(matrix_ptr + COLS)
    r = tl.load(matrix_ptr + MATRIX_RANK)
    seed += tl.load(matrix_ptr + DRAW)
    # The sum of four numbers uniform in 0 .. 1 has variance 1/3. Here they are integers below 2²³: fp32 holds
    # their sum exactly.
    spread = tl.sqrt_rn(tl.div_rn(m.to(tl.float32), tl.full((), 3.0, tl.float32))) * 8388608.0
    for block in range(first, last):
        offs_row = (block * BLOCK + tl.arange(0, BLOCK))[:, None]
        for rank_start in range(0, RANK, RANK_BLOCK):
            offs_rank = (rank_start + tl.arange(0, RANK_BLOCK))[None, :]
            a, b, c, d = tl.randint4x(seed, (offs_row * r + offs_rank).to(tl.int32))
            total = upper_23_bits(a) + upper_23_bits(b) + upper_23_bits(c) + upper_23_bits(d)
            value = tl.div_rn((total - 16777216).to(tl.float32), spread)
            value = tl.where((offs_row < m) & (offs_rank < r), value, 0.0)
            tl.store(random_panel + offs_rank * stride + offs_row, value.to(q_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["seed"])
def _random_q_kernel(
    q_ptr, matrices_ptr, work_ptr, seed: tl.int64,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill all random panels.

    q_ptr: the panels of Q, and behind them the random panels.
    Grid: one program per NEXT_Q row of work_ptr; these rows are its first ones.
    """
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    matrix_ptr, _norm, first, last = tiles_of(work, matrices_ptr)
    randomize(q_ptr, matrix_ptr, first, last, seed, RANK, BLOCK)


def random_q(bucket: PowerSGDBucket) -> Launch:
    """Return the launch of _random_q_kernel, needed once, before the first step. Slot: seed."""
    work = bucket.work
    return Launch(
        _random_q_kernel, work.num_norms, bucket.q, bucket.matrices, bucket.tables["reconstruct"], SEED,
        RANK=work.rank, BLOCK=work.block_cols, num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


# A column of Q shorter than 1e-30 is replaced: the inverse of its length nears fp32's largest number. Panels
# hold SHRINK · Q.
SHORTEST_SQUARED = tl.constexpr(1e-60 * SHRINK.value**2)
# fp64 numbers have 52 bits of fraction, and above it an exponent biased by 1023.
FRACTION = tl.constexpr(52)
BIAS = tl.constexpr(1023)


@triton.jit
def direction(
    q_ptr, norms_ptr, matrix_ptr, offs_rank, RANK: tl.constexpr, BLOCK_COLS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Return (start of the panel in q_ptr, SHRINK · factor in fp64) for the columns offs_rank to project on.

    A column is Q's own, or a random one where Q's is zero or not finite. A random column has the factor 1.
    If UNIT, Q's own is scaled to length 1. Otherwise it is scaled to a length over 1/2 and up to 1, by a
    power of two from the bits of its squared length: fp64 divisions and roots take most GPUs much longer.
    """
    offs_norm = tl.arange(0, MAX_NORMS)[:, None]
    mask = offs_norm < tl.load(matrix_ptr + NUM_NORMS)
    offs = (tl.load(matrix_ptr + FIRST_NORM) + offs_norm) * RANK + offs_rank[None, :]
    squared = tl.sum(tl.load(norms_ptr + offs, mask=mask, other=0.0), axis=0)
    alive = (squared >= SHORTEST_SQUARED) & (squared < float("inf"))
    start = tl.where(alive, tl.load(matrix_ptr + Q_PANEL), tl.load(matrix_ptr + RANDOM_PANEL))
    squared = tl.where(alive, squared, 1.0)
    if UNIT:
        factor = 1.0 / tl.sqrt(squared)
    else:
        # k with 4ᵏ⁻¹ < squared <= 4ᵏ. The 1 makes a power of two the next smaller number, of lower exponent.
        exponent = ((squared.to(tl.int64, bitcast=True) - 1) >> FRACTION) - BIAS
        k = (exponent >> 1) + 1
        factor = ((-k + BIAS) << FRACTION).to(tl.float64, bitcast=True)
    return start // BLOCK_COLS * BLOCK_COLS, factor * SHRINK


def is_kept(squared: torch.Tensor) -> torch.Tensor:
    """Return which columns of these squared lengths, fp64, direction takes from Q, rather than at random."""
    return torch.ge(squared, SHORTEST_SQUARED.value) & torch.lt(squared, torch.inf)


def scale_of(squared: torch.Tensor, unit: bool) -> torch.Tensor:
    """Return direction's factors, as fp64, for columns of these squared lengths. unit: its UNIT."""
    squared = torch.where(is_kept(squared), squared, 1.0)
    if unit:
        return 1.0 / squared.sqrt()
    k = ((((squared.view(torch.int64) - 1) >> FRACTION.value) - BIAS.value) >> 1) + 1
    scale: torch.Tensor = ((BIAS.value - k) << FRACTION.value).view(torch.float64)
    return scale
