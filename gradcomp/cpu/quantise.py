"""Quantisation of blocks in plain torch, to 8 or 4 bits, with one scale in bf16 for each block.

8 bits: code = round(value / scale), scale = largest absolute value / 127. 4 bits: code = the nearest of 16
levels for value / root mean square, levels that are optimal for a normal distribution (Lloyd 1982, Max 1960);
scale = the one for which Σ (value − scale · level)² is least. A block with anything not finite has the scale
NaN, and becomes NaN.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch

# The positive half of the levels of the 16-level Lloyd–Max quantiser of the standard normal distribution.
HALF_LEVELS = (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590)
LEVELS = (*(-level for level in reversed(HALF_LEVELS)), *HALF_LEVELS)
# Halfway between neighbouring levels: a value is nearest to the level between its thresholds.
THRESHOLDS = tuple((low + high) / 2 for low, high in pairwise(LEVELS))

LARGEST_CODE = 127  # of 8 bits
SCALE_DTYPE = torch.bfloat16
# The grid in which the nearest level is looked up.
CELLS_PER_UNIT = 64
FARTHEST_CELL = 4 * CELLS_PER_UNIT  # beyond the last threshold
CHUNK_NUMEL = 1 << 17  # elements that are quantised at a time on a CPU, so that they stay in its caches


def code_bytes(bits: int, block_size: int) -> int:
    """Return the number of bytes that the codes of a block have."""
    return block_size * bits // 8


@torch.no_grad()
def quantise(values: torch.Tensor, *, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
    """Quantise blocks. values −= dequantised values: what is lost is left, zeros where a block isn't finite.

    values: [blocks, size], fp32 or fp64, contiguous. codes: uint8 [blocks, code_bytes(bits, size)]. scales:
    bf16 [blocks], NaN for a block that isn't finite. Raises ValueError for shapes, TypeError for dtypes.
    """
    _check("quantise", values, codes, scales, bits)
    step = max(1, CHUNK_NUMEL // values.shape[1]) if values.device.type == "cpu" else max(1, len(values))
    for first in range(0, len(values), step):
        rows = slice(first, first + step)
        encode = _encode_8 if bits == 8 else _encode_4
        encode(values[rows], codes[rows], scales[rows])


@torch.no_grad()
def dequantise(
    codes: torch.Tensor, scales: torch.Tensor, *, out: torch.Tensor, bits: int, add: bool = False
) -> None:
    """out = scale · code's value; with add, out += that. Shapes, dtypes and errors as in quantise."""
    _check("dequantise", out, codes, scales, bits)
    step = max(1, CHUNK_NUMEL // out.shape[1]) if out.device.type == "cpu" else max(1, len(out))
    for first in range(0, len(out), step):
        rows = slice(first, first + step)
        values = _decode(codes[rows], bits, out[rows])
        scale = scales[rows].to(out.dtype)[:, None]
        if add:
            out[rows].addcmul_(values, scale)
        else:
            torch.mul(values, scale, out=out[rows])


def _check(name: str, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"{name} takes 4 or 8 bits, got {bits}")
    expected = ((torch.float32, torch.float64), (torch.uint8,), (torch.bfloat16,))
    for tensor, dtypes in zip((values, codes, scales), expected, strict=True):
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} takes a tensor of {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    num_blocks, block_size = values.shape
    if codes.shape != (num_blocks, code_bytes(bits, block_size)) or scales.shape != (num_blocks,):
        raise ValueError(
            f"{name}: {num_blocks} blocks of {block_size} values don't have codes of shape "
            f"{tuple(codes.shape)} and scales of shape {tuple(scales.shape)} in {bits} bits"
        )


def _encode_8(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    largest = values.abs().amax(1)
    scale = torch.where(largest.isfinite(), largest / LARGEST_CODE, torch.nan).to(SCALE_DTYPE)
    scales.copy_(scale)
    wide = scale.to(values.dtype)[:, None]
    rounded = (values * _inverse(wide)).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
    codes.view(torch.int8).copy_(rounded)
    _subtract(values, rounded, wide)


def _encode_4(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    # Divided by the largest value first: squares must neither overflow nor vanish.
    largest = values.abs().amax(1, keepdim=True)
    is_finite = largest.isfinite()
    unit = values * _inverse(torch.where(is_finite, largest, 0.0))
    root_mean_square = torch.linalg.vector_norm(unit, dim=1, keepdim=True) * values.shape[1] ** -0.5
    unit *= _inverse(root_mean_square)
    chosen = _nearest(unit.nan_to_num_(0.0))
    decoded = _levels(values).index_select(0, chosen.view(-1)).view(values.shape)
    fit = (unit * decoded).sum(1, keepdim=True) / decoded.square().sum(1, keepdim=True)
    scale = torch.where(is_finite, fit * root_mean_square * largest, torch.nan).to(SCALE_DTYPE)
    scales.copy_(scale[:, 0])
    pairs = chosen.to(torch.uint8).view(torch.int16)
    codes.copy_(pairs | pairs >> 4)
    _subtract(values, decoded, scale.to(values.dtype))


def _nearest(unit: torch.Tensor) -> torch.Tensor:
    """Return the index of the level nearest to each value, the lower one of two as near: int32.

    A cell of a fine grid has at most one threshold, so two tables and a comparison find the level.
    """
    cells = (unit * CELLS_PER_UNIT).floor_().clamp_(-FARTHEST_CELL, FARTHEST_CELL).to(torch.int32)
    cells += FARTHEST_CELL
    below, threshold = _cells(unit)
    level = below.index_select(0, cells.view(-1)).view(unit.shape)
    return level.add_(unit > threshold.index_select(0, cells.view(-1)).view(unit.shape))


@cache
def _tables(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the levels, and for each cell of the grid the level at its start and the threshold in it."""
    thresholds = torch.tensor(THRESHOLDS, dtype=torch.float64)
    starts = torch.arange(-FARTHEST_CELL, FARTHEST_CELL + 1) / CELLS_PER_UNIT
    below = torch.bucketize(starts.double(), thresholds)
    bounds = torch.cat([thresholds, thresholds.new_tensor([torch.inf])])
    tables = torch.tensor(LEVELS), below.to(torch.int32), bounds[below]
    levels, below, threshold = (table.to(device) for table in tables)
    return levels.to(dtype), below, threshold.to(dtype)


def _levels(values: torch.Tensor) -> torch.Tensor:
    return _tables(values.dtype, values.device)[0]


def _cells(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _tables(values.dtype, values.device)[1:]


def _inverse(values: torch.Tensor) -> torch.Tensor:
    """Return 1 / values, and 0 for those whose inverse isn't finite."""
    inverse = 1 / values
    return torch.where(inverse.isfinite(), inverse, 0.0)


def _subtract(values: torch.Tensor, decoded: torch.Tensor, scale: torch.Tensor) -> None:
    values.addcmul_(decoded, scale, value=-1)
    is_finite = scale.isfinite()
    # On a CPU the host may look first, and seldom has to clear anything; elsewhere it would wait.
    if not values.is_cpu or not is_finite.all():
        values.masked_fill_(~is_finite, 0.0)


def _decode(codes: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    if bits == 8:
        return codes.view(torch.int8).to(out.dtype)
    wide = codes.to(torch.int16)
    both = (wide | wide << 4 & 0xF00).view(torch.uint8) & 15
    return _levels(out).index_select(0, both.view(-1).int()).view(out.shape)
