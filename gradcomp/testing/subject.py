"""What a property is checked on: a hook with its state, what it claims, and ranks to run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, Protocol, TypeVar

from gradcomp.testing.claims import Claims
from gradcomp.testing.inference import claims_of
from gradcomp.testing.run import Hook, MakeState, Ranks, Run, run_hook
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
        """The hook on this workload; options as those of run_hook."""
        return run_hook(self.hook, self.make_state, workload, ranks=self.ranks, **options)


class Property(Protocol[Measured]):
    """What it measured, or None where the hook doesn't claim it. Raises PropertyFailure where it doesn't hold."""

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
    """check(subject, workload) as a property, which takes the subject's parts."""

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
