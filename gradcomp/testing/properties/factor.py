"""The factor by which averages as a whole are too large or too small, though each is within its tolerance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradcomp.testing.claims import Tolerance
from gradcomp.testing.properties.failure import PropertyFailure

__all__ = ["Factor"]

# The standard deviations of a sum of independent roundings, each as large as allowed.
DEVIATIONS = 5.0


class Factor:
    """⟨output, mean⟩ / ‖mean‖² over many tensors; it is 1 for averages with errors that cancel.

    It may differ from 1 by one rounding, as a hook may round towards zero, and by five standard deviations of
    a sum of independent errors that are as large as allowed. Equal means may have equal errors, so the
    deviation counts different means only. A tensor's elements are divided by the largest error allowed in it,
    as tensors may differ by orders of magnitude.
    """

    def __init__(self) -> None:
        self._means: list[Tensor] = []
        self._errors: list[Tensor] = []
        self._allowed: list[Tensor] = []
        self._roundings: list[Tensor] = []

    def add(self, mean: Tensor, output: Tensor, allowed: Tensor, tolerance: Tolerance) -> None:
        """Add a tensor. allowed: the error that the tolerance allows, by element."""
        chosen = (mean != 0) & (allowed > 0)
        if not chosen.any():
            return
        unit = float(allowed.max())
        means = mean[chosen] / unit
        self._means.append(means)
        self._errors.append(output[chosen].double() / unit - means)
        self._allowed.append(allowed[chosen] / unit)
        self._roundings.append(tolerance.relative * means.abs() + tolerance.absolute / unit)

    def require_one(self, name: str) -> None:
        """Raise PropertyFailure if the factor differs from 1 by more than roundings explain."""
        if not self._means:
            return
        means, errors, allowed, roundings = map(
            torch.cat, (self._means, self._errors, self._allowed, self._roundings)
        )
        off, square = float(means @ errors), float(means.square().sum())
        repetitions = len(means) / len(means.abs().unique())
        deviation = math.sqrt(float((means * allowed).square().sum()) * repetitions)
        limit = float(means.abs() @ roundings) + DEVIATIONS * deviation
        if abs(off) > limit:
            raise PropertyFailure(
                f"{name}: every element is within its tolerance, but all {len(means)} averages together are "
                f"{1 + off / square:.6g} × the mean; rounding explains {1 - limit / square:.6g} to "
                f"{1 + limit / square:.6g}"
            )
