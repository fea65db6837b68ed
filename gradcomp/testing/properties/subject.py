"""Subjects of properties (a hook with its state, claims and ranks), and the exceptions of properties."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gradcomp.comm.bucket import Hook
from gradcomp.testing.claims import AVERAGES_WITHIN, Claims, claims_of
from gradcomp.testing.ranks import RankError
from gradcomp.testing.run import MakeState, Ranks, Run, run_hook
from gradcomp.testing.workload import Workload

__all__ = ["NonFiniteFailure", "Property", "PropertyFailure", "Subject", "property_of"]

Measured = TypeVar("Measured", covariant=True)


@dataclass(frozen=True)
class Subject:
    """A hook under test.

    given: the hook's claims; if None, claims_of infers them on this device.
    """

    hook: Hook
    make_state: MakeState
    given: Claims | None
    ranks: Ranks
    device: str

    @cached_property
    def claims(self) -> Claims:
        return self.given or claims_of(self.hook, self.make_state, self.device, self.ranks)

    def run(self, workload: Workload, **options: Any) -> Run:
        """Run the hook on this workload; for options see run_hook."""
        return run_hook(self.hook, self.make_state, workload, ranks=self.ranks, **options)

    def finite_run(self, workload: Workload, **options: Any) -> Run:
        """Run the hook on this workload. Raises NonFiniteFailure if an output holds inf or NaN."""
        run = self.run(workload, **options)
        require_finite(workload, run)
        return run

    def multiple(self, workload: Workload, mean: Tensor, output: Tensor) -> str:
        """Return the end of a failure's message: the factor, if the output is a multiple of the mean, or "".

        For example, a hook that forgets to divide outputs the sum. Multiples within 5 % count, as for hooks
        that average. An output of one element is always a multiple of the mean. So a second run, on as many
        ranks, must have the factor, too: its outputs against its means, both summed over the steps. Steps
        with zero gradients at its end make error feedback output the held-back errors.
        """
        if not _factor(mean, output):
            return ""
        larger = Workload(
            ((8, 9), (5,)),
            world_size=workload.world_size,
            steps=self.claims.start + 4,
            dtype=workload.dtype,
            noise=1.0,
            drift=0.5,
            zero_steps=16,
            device=workload.device,
        )
        try:
            run = self.run(larger)
        except RankError:
            return ""
        steps = range(self.claims.start, larger.num_steps)
        given = torch.stack([_flat(larger.mean(step)) for step in steps])
        got = torch.stack([_flat(run.outputs[step][0]) for step in steps])
        factor = _factor(given.sum(0), got.sum(0))
        return f"; the output is {factor} × the mean" if factor else ""

    @contextmanager
    def naming_multiples(self, workload: Workload, mean: Tensor, output: Tensor) -> Iterator[None]:
        """If the output is a multiple of the mean, add the factor to a PropertyFailure of this context."""
        try:
            yield
        except PropertyFailure as failure:
            raise PropertyFailure(f"{failure}{self.multiple(workload, mean, output)}") from None


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def _factor(mean: Tensor, output: Tensor) -> float | None:
    """Find the factor c ≠ 1 with output = c · mean, or None if there is none.

    c is rounded to 2 digits if they are enough, else to 4. ‖output − c · mean‖ may be at most 5 % of
    ‖c · mean‖, and a tenth of ‖(c − 1) · mean‖.
    """
    mean, output = mean.double().flatten(), output.double().flatten()
    square = float(mean.square().sum())
    factor = float(mean @ output) / square if square else math.nan
    left = float((output - factor * mean).norm()) / math.sqrt(square) if square else math.nan
    if not left <= min(AVERAGES_WITHIN * abs(factor), abs(factor - 1) / 10):
        return None
    shown = (float(f"{factor:.{digits}g}") for digits in (2, 4))
    return next((each for each in shown if abs(factor - each) <= abs(factor - 1) / 10 and each != 1), None)


class Property(Protocol[Measured]):
    """A function that checks a property of a hook.

    Returns a measured value, or None if the hook doesn't claim the property.
    Raises PropertyFailure if the property fails.
    """

    __name__: str
    unclaimed: Callable[[Claims], str]

    def __call__(
        self,
        hook: Hook,
        make_state: MakeState,
        workload: Workload,
        *,
        claims: Claims | None = None,
        ranks: Ranks = "simulated",
    ) -> Measured | None: ...


def property_of(
    unclaimed: Callable[[Claims], str] | None = None,
) -> Callable[[Callable[[Subject, Workload], Measured]], Property[Measured]]:
    """Turn check(subject, workload) into a property of (hook, make_state, workload, options).

    unclaimed(claims): the reason why the property doesn't apply, and returns None; "" if it applies. Without
        this function the property applies to every hook.

    A PropertyFailure gets the property's name before its message.
    """

    def decorated(check: Callable[[Subject, Workload], Measured]) -> Property[Measured]:
        @wraps(check)
        def checked(
            hook: Hook,
            make_state: MakeState,
            workload: Workload,
            *,
            claims: Claims | None = None,
            ranks: Ranks = "simulated",
        ) -> Measured | None:
            subject = Subject(hook, make_state, claims, ranks, workload.device)
            if unclaimed is not None and unclaimed(subject.claims):
                return None
            try:
                return check(subject, workload)
            except PropertyFailure as failure:
                failure.args = (f"{check.__name__}: {failure}",)
                raise

        checked.unclaimed = unclaimed or (lambda claims: "")  # type: ignore[attr-defined]
        del checked.__wrapped__  # so that help() shows checked's arguments
        return checked  # type: ignore[return-value]

    return decorated


class PropertyFailure(AssertionError):  # noqa: N818
    """The hook claims a property that fails on this workload."""


class NonFiniteFailure(PropertyFailure):
    """The outputs of finite gradients are not finite, so no other property can hold."""


def place(workload: Workload, step: int, rank: int, index: int) -> str:
    """Describe an output's step, rank and tensor, for messages."""
    return f"step {step}, rank {rank}, {workload.where(index)}"


def require_finite(workload: Workload, run: Run, first_step: int = 0) -> None:
    """Raise NonFiniteFailure if an output from first_step on holds inf or NaN."""
    for step, by_rank in enumerate(run.outputs):
        for rank, tensors in enumerate(by_rank):
            for index, tensor in enumerate(tensors):
                if step >= first_step and not tensor.isfinite().all():
                    bad = tensor[~tensor.isfinite()][0] if tensor.ndim else tensor
                    raise NonFiniteFailure(
                        f"{place(workload, step, rank, index)}: expected finite averages, got "
                        f"{bad.item()} in {int((~tensor.isfinite()).sum())} of {tensor.numel()} elements"
                    )


def require_same(where: str, expected: Tensor, got: Tensor, whose: str) -> None:
    """Raise PropertyFailure unless all elements are equal; NaN equals NaN."""
    same = (expected == got) | (expected.isnan() & got.isnan())
    if not same.all():
        i = int((~same).flatten().nonzero()[0])
        raise PropertyFailure(
            f"{where}, element {i}: expected {expected.flatten()[i].item()!r} ({whose}), got "
            f"{got.flatten()[i].item()!r}; {int((~same).sum())} of {got.numel()} elements differ"
        )


def require_close(where: str, expected: Tensor, got: Tensor, allowed: Tensor | float, whose: str) -> float:
    """Compute the largest |got − expected| / allowed. Raises PropertyFailure if it is above 1."""
    if not got.numel():
        return 0.0
    off = (got.double() - expected.double()).abs().flatten()
    limit = torch.as_tensor(allowed, dtype=torch.float64).expand(expected.shape).flatten()
    ratio = torch.where(off <= limit, off / limit.clamp(min=1e-300), off / limit).nan_to_num(math.inf)
    worst = int(ratio.argmax())
    if ratio[worst] > 1:
        raise PropertyFailure(
            f"{where}, element {worst}: expected {expected.flatten()[worst].item():.9g} ({whose}), "
            f"got {got.flatten()[worst].item():.9g}; off by {off[worst]:.3g}, allowed {limit[worst]:.3g}"
        )
    return float(ratio[worst])


def require_close_in_norm(where: str, expected: Tensor, got: Tensor, allowed: float, whose: str) -> float:
    """Compute ‖got − expected‖ / allowed. Raises PropertyFailure if it is above 1."""
    off = float((got.double() - expected.double()).norm())
    if not off <= allowed:
        raise PropertyFailure(
            f"{where}: expected {whose} of norm {float(expected.double().norm()):.6g}, got norm "
            f"{float(got.double().norm()):.6g}; ‖difference‖ {off:.3g}, allowed {allowed:.3g}"
        )
    return off / allowed if off else 0.0
