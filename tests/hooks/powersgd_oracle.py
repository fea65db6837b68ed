"""Buckets to call hooks on, their gradients, and which of their tensors PowerSGD compresses."""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch

from gradcomp.comm.bucket import GradBucket
from tests.oracle import PowerSGDOracle


def compressed(shapes: Sequence[Sequence[int]], rank: int, min_compression_rate: float = 2) -> list[int]:
    """Return the compressed tensors' indices in the order of the Q, by shape. Vectors aren't compressed."""
    return PowerSGDOracle(shapes, rank, min_compression_rate).compressed


def starts(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the offset of each tensor in the bucket."""
    return list(accumulate((math.prod(shape) for shape in shapes), initial=0))


def positions(shapes: Sequence[Sequence[int]], chosen: Sequence[int]) -> torch.Tensor:
    """Return a mask [numel] of the chosen tensors' elements."""
    begin = starts(shapes)
    mask = torch.zeros(begin[-1], dtype=torch.bool)
    for i in chosen:
        mask[begin[i] : begin[i + 1]] = True
    return mask


class Bucket(GradBucket):
    """A bucket of gradients of these shapes. Its parameters exist in this bucket only."""

    def __init__(
        self,
        buffer: torch.Tensor,
        shapes: Sequence[Sequence[int]] | None = None,
        index: int = 0,
        is_last: bool = True,
    ):
        shapes = [tuple(buffer.shape)] if shapes is None else shapes
        parameters = [torch.empty(tuple(shape), dtype=buffer.dtype) for shape in shapes]
        super().__init__(index, buffer, parameters, is_last)


def random_gradient(
    shapes: Sequence[Sequence[int]], rank: int, step: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return a rank's flat gradient at a step: a term common to all ranks and steps, plus own noise."""
    numel = starts(shapes)[-1]
    common = torch.randn(numel, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    own = torch.Generator().manual_seed(10_000 + 1_000 * rank + step)
    return (common + torch.randn(numel, generator=own, dtype=torch.float64)).to(dtype)


def relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ‖result − expected‖ / ‖expected‖; inf if a value is not finite."""
    difference = (result.double() - expected.double()).norm() / expected.double().norm()
    return float(difference) if difference.isfinite() else math.inf
