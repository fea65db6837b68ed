"""What there is to time: an operation on a problem, by several providers, each checked before it is timed.

Every provider's result is compared with a float64 reference, after the outputs were filled with NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

Provider = Callable[[], Sequence[torch.Tensor]]


@dataclass
class Setup:
    """A case's tensors and callables, alive while it runs.

    providers: name -> the call to time; it returns the tensors that hold its results.
    reference: yields the right results in float64, one per result tensor.
    outputs: tensors to be filled with NaN before each provider is checked.
    restore: puts the inputs back before each provider is checked, for providers that work in place.
    num_launches: counts what a provider launches in a call; None where that isn't asked.
    """

    providers: dict[str, Provider]
    reference: Callable[[], Iterable[torch.Tensor]]
    outputs: Sequence[torch.Tensor] = ()
    restore: Callable[[], object] = lambda: None
    num_launches: Callable[[Provider], int] | None = None


@dataclass(frozen=True)
class Case:
    """One operation on one problem.

    num_bytes: the least it can move, each input read once and each output written once; every
    provider's rate is reckoned with it. max_error: the bound for error_of(result, reference).
    baseline: the provider that the others' ratios refer to. seconds: for its rounds, where the clock's
    own are too many. num_buckets: what a call handles, for the host's time per bucket. num_elements: of the
    gradients, for the bytes per element; None where that says nothing. apart: the providers' names, where
    each is to be timed in a process of its own; see apart.py.
    """

    name: str
    label: str
    dtype: str
    num_bytes: int
    max_error: float
    build: Callable[[], Setup]
    baseline: str
    error_of: Callable[[torch.Tensor, torch.Tensor], float] = field(default_factory=lambda: elementwise_error)
    seconds: float | None = None
    num_buckets: int = 1
    num_elements: int | None = None
    apart: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.label} {self.dtype}"


class WrongResultError(Exception):
    """A provider's result is further from the reference than the case allows."""


def elementwise_error(
    result: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype | None = None
) -> float:
    """max |result − reference| / max(|reference|, the smallest normal number of dtype).

    Below that number a floating-point format has an absolute precision, not a relative one.
    dtype: the narrowest on the way to the result; result's own when not given.
    """
    if result.shape != reference.shape:
        raise WrongResultError(f"shape {tuple(result.shape)}, expected {tuple(reference.shape)}")
    if result.numel() == 0:
        return 0.0
    floor = torch.finfo(dtype or result.dtype).smallest_normal
    error = (result.double() - reference).abs_() / reference.abs().clamp_(min=floor)
    return error.max().item()  # NaN if there is one


def frobenius_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """‖result − reference‖ / ‖reference‖."""
    return ((result.double() - reference).norm() / reference.norm()).item()


def rounding_error(dtype: torch.dtype) -> float:
    """The error allowed to scaling and casting: one unit in the last place and a half.

    Half of one for rounding the result; another half because the scale is rounded too, or because
    torch's way rounds twice; the rest is slack for the products of these.
    """
    return 1.5 * torch.finfo(dtype).eps


def check(case: Case, setup: Setup) -> dict[str, float]:
    """Every provider's error. Raises WrongResultError for one beyond the bound, or not a number."""
    errors = {}
    references = list(setup.reference())
    for name, provider in setup.providers.items():
        setup.restore()
        for output in setup.outputs:
            output.fill_(float("nan"))
        results = provider()
        error = 0.0
        for result, reference in zip(results, references, strict=True):
            each = case.error_of(result, reference)
            # Written so that NaN fails.
            if not each <= case.max_error:
                raise WrongResultError(f"{case}: {name} is off by {each:.3g}, allowed {case.max_error:.3g}")
            error = max(error, each)
        errors[name] = error
    setup.restore()
    return errors
