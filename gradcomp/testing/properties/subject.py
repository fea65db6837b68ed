"""The subject that a property is checked on: a hook with its state and its claims, and ranks to run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gradcomp.compress.hook import Hook
from gradcomp.testing.claims import Claims
from gradcomp.testing.inference import AVERAGES_WITHIN, claims_of
from gradcomp.testing.properties.failure import PropertyFailure
from gradcomp.testing.ranks import RankError
from gradcomp.testing.run import MakeState, Ranks, Run, run_hook
from gradcomp.testing.workload import Workload

__all__ = ["Property", "Subject", "property_of"]

Measured = TypeVar("Measured", covariant=True)


@dataclass(frozen=True)
class Subject:
    """A hook under test. given: its claims; None for those that claims_of infers, on this device."""

    hook: Hook
    make_state: MakeState
    given: Claims | None
    ranks: Ranks
    device: str

    @cached_property
    def claims(self) -> Claims:
        return self.given or claims_of(self.hook, self.make_state, self.device, self.ranks)

    def run(self, workload: Workload, **options: Any) -> Run:
        """Run the hook on this workload; the options are those of run_hook."""
        return run_hook(self.hook, self.make_state, workload, ranks=self.ranks, **options)

    def multiple(self, workload: Workload, mean: Tensor, output: Tensor) -> str:
        """The end of a message about an output that is a multiple of the mean, as a hook's that sums; "" if it is none.

        A multiple within 5 %, as for hooks that average. Every output of one element is a multiple of the mean, so all
        gradients together have to be one, too, in another run of the hook on as many ranks: their sums over steps, at
        whose end error feedback has delivered all that it held back.
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
        """A context in which a PropertyFailure also says which multiple of the mean the output is, if it is one."""
        try:
            yield
        except PropertyFailure as failure:
            raise PropertyFailure(f"{failure}{self.multiple(workload, mean, output)}") from None


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def _factor(mean: Tensor, output: Tensor) -> float | None:
    """The factor c ≠ 1 for which output = c · mean, to 2 digits if they are enough, else 4; None if there is none.

    What is left over is at most 5 % of the output, and a tenth of what differs from the mean.
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
    """A function that checks a property and returns what it measured, or None if the hook doesn't claim the property.

    Raises PropertyFailure if the property doesn't hold.
    """

    __name__: str

    def __call__(
        self,
        hook: Hook,
        make_state: MakeState,
        workload: Workload,
        *,
        claims: Claims | None = None,
        ranks: Ranks = "simulated",
    ) -> Measured: ...


def property_of(check: Callable[[Subject, Workload], Measured]) -> Property[Measured]:
    """Make a property, which takes a hook, its state and options, of a function check(subject, workload)."""

    @wraps(check)
    def checked(
        hook: Hook,
        make_state: MakeState,
        workload: Workload,
        *,
        claims: Claims | None = None,
        ranks: Ranks = "simulated",
    ) -> Measured:
        return check(Subject(hook, make_state, claims, ranks, workload.device), workload)

    del checked.__wrapped__  # help() is to show these arguments
    return checked
