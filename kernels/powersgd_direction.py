"""The columns that PowerSGD projects on: Q's, scaled by a power of two, or random ones in their place."""

import torch
import triton
import triton.language as tl

from .powersgd_tile import FIRST_NORM, MAX_NORMS, NUM_NORMS, Q_PANEL, RANDOM_PANEL, SHRINK

# A column of Q is replaced if it is shorter than 1e-30: the inverse of its length nears the end of fp32. The
# panels have SHRINK · Q.
SHORTEST_SQUARED = tl.constexpr(1e-60 * SHRINK.value**2)
# fp64 numbers have 52 bits of fraction below an exponent, which is biased by 1023.
FRACTION = tl.constexpr(52)
BIAS = tl.constexpr(1023)


@triton.jit
def direction(
    q_ptr, norms_ptr, matrix_ptr, offs_rank, RANK: tl.constexpr, BLOCK_COLS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Return (start in q_ptr, SHRINK · factor in fp64) of the columns offs_rank of the Q to project on.

    A column is Q's own, or a random one where Q's is zero or not finite, with factor 1. If UNIT, Q's own is
    scaled to length 1; else to a length over 1/2 and up to 1, by the power of two that the bits of its
    squared length give: fp64 divisions and roots take most GPUs much longer.
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
        # k with 4ᵏ⁻¹ < squared <= 4ᵏ: of a power of two the next smaller number has the lower exponent.
        exponent = ((squared.to(tl.int64, bitcast=True) - 1) >> FRACTION) - BIAS
        k = (exponent >> 1) + 1
        factor = ((-k + BIAS) << FRACTION).to(tl.float64, bitcast=True)
    return start // BLOCK_COLS * BLOCK_COLS, factor * SHRINK


def is_kept(squared: torch.Tensor) -> torch.Tensor:
    """Return which columns of these squared lengths (fp64) direction takes from Q, not at random."""
    return torch.ge(squared, SHORTEST_SQUARED.value) & torch.lt(squared, torch.inf)


def scale_of(squared: torch.Tensor, unit: bool) -> torch.Tensor:
    """Return what direction multiplies columns of these squared lengths (fp64) by, as fp64."""
    squared = torch.where(is_kept(squared), squared, 1.0)
    if unit:
        return 1.0 / squared.sqrt()
    k = ((((squared.view(torch.int64) - 1) >> FRACTION.value) - BIAS.value) >> 1) + 1
    scale: torch.Tensor = ((BIAS.value - k) << FRACTION.value).view(torch.float64)
    return scale
