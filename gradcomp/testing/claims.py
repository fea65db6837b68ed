"""Claims: what a hook promises."""

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
# Factors have a larger norm than the gradients, by up to √numel.
LARGEST_OF_LOSSY_FP16 = 2.0**8


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding once to nearest, 2^-p for p significant bits."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Tolerance:
    """The error allowed in an average over W ranks.

    It is |output − mean| ≤ 2 · W · (relative · magnitude + absolute). The factor is 2 · W as each of W
    addends and of their partial sums is rounded once, and each is at most as large as the magnitude: the
    largest |gradient| of all ranks, at the element or in its bucket (`of`).
    """

    relative: float
    absolute: float = 0.0
    of: Literal["element", "bucket"] = "element"

    @classmethod
    def rounding(cls, dtype: torch.dtype) -> Tolerance:
        """Return the tolerance of sums in a dtype. Its absolute part is the spacing of subnormal numbers."""
        u = unit_roundoff(dtype)
        return cls(u, torch.finfo(dtype).smallest_normal * 2 * u)

    @classmethod
    def levels(cls, bits: int) -> Tolerance:
        """Return the tolerance of values rounded to 2^bits levels between a bucket's smallest and largest."""
        return cls(2.0 ** (1 - bits), of="bucket")


@dataclass(frozen=True)
class Claims:
    """The claims that the properties hold a hook to. None or False means not claimed.

    tolerance: the tolerance of its averages; None if it is lossy.
    precision: the dtype it rounds to, if coarser than the bucket's.
    start: the number of steps of plain averaging before it compresses.
    exact_rank: a mean of at most this rank is averaged exactly.
    exact_shapes(shape): True if a tensor of this shape is averaged exactly although the hook is lossy.
    contraction: δ in ‖M − C(M)‖² ≤ (1 − δ) ‖M‖²; with 0 an output is no farther from M than zero is.
    error_feedback: errors of a step are added to a later one. A hook that averages may claim it, too: then it
        compensates its own rounding.
    feedback_precision: the dtype to which a rank's gradients are rounded before error feedback, or its errors
    kept.
    errors_of(state): the errors of a rank, by bucket, flat as the bucket.
    unbiased: the expectation of its output is the mean.
    keeps_zeros: an element that has been 0 on every rank in every step so far is exactly 0 in the average
        ("elements"), or only if all of its row or column has been 0 ("lines"), as in a product of two
        factors. Plain steps and tensors of exact shapes keep all elements even then.
    scale_equivariant: multiplying all gradients by 2^k multiplies the outputs by 2^k, to the bit or within
    rounding.
    rank_symmetric: the result doesn't depend on which rank has which gradients.
    bucket_insensitive: the result doesn't depend on the assignment of tensors to buckets.
    max_magnitude: outputs are finite while the ranks' mean |gradient| is at most this, at every element.
    checkpoint: a state can be reloaded with torch.load's safe default ("safe"), or in any way of `reload`
    ("any").
    memory: the largest ratio of the bytes of a state's tensors to the bytes of the gradients.
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
    keeps_zeros: Literal["elements", "lines"] | None = None
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
        """Return the unit roundoff of a bucket's dtype or the hook's own precision, whichever is coarser."""
        return max(unit_roundoff(dtype), unit_roundoff(self.precision))

    def feedback_roundoff(self, dtype: torch.dtype) -> float:
        """Return the unit roundoff that error feedback doesn't compensate in a bucket of this dtype.

        A lossy hook is allowed the rounding to its own precision; one that averages compensates it.
        """
        rounded = unit_roundoff(dtype) if self.tolerance else self.unit_roundoff(dtype)
        return max(rounded, unit_roundoff(self.feedback_precision))

    def limit(self, dtype: torch.dtype) -> float:
        """Return the largest mean |gradient| for which outputs are finite in a bucket of this dtype."""
        largest = torch.finfo(dtype).max
        if self.is_lossy and largest < LARGEST_OF_LOSSY:
            largest = LARGEST_OF_LOSSY_FP16
        return min(self.max_magnitude, 0.99 * largest)

    def delta(self, numel: int) -> float:
        """Return the δ that error feedback is held to in a bucket of `numel` elements.

        It is the δ claimed, or 1 / numel if that is more: the δ of the weakest of the usual compressors,
        which send one element, or signs with one common magnitude.
        """
        return max(self.contraction or 0.0, 1 / max(1, numel))

    @property
    def element_error(self) -> float:
        """The largest error of an element, over the bucket's largest, that a hook that averages leaves.

        It is twice the tolerance of one rank, as the hook may round both the ranks' gradients and their sum;
        inf for a lossy hook.
        """
        return math.inf if self.tolerance is None else 4 * self.tolerance.relative

    def left_after(self, steps: int, numel: int) -> float:
        """Return the fraction of a bucket's ‖error‖ that is left after so many steps without gradients."""
        left = math.sqrt(1 - self.delta(numel)) ** steps
        if self.element_error < 1:
            left = min(left, math.sqrt(numel) * self.element_error**steps)
        return left

    def largest_error(self, numel: int) -> float:
        """Return an upper bound of a rank's ‖error‖ over the largest ‖gradient‖.

        For a bucket of `numel` elements it is lemma 3 of Karimireddy et al. (ICML 2019); for a hook that
        averages, the sum of what is left of each step's error.
        """
        delta = self.delta(numel)
        largest = 2 * math.sqrt(1 - delta) / delta
        if self.element_error < 1:
            largest = min(largest, math.sqrt(numel) * self.element_error / (1 - self.element_error))
        return largest

    def steps_until(self, fraction: float, numel: int) -> int:
        """Count the steps without gradients after which at most this fraction of an error is left."""
        return next(steps for steps in count(1) if self.left_after(steps, numel) <= fraction)

    def exact(self, dtype: torch.dtype) -> Tolerance:
        """Return the tolerance of averages without compression in a bucket of this dtype."""
        return max(
            Tolerance.rounding(dtype), Tolerance.rounding(self.precision), key=lambda each: each.relative
        )
