"""One PowerSGD step in float64, for all ranks at once and written from the paper; and buckets to try hooks on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass
class Step:
    """What one step gives: the output [numel], every rank's error [numel], and the matrices' new Q [m, r]."""

    output: torch.Tensor
    errors: list[torch.Tensor]
    qs: list[torch.Tensor]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A gradient's (n, m): its first dimension against the others."""
    return shape[0], math.prod(shape[1:])


def compressed(shapes: Sequence[Sequence[int]], rank: int, min_compression_rate: float = 2) -> list[int]:
    """Which tensors are compressed, those of one shape beside each other: the order of the Q. Never vectors."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, shape in enumerate(shapes):
        n, m = matrix_shape(shape)
        if len(shape) > 1 and (n + m) * min(n, m, rank) * min_compression_rate < n * m:
            groups.setdefault((n, m), []).append(i)
    return [i for group in groups.values() for i in group]


def starts(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Where each tensor begins in the bucket."""
    return list(accumulate((math.prod(shape) for shape in shapes), initial=0))


def positions(shapes: Sequence[Sequence[int]], chosen: Sequence[int]) -> torch.Tensor:
    """A mask [numel] of the chosen tensors' elements."""
    begin = starts(shapes)
    mask = torch.zeros(begin[-1], dtype=torch.bool)
    for i in chosen:
        mask[begin[i] : begin[i + 1]] = True
    return mask


def powersgd_step(
    shapes: Sequence[Sequence[int]],
    gradients: Sequence[torch.Tensor],
    errors: Sequence[torch.Tensor],
    qs: Sequence[torch.Tensor],
    order: Sequence[int],
) -> Step:
    """Algorithm 2 of Vogels et al. 2019, for the ranks' flat buckets.

    gradients, errors: one [numel] per rank. qs: a basis [m, r] for each compressed tensor, whose numbers are
    in order. Tensors not in order are averaged.
    """
    gradients = [gradient.double() for gradient in gradients]
    begin = starts(shapes)
    output = torch.stack(gradients).mean(0)
    new_errors = [torch.zeros_like(output) for _ in gradients]
    new_qs = []
    for i, q in zip(order, qs, strict=True):
        part, (n, m) = slice(begin[i], begin[i + 1]), matrix_shape(shapes[i])
        inputs = [(g + e.double())[part].view(n, m) for g, e in zip(gradients, errors, strict=True)]
        basis = torch.linalg.qr(q.double()).Q
        p = torch.linalg.qr(torch.stack([matrix @ basis for matrix in inputs]).mean(0)).Q
        new_q = torch.stack([matrix.mT @ p for matrix in inputs]).mean(0)
        result = p @ new_q.mT
        output[part] = result.reshape(-1)
        for error, matrix in zip(new_errors, inputs, strict=True):
            error[part] = (matrix - result).reshape(-1)
        new_qs.append(new_q)
    return Step(output, new_errors, new_qs)


def projector(basis: torch.Tensor) -> torch.Tensor:
    """Onto the span of the columns: the same for every basis of it."""
    basis = torch.linalg.qr(basis.double()).Q
    return basis @ basis.mT


class Bucket:
    """Gradients of some shapes as the hooks see them, with GradBucket's public methods."""

    def __init__(
        self,
        buffer: torch.Tensor,
        shapes: Sequence[Sequence[int]] | None = None,
        index: int = 0,
        is_last: bool = True,
    ):
        self._buffer, self._index, self._is_last = buffer, index, is_last
        self._shapes = [tuple(buffer.shape)] if shapes is None else [tuple(shape) for shape in shapes]
        self._parameters = [torch.empty(shape, dtype=buffer.dtype) for shape in self._shapes]

    def index(self):
        return self._index

    def buffer(self):
        return self._buffer

    def set_buffer(self, buffer):
        self._buffer = buffer

    def gradients(self):
        parts = self._buffer.split([math.prod(shape) for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def parameters(self):
        return self._parameters

    def is_last(self):
        return self._is_last


def random_gradient(
    shapes: Sequence[Sequence[int]], rank: int, step: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A rank's flat bucket gradient at a step: a part common to all ranks and steps, and noise of its own."""
    numel = starts(shapes)[-1]
    common = torch.randn(numel, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    own = torch.Generator().manual_seed(10_000 + 1_000 * rank + step)
    return (common + torch.randn(numel, generator=own, dtype=torch.float64)).to(dtype)


def relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    """‖result − expected‖ / ‖expected‖; inf where a value is not finite."""
    difference = (result.double() - expected.double()).norm() / expected.double().norm()
    return float(difference) if difference.isfinite() else math.inf
