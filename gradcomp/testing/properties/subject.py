"""Properties, and what they check: subjects, which are hooks with their state, claims and ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import torch
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from gradcomp.comm.bucket import Hook
from gradcomp.testing.claims import Claims, claims_of
from gradcomp.testing.ranks import RankError, in_unguarded_script, run_ranks
from gradcomp.testing.ranks.processes import GUARD
from gradcomp.testing.run import MakeState, Ranks, Run, run_hook
from gradcomp.testing.strategies import Drawn
from gradcomp.testing.workload import Workload

# The most runs that are kept, and the most steps of each.
MOST_KEPT, SHORT_STEPS = 256, 8


@dataclass(frozen=True)
class Subject:
    """A hook under test.

    limit_s: the time that all runs together may take, each call counted at the pace of the fastest run: so
        that other programs don't count.
    """

    hook: Hook
    make_state: MakeState
    claims: Claims
    ranks: Ranks
    limit_s: float = math.inf
    _runs: dict[Any, Run] = field(default_factory=dict, init=False, repr=False, compare=False)
    # Calls of the hook, and seconds, of each run.
    _timed: list[tuple[int, float]] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The name of the hook: a function, a partial of one, or an object of a class."""
        hook: Any = self.hook
        named = hook if hasattr(hook, "__qualname__") else getattr(hook, "func", type(hook))
        return str(named.__qualname__)

    def run(self, workload: Workload, schedule: int = 0, **options: Any) -> Run:
        """Run the hook on this workload; for options see run_hook. Raises TooSlow at the end of limit_s.

        Properties draw the same workloads, so the last short runs are kept: don't write to them.
        """
        key = workload, schedule, *options.items()
        run = self._runs.pop(key, None)
        if run is None:
            num_buckets = sum(len(workload.buckets_in(step)) for step in range(workload.num_steps))
            num_calls = num_buckets * workload.world_size * workload.groups
            pace_s = min((seconds / num for num, seconds in self._timed), default=0.0)
            if pace_s * (num_calls + sum(num for num, _ in self._timed)) > self.limit_s:
                raise TooSlow(f"too slow: a call of the hook takes {pace_s:.2g} s")
            options |= {"ranks": self.ranks, "schedule": schedule}
            begin = time.monotonic()
            run = run_hook(self.hook, self.make_state, workload, **options)
            self._timed.append((num_calls, time.monotonic() - begin))
        if workload.num_steps <= SHORT_STEPS:
            self._runs[key] = run
        if len(self._runs) > MOST_KEPT:
            del self._runs[next(iter(self._runs))]
        return run

    def finite_run(self, workload: Workload, **options: Any) -> Run:
        """Run the hook on this workload. Raises NonFiniteFailure if an output holds inf or NaN."""
        run = self.run(workload, **options)
        require_finite(run)
        return run

    def why_not_in_processes(self) -> str:
        """Return the reason why the hook can't run in other processes; "" if it can."""
        if in_unguarded_script():
            return f"no processes: put `{GUARD}` before the script's own work"
        try:
            run_ranks(_found, 2, self.hook, self.make_state, ranks="gloo")
        except (TypeError, RankError) as error:
            return shorten(f"no processes: {str(error).strip().splitlines()[-1]}", 90, placeholder="…")
        return ""


def _found(rank: int, process_group: Any, hook: Hook, make_state: MakeState) -> None:
    """Do nothing: arguments have been found by name in this process."""


Check = Callable[[Subject, Workload], Iterable[float] | None]


@dataclass(frozen=True, eq=False)
class Property:
    """A property of hooks, and the search for a workload on which a hook lacks it.

    check(subject, workload): yields measured values, if any. Raises PropertyFailure if the property fails.
    claim: the field of Claims that promises the property; "" if every hook has to have it.
    unclaimed(claims): another reason why the property doesn't apply to a hook; "" if there is none.
    workloads(drawn), listed(drawn): the strategy that draws workloads, if any, and further workloads to try.
    fraction: the fraction of max_examples to draw; less than 1 for expensive properties.
    declined: the claim that declines it, "name=value (what it means)", or declined(subject, workload).
    measure, worst(values): the name of the measured value, and the worst one.
    explains: the exceptions that other properties raise if this one fails.
    """

    check: Check
    claim: str = ""
    unclaimed: Callable[[Claims], str] | None = None
    workloads: Callable[[Drawn], SearchStrategy[Workload] | None] = lambda drawn: drawn.any()
    listed: Callable[[Drawn], Iterable[Workload]] = lambda drawn: ()
    fraction: float = 1.0
    declined: str | Callable[[Subject, Workload], str] = ""
    measure: str = ""
    worst: Callable[[list[float]], float] = max
    explains: tuple[type[AssertionError], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.check.__doc__)

    @property
    def name(self) -> str:
        return self.check.__name__

    def reason(self, subject: Subject) -> str:
        """Return the reason why the property doesn't apply to a hook; "" if it applies."""
        value = getattr(subject.claims, self.claim) if self.claim else True
        if value is None or value is False:
            return f"{self.claim} is {value}"
        return self.unclaimed(subject.claims) if self.unclaimed else ""

    def advice(self, subject: Subject, workload: Workload) -> str:
        """Return the claim that a right hook would have to make; "" if there is none."""
        if not self.claim:
            return ""
        text = self.declined or f"{self.claim}={getattr(Claims(), self.claim)}"
        return text if isinstance(text, str) else text(subject, workload)

    def __call__(
        self,
        hook: Hook,
        make_state: MakeState,
        workload: Workload,
        *,
        claims: Claims | None = None,
        ranks: Ranks = "simulated",
    ) -> float | None:
        """Check the property on this workload; return the measured value, as `measured` does."""
        claims = claims or claims_of(hook, make_state, workload.device, ranks)
        return self.measured(Subject(hook, make_state, claims, ranks), workload)

    def measured(self, subject: Subject, workload: Workload) -> float | None:
        """Return the worst measured value; None if there is none, or the hook doesn't claim the property.

        Raises PropertyFailure, its message beginning with the property's name.
        """
        if self.reason(subject):
            return None
        try:
            values = list(self.check(subject, workload) or ())
            return self.worst(values) if values else None
        except PropertyFailure as failure:
            claimed = f"claimed {self.claim} {getattr(subject.claims, self.claim)}; " if self.claim else ""
            failure.args = (f"{self.name}: {claimed}{failure}",)
            raise


def property_of(claim: str = "", **search: Any) -> Callable[[Check], Property]:
    """Make a property of the decorated check; for the arguments see Property."""
    return lambda check: Property(check, claim, **search)


class PropertyFailure(AssertionError):  # noqa: N818
    """The hook claims a property that fails on this workload."""


class TooSlow(Exception):  # noqa: N818
    """There is no time left for a run."""


class NonFiniteFailure(PropertyFailure):
    """The outputs of finite gradients are not finite, so no other property can hold."""


def require_finite(run: Run, first_step: int = 0) -> None:
    """Raise NonFiniteFailure if an output from first_step on holds inf or NaN."""
    for output in run.each_output(first_step):
        finite = output.average.isfinite()
        if not finite.all():
            raise NonFiniteFailure(
                f"{output}: expected finite averages, got {output.average[~finite][0].item()} in "
                f"{int((~finite).sum())} of {finite.numel()} elements"
            )


def require_same_outputs(expected: Run, got: Run, whose: str) -> None:
    """Raise PropertyFailure unless all outputs of two runs have the same bits."""
    for one, other in zip(expected.each_output(), got.each_output(), strict=True):
        require_close(other, one.average, other.average, 0.0, whose)


def require_close(where: object, expected: Tensor, got: Tensor, allowed: Tensor | float, whose: str) -> float:
    """Compute the largest |got − expected| / allowed. Raises PropertyFailure if it is above 1.

    Equal elements are off by 0, also inf and NaN.
    """
    if not got.numel():
        return 0.0
    same = (expected == got) | (expected.isnan() & got.isnan())
    off = torch.where(same, 0.0, got.double() - expected.double()).abs().flatten()
    limit = torch.as_tensor(allowed, dtype=torch.float64, device=got.device).expand_as(got).flatten()
    ratio = torch.where(off == 0, 0.0, off / limit).nan_to_num(math.inf)
    worst = int(ratio.argmax())
    if ratio[worst] > 1:
        digits = 17 if expected.dtype == got.dtype == torch.float64 else 9
        raise PropertyFailure(
            f"{where}, element {worst}: expected {expected.flatten()[worst].item():.{digits}g} ({whose}), "
            f"got {got.flatten()[worst].item():.{digits}g}; off by {off[worst]:.3g}, "
            f"allowed {limit[worst]:.3g}; {int((ratio > 1).sum())} of {len(ratio)} elements"
        )
    return float(ratio[worst])


def require_close_in_norm(where: object, expected: Tensor, got: Tensor, allowed: float, whose: str) -> float:
    """Compute ‖got − expected‖ / allowed. Raises PropertyFailure if it is above 1."""
    off = float((got.double() - expected.double()).norm())
    if not off <= allowed:
        raise PropertyFailure(
            f"{where}: expected {whose} of norm {float(expected.double().norm()):.6g}, got norm "
            f"{float(got.double().norm()):.6g}; ‖difference‖ {off:.3g}, allowed {allowed:.3g}"
        )
    return off / allowed if off else 0.0
