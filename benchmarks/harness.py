"""A benchmark case: an operation on a problem, with several providers, each checked before it is timed.

Every provider's result is compared with a float64 reference, after the outputs were filled with NaN.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

Provider = Callable[[], Sequence[torch.Tensor]]


@dataclass
class Setup:
    """The tensors and callables of a case, alive while it runs.

    providers: by name, the call to time, which returns its result tensors.
    reference: yields the right results in float64, one per result tensor.
    outputs: tensors to fill with NaN before each provider is checked.
    restore: restores the inputs of the provider of that name before it is checked, for providers that work in
        place. The timed calls begin with what the check has left.
    """

    providers: dict[str, Provider]
    reference: Callable[[], Iterable[torch.Tensor]]
    outputs: Sequence[torch.Tensor] = ()
    restore: Callable[[str], object] = lambda provider: None


@dataclass(frozen=True)
class Case:
    """One operation on one problem.

    num_bytes: the fewest bytes that it can move: each input read once, each output written once. Every
        provider's bandwidth is computed from num_bytes.
    max_error: the bound for error_of(result, reference).
    baseline: the provider that the others are compared with.
    min_launches: the fewest kernels that it can launch; see environment.floor_us.
    seconds: the time limit of its rounds, if the clock's is too long.
    num_buckets: the number of buckets in a call, for the host's time per bucket.
    num_elements: the number of gradient elements, for the bytes per element; None if that is meaningless.
    """

    name: str
    label: str
    dtype: str
    num_bytes: int
    max_error: float
    build: Callable[[], Setup]
    baseline: str
    error_of: Callable[[torch.Tensor, torch.Tensor], float] = field(default_factory=lambda: elementwise_error)
    min_launches: int = 1
    seconds: float | None = None
    num_buckets: int = 1
    num_elements: int | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.label} {self.dtype}"


class WrongResultError(Exception):
    """A provider's result is further from the reference than the case allows."""


def elementwise_error(
    result: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype | None = None
) -> float:
    """Compute max |result − reference| / max(|reference|, the smallest normal number of dtype).

    dtype: the narrowest dtype on the way to the result; by default the result's own.

    Below its smallest normal number a floating-point format has absolute precision, not relative.
    """
    if result.shape != reference.shape:
        raise WrongResultError(f"shape {tuple(result.shape)}, expected {tuple(reference.shape)}")
    if result.numel() == 0:
        return 0.0
    floor = torch.finfo(dtype or result.dtype).smallest_normal
    error = (result.double() - reference).abs_() / reference.abs().clamp_(min=floor)
    return error.max().item()  # NaN if there is one


def frobenius_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Compute ‖result − reference‖ / ‖reference‖."""
    return ((result.double() - reference).norm() / reference.norm()).item()


def rounding_error(dtype: torch.dtype) -> float:
    """Return the error allowed for scaling and casting: one and a half units in the last place.

    Half a unit is for rounding the result. Another half is for rounding the scale, or for torch's second
    rounding. The last half is slack for the products of these.
    """
    return 1.5 * torch.finfo(dtype).eps


def check(case: Case, setup: Setup) -> dict[str, float]:
    """Compute every provider's error. Raises WrongResultError if one is beyond the bound, or NaN."""
    errors = {}
    references = list(setup.reference())
    for name, provider in setup.providers.items():
        setup.restore(name)
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
    return errors
