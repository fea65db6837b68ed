"""Reference implementations of every hook, for all ranks at once: in float64, from the papers, written to be read.

It shares nothing with the kernels or with gradcomp.cpu. Gradients are [rank][index]: for every rank a list
of tensors. Averages are [index], in float64.

    allreduce_hook                              mean
    fp16_compress_hook, bf16_compress_hook      sixteen_bit_mean
    powerSGD_hook                               PowerSGDOracle, after start_powerSGD_iter steps of mean
    batched_powerSGD_hook                       BatchedPowerSGDOracle, likewise
    fp16_compress_wrapper(...) of one of them   the same, of rounded gradients
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

Gradients = Sequence[Sequence[torch.Tensor]]
Shape = Sequence[int]

# A direction shorter than this part of the longest is rounding of float64, and none.
VANISHING = 1e-12


def mean(gradients: Gradients) -> list[torch.Tensor]:
    """(1/W) Σ_w g_w, for W ranks: what allreduce_hook computes and every other hook approximates."""
    return [torch.stack([_wide(g) for g in of_ranks]).mean(0) for of_ranks in zip(*gradients, strict=True)]


def sixteen_bit_mean(gradients: Gradients, dtype: torch.dtype) -> list[torch.Tensor]:
    """The average of fp16_compress_hook (torch.float16) or bf16_compress_hook (torch.bfloat16).

    Every rank divides by W and rounds once to the dtype; the sum is formed in the dtype, rank after rank.
    With two ranks the hook has the same bits. With more, a backend may add in another order, and the hook's
    1 / W is rounded to float32.
    """
    return [
        _wide(functools.reduce(torch.add, [(_wide(g) / len(gradients)).to(dtype) for g in of_ranks]))
        for of_ranks in zip(*gradients, strict=True)
    ]


def rounded(gradients: Gradients, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """What a hook wrapped in fp16_compress_wrapper or bf16_compress_wrapper gets instead of the gradients.

    Undivided, so that in float16 all beyond ±65504 is infinite. The wrapped hook rounds to the dtype wherever
    it would to the bucket's; its oracle doesn't.
    """
    return [[g.to(dtype) for g in of_rank] for of_rank in gradients]


class PowerSGDOracle:
    """PowerSGD: algorithms 1 and 2 of Vogels, Karimireddy and Jaggi (NeurIPS 2019), tensor by tensor.

    shapes: of the tensors. A tensor of two or more dimensions is a matrix M [n, m], its first dimension
    against the others, and compressed if (n + m) · r · min_compression_rate < n · m, where
    r = min(n, m, rank). All others are averaged exactly.

    compressed: the indices of the compressed tensors, those with equal n and m beside each other.
    qs: what the next step projects on, [m, r] for each of these. Only its span matters. None before the first
        step and, without warm start, before every step: then `step` has to be given some.
    errors: [rank][index], float64: what each rank's gradients still lack in the averages. Zeros at first,
        and for ever where nothing is compressed or without error feedback.

    Assign to qs and errors to continue from a hook's state.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        rank: int = 1,
        min_compression_rate: float = 2,
        *,
        error_feedback: bool = True,
        warm_start: bool = True,
    ):
        self.shapes = [tuple(shape) for shape in shapes]
        self.error_feedback, self.warm_start = error_feedback, warm_start
        groups: dict[tuple[int, int], list[int]] = {}
        for index, shape in enumerate(self.shapes):
            if len(shape) > 1:
                n, m = matrix_shape(shape)
                if (n + m) * min(n, m, rank) * min_compression_rate < n * m:
                    groups.setdefault((n, m), []).append(index)
        self.compressed = [index for group in groups.values() for index in group]
        self.qs: list[torch.Tensor] | None = None
        self.errors: list[list[torch.Tensor]] | None = None

    def step(self, gradients: Gradients, qs: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """One step of all ranks: the averages. qs: instead of those kept from the last step.

        Two things the hooks do and this doesn't: replace a direction that vanishes (of a zero gradient) by a
        random one, and start afresh after a gradient of inf or NaN. Raises ValueError if there are no qs.
        """
        qs = self.qs if qs is None else qs
        if qs is None:
            raise ValueError("no Q to project on: give qs in the first step, and without warm start in each")
        if self.errors is None:
            zeros = [torch.zeros(shape, dtype=torch.float64) for shape in self.shapes]
            self.errors = [list(zeros) for _ in gradients]
        averages, new_qs = mean(gradients), []
        for index, q in zip(self.compressed, qs, strict=True):
            shape = self.shapes[index]
            matrices = [
                (_wide(gradient[index]) + error[index]).reshape(matrix_shape(shape))
                for gradient, error in zip(gradients, self.errors, strict=True)
            ]
            average, new_q = low_rank_average(matrices, q)
            averages[index] = average.view(shape)
            new_qs.append(new_q)
            if self.error_feedback:
                for error, matrix in zip(self.errors, matrices, strict=True):
                    error[index] = (matrix - average).view(shape)
        self.qs = new_qs if self.warm_start else None
        return averages


class BatchedPowerSGDOracle(PowerSGDOracle):
    """The same for a whole bucket as one square matrix, filled up with zeros: batched_powerSGD_hook.

    shapes: of the bucket's tensors, in its order. qs: one, [side, r]. errors: [rank] of one [side, side]
    each. What P Qᵀ has behind the bucket's end is no error of any gradient and is dropped.
    """

    def __init__(
        self, shapes: Sequence[Shape], rank: int = 1, *, error_feedback: bool = True, warm_start: bool = True
    ):
        self.bucket_shapes = [tuple(shape) for shape in shapes]
        self.numel = sum(map(math.prod, self.bucket_shapes))
        side = math.ceil(math.sqrt(self.numel))
        super().__init__([(side, side)], rank, 0, error_feedback=error_feedback, warm_start=warm_start)

    def step(self, gradients: Gradients, qs: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        (average,) = super().step([[self.square(of_rank)] for of_rank in gradients], qs)
        for (error,) in self.errors or ():
            error.view(-1)[self.numel :] = 0
        return split(average.view(-1)[: self.numel], self.bucket_shapes)

    def square(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The bucket's tensors, or its flat buffer, as the matrix."""
        square = torch.zeros(self.shapes[0], dtype=torch.float64)
        square.view(-1)[: self.numel] = torch.cat([tensor.flatten() for tensor in tensors])
        return square


def low_rank_average(matrices: Sequence[torch.Tensor], q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 1 of Vogels et al. 2019: (P Qᵀ [n, m], the new Q [m, r]) for every rank's M [n, m].

    With M̄ the mean of the M, P Qᵀ = P Pᵀ M̄ is M̄ projected on the span of M̄ q. So it depends on the span
    of q alone, and not on which basis P is; ‖M̄ − P Qᵀ‖ ≤ ‖M̄‖; and an M̄ of rank r or less comes out
    exactly, unless a part of it is orthogonal to q.
    """
    directions = basis(q)
    (p,) = mean([[matrix @ directions] for matrix in matrices])  # the first all-reduce
    p = basis(p)
    (new_q,) = mean([[matrix.mT @ p] for matrix in matrices])  # the second
    return p @ new_q.mT, new_q


def basis(columns: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the columns' span, in float64: [n, r] or narrower, where some depend on others.

    NaN if an element isn't finite.
    """
    columns = columns.double()
    if not columns.isfinite().all():
        return torch.full_like(columns, torch.nan)
    left, values, _ = torch.linalg.svd(columns, full_matrices=False)
    orthonormal: torch.Tensor = left[:, values > VANISHING * values[:1]]
    return orthonormal


def projector(columns: torch.Tensor) -> torch.Tensor:
    """The projector onto the span of the columns [n, r]: [n, n], the same for every basis of it."""
    orthonormal = basis(columns)
    return orthonormal @ orthonormal.mT


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """(n, m) of a gradient seen as a matrix: its first dimension against the others."""
    return shape[0], math.prod(shape[1:])


def split(flat: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """A bucket's flat buffer as its tensors."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64))
