"""What a hook promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor

from gradcomp.testing.workload import Shape

__all__ = ["Claims", "Tolerance", "unit_roundoff"]

# A norm of up to 2^20 elements this large still has a square in float32: 2^(2·40+20) < 2^128.
LARGEST_OF_LOSSY = 2.0**40
# Factors are longer than the gradients, by up to √numel.
LARGEST_OF_LOSSY_FP16 = 2.0**8


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding once to nearest, 2^-p for p significant bits."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Tolerance:
    """The error allowed in an average over W ranks: |output − mean| ≤ 2 · W · (relative · magnitude + absolute).

    The 2 · W: each of W addends and of their partial sums is rounded once, and each is at most as large as the
    magnitude. That is the largest |gradient| of all ranks, at the element or in its bucket.
    """

    relative: float
    absolute: float = 0.0
    of: Literal["element", "bucket"] = "element"

    @classmethod
    def rounding(cls, dtype: torch.dtype) -> Tolerance:
        """The tolerance of sums in a dtype. Its absolute part is the spacing of the dtype's subnormal numbers."""
        u = unit_roundoff(dtype)
        return cls(u, torch.finfo(dtype).smallest_normal * 2 * u)

    @classmethod
    def levels(cls, bits: int) -> Tolerance:
        """The tolerance of values rounded to 2^bits levels between a bucket's smallest and largest."""
        return cls(2.0 ** (1 - bits), of="bucket")


@dataclass(frozen=True)
class Claims:
    """The claims that the properties hold a hook to. None or False: not claimed.

    tolerance: of its averages; None: it is lossy. precision: the dtype it rounds to, if coarser than the bucket's.
    start: steps of plain averaging before it compresses.
    exact_rank: a mean of at most this rank comes out exactly. exact_shapes(shape): whether a tensor of this shape
    is averaged exactly although the hook is lossy.
    contraction: δ in ‖M − C(M)‖² ≤ (1 − δ) ‖M‖²; 0 for: it doesn't make things worse.
    error_feedback: what is left out of a step comes in a later one. A hook that averages may claim it, too: then it makes up
    for its own rounding. feedback_precision: the dtype to which a rank's gradients are rounded before that, or its errors kept.
    errors_of(state): the errors of a rank, by bucket, flat as the bucket.
    unbiased: the expectation of its output is the mean.
    scale_equivariant: all gradients times 2^k gives the outputs times 2^k, to the bit or within rounding.
    rank_symmetric: the result doesn't depend on which rank has which gradients.
    bucket_insensitive: nor on how tensors are shared out to buckets.
    max_magnitude: outputs are finite while the ranks' mean |gradient| is at most this, at every element.
    checkpoint: a state comes back through torch.load's safe default, or in any way `reload` knows.
    memory: bytes of the tensors a state holds, over the bytes of the gradients.
    """

    tolerance: Tolerance | None = None
    precision: torch.dtype = torch.float64
    start: int = 0
    exact_rank: int | None = None
    exact_shapes: Callable[[Shape], bool] | None = None
    contraction: float | None = None
    error_feedback: bool = False
    feedback_precision: torch.dtype = torch.float64
    errors_of: Callable[[Any], Mapping[int, Tensor]] | None = None
    unbiased: bool = False
    scale_equivariant: Literal["bitwise", "rounding"] | None = None
    rank_symmetric: bool = False
    bucket_insensitive: bool = False
    max_magnitude: float = LARGEST_OF_LOSSY
    checkpoint: Literal["safe", "any"] | None = None
    memory: float | None = None

    @property
    def is_lossy(self) -> bool:
        return self.tolerance is None

    def unit_roundoff(self, dtype: torch.dtype) -> float:
        """The unit roundoff of a bucket's dtype or the hook's own precision, whichever is coarser."""
        return max(unit_roundoff(dtype), unit_roundoff(self.precision))

    def feedback_roundoff(self, dtype: torch.dtype) -> float:
        """The rounding in a bucket of this dtype that error feedback can't make up for.

        That of a lossy hook's own precision is let through; one that averages makes up for it.
        """
        rounded = unit_roundoff(dtype) if self.tolerance else self.unit_roundoff(dtype)
        return max(rounded, unit_roundoff(self.feedback_precision))

    def limit(self, dtype: torch.dtype) -> float:
        """The largest mean |gradient| for which outputs are finite in a bucket of this dtype."""
        largest = torch.finfo(dtype).max
        if self.is_lossy and largest < LARGEST_OF_LOSSY:
            largest = LARGEST_OF_LOSSY_FP16
        return min(self.max_magnitude, 0.99 * largest)

    def delta(self, numel: int) -> float:
        """The δ that error feedback is held to in a bucket of `numel` elements: the δ claimed, or 1 / numel if that is
        more, the δ of the weakest of the usual compressors, which send one element, or signs of one length.
        """
        return max(self.contraction or 0.0, 1 / max(1, numel))

    @property
    def element_error(self) -> float:
        """The largest error that a hook that averages leaves in an element, over the bucket's largest; inf for a lossy hook.

        Twice as much as its tolerance allows one rank, as it may round both the ranks' gradients and their sum.
        """
        return math.inf if self.tolerance is None else 4 * self.tolerance.relative

    def left_after(self, steps: int, numel: int) -> float:
        """The fraction of the norm of a bucket's error that is left after so many steps without gradients."""
        left = math.sqrt(1 - self.delta(numel)) ** steps
        if self.element_error < 1:
            left = min(left, math.sqrt(numel) * self.element_error**steps)
        return left

    def largest_error(self, numel: int) -> float:
        """An upper bound of a rank's ‖error‖ in a bucket of `numel` elements, over the largest ‖gradient‖.

        Karimireddy et al. (ICML 2019), lemma 3; for a hook that averages, the sum of what is left of each step's.
        """
        delta = self.delta(numel)
        largest = 2 * math.sqrt(1 - delta) / delta
        if self.element_error < 1:
            largest = min(largest, math.sqrt(numel) * self.element_error / (1 - self.element_error))
        return largest

    def steps_until(self, part: float, numel: int) -> int:
        """The number of steps without gradients after which at most this fraction of an error is left."""
        return next(steps for steps in count(1) if self.left_after(steps, numel) <= part)

    def exact(self, dtype: torch.dtype) -> Tolerance:
        """The tolerance of averages without compression, in a bucket of this dtype."""
        return max(
            Tolerance.rounding(dtype), Tolerance.rounding(self.precision), key=lambda each: each.relative
        )
