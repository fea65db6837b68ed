"""Check the properties that apply to a hook, and report the smallest workloads found on which one fails."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from hypothesis import Phase, Verbosity, find, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky, NoSuchExample
from hypothesis.strategies import SearchStrategy

from gradcomp.comm.bucket import Hook
from gradcomp.testing.cases import CASES, Case, Drawn
from gradcomp.testing.claims import PROBED_STEPS, Claims, claims_of
from gradcomp.testing.properties.subject import PropertyFailure
from gradcomp.testing.ranks import RankError
from gradcomp.testing.run import MakeState, Ranks
from gradcomp.testing.strategies import workloads
from gradcomp.testing.workload import Workload

__all__ = ["Failure", "Report", "Verdict", "check_hook"]

PHASES = (Phase.generate, Phase.shrink)
Outcome = Literal["holds", "fails", "not claimed", "not checked"]
OVERRIDE = (
    "If the hook does not claim this, say so: claims=dataclasses.replace(claims_of(hook, make_state), ...)"
)
# The most lines shown of a message. A longer one holds a traceback: its middle lines are left out.
LONGEST_MESSAGE = 14


@dataclass(frozen=True)
class Failure:
    """A property that fails for a hook.

    counterexample: the smallest workload found on which it fails.
    message: the property's message.
    """

    property: str
    counterexample: Workload
    message: str

    def __str__(self) -> str:
        lines = [line for line in self.message.splitlines() if line.strip()]
        if len(lines) > LONGEST_MESSAGE:
            lines = [*lines[:2], "...", *lines[3 - LONGEST_MESSAGE :]]
        return "\n  ".join([f"{self.property} fails for", repr(self.counterexample), *lines])


@dataclass(frozen=True)
class Verdict:
    """The verdict on one property.

    measured: the worst value that the property returned.
    num_examples: the number of workloads on which it holds.
    note: the name of the measured value, the failure's message, or the reason why it wasn't checked.
    num_passed_over: further workloads, left out because the hook did not complete on them, or made averages
        that were not finite.
    """

    outcome: Outcome
    measured: float | None = None
    num_examples: int = 0
    note: str = ""
    num_passed_over: int = 0

    def __str__(self) -> str:
        shown = self.note if self.measured is None else f"{self.note} {self.measured:.2g}"
        if self.num_passed_over:
            shown += f"{', ' if shown else ''}{self.num_passed_over} more passed over"
        return f"{self.outcome:<12}{self.num_examples or '':>8}  {shown}".rstrip()


@dataclass(frozen=True)
class Report:
    """The result of check_hook: a verdict on each property. str() is a table of them, then the failures."""

    hook: str
    claims: Claims | None
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if every checked property holds."""
        return not self.failures

    def raise_if_failed(self) -> None:
        """Raise PropertyFailure with the report unless ok."""
        if not self.ok:
            # Every hook claims that it completes.
            is_claimable = any(each.property != CASES[0].name for each in self.failures)
            raise PropertyFailure(f"\n{self}" + (f"\n\n{OVERRIDE}" if is_claimable else ""))

    def __str__(self) -> str:
        width = max(map(len, self.verdicts), default=0)
        rows = [f"{name:<{width}}  {verdict}" for name, verdict in self.verdicts.items()]
        head = f"{self.hook}\n{'property':<{width}}  {'verdict':<12}{'examples':>8}  measured"
        return "\n".join([head, *rows, *(f"\n{failure}" for failure in self.failures)])


def check_hook(
    hook: Hook,
    make_state: MakeState = None,
    *,
    world_size: int = 2,
    max_examples: int = 25,
    claims: Claims | None = None,
    ranks: Ranks = "simulated",
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    device: str = "cpu",
    only: Sequence[str] = (),
) -> Report:
    """Check a communication hook: search for workloads on which it fails a property that applies to it.

    make_state: make_state(process_group) makes a rank's state. None if the state is the process group.
    world_size: the number of ranks.
    max_examples: the number of workloads drawn for a property. Properties with two or three strategies draw
        more, expensive properties fewer.
    claims: the hook's claims; by default claims_of infers them from its state and a probe.
    ranks: "simulated", in this process; or "gloo", in processes: hook and make_state must be picklable then.
    dtypes: the gradients' dtypes.
    device: the gradients' device.
    only: the names of the properties to check; empty for all.

    The same call draws the same workloads. A counter-example is the smallest that Hypothesis finds.

    If the hook raises on some workloads, `completes` fails. If it makes inf or NaN of finite gradients,
    `finite_in_finite_out` fails. The other properties pass over these workloads.

    If standard error is a terminal, a line there shows the progress.

    Raises TypeError if make_state can't be called, ValueError for an unknown name in `only`.
    """
    name = getattr(hook, "__qualname__", repr(hook))
    if make_state is not None and not callable(make_state):
        raise TypeError(
            f"make_state is a function of the process group that returns a new state, got {make_state!r}"
        )
    searched = [case for case in CASES if not only or case.name in only]
    if unknown := set(only) - {case.name for case in CASES}:
        raise ValueError(f"unknown properties {sorted(unknown)}; known: {[case.name for case in CASES]}")
    with _progress() as progress:
        progress(f"{name}: inferring its claims")
        try:
            claims = claims or claims_of(hook, make_state, device, ranks)
        except RankError:
            return _not_complete(name, hook, make_state, world_size, max_examples, ranks, device, progress)
        report = Report(name, claims)
        drawn = Drawn(claims, world_size, dtypes, device)
        known: list[type[AssertionError]] = []
        for position, case in enumerate(searched, 1):
            reason = case.check.unclaimed(claims)
            if reason:
                report.verdicts[case.name] = Verdict("not claimed", note=reason)
                continue
            what = f"{name}: {position} of {len(searched)}, {case.name}"
            search = _Search(case, hook, make_state, claims, ranks, tuple(known), progress, what)
            for strategy in case.workloads(drawn):
                if search.failure is None:
                    search.run(strategy, max(2, math.ceil(max_examples * case.fraction)))
            search.try_each(case.listed(drawn))
            report.verdicts[case.name] = search.verdict()
            if search.failure is not None:
                report.failures.append(search.failure)
                known += case.explains
    return report


def _not_complete(
    name: str,
    hook: Hook,
    make_state: MakeState,
    world_size: int,
    max_examples: int,
    ranks: Ranks,
    device: str,
    progress: Callable[[str], None],
) -> Report:
    """Report on a hook that raises in the probe: check `completes` alone."""
    report = Report(name, None)
    what = f"{name}: fails in the probe, {CASES[0].name}"
    search = _Search(CASES[0], hook, make_state, Claims(), ranks, (), progress, what)
    search.run(
        workloads(world_sizes=st.just(world_size), steps=st.integers(1, PROBED_STEPS), device=device),
        max(max_examples, PROBED_STEPS),
    )
    if search.failure is None:
        claims_of(hook, make_state, device, ranks)  # raises the probe's error
        raise AssertionError(f"{name} fails in the probe, but not every time")
    report.failures.append(search.failure)
    report.verdicts.update(
        {case.name: Verdict("not checked", note="the hook does not complete") for case in CASES}
    )
    report.verdicts["completes"] = search.verdict()
    return report


def _shortened(message: str, width: int = 90) -> str:
    line = message.splitlines()[0]
    return line if len(line) <= width else line[: width - 1] + "…"


class _Search:
    """The search for a workload on which a property fails.

    known: exceptions that have failed an earlier property. Workloads that raise one are passed over.
    """

    def __init__(
        self,
        case: Case,
        hook: Hook,
        make_state: MakeState,
        claims: Claims,
        ranks: Ranks,
        known: tuple[type[AssertionError], ...],
        progress: Callable[[str], None],
        what: str,
    ):
        self.case, self.known = case, known
        self._progress, self._what, self._num_tried = progress, what, 0
        self._arguments = (hook, make_state)
        self._options: dict[str, Any] = {"claims": claims, "ranks": ranks}
        self.failure: Failure | None = None
        self._num_examples = self._num_passed_over = 0
        self._measured: float | None = None

    def run(self, strategy: SearchStrategy[Workload], max_examples: int) -> None:
        options = settings(
            max_examples=max_examples,
            derandomize=True,
            database=None,
            deadline=None,
            phases=PHASES,
            verbosity=Verbosity.quiet,
        )
        try:
            find(strategy, self._fails, settings=options)
        except NoSuchExample:
            pass
        except Flaky:  # it fails on this workload, but not every time
            if self.failure is not None:
                note = "\nIt does not fail on this workload every time."
                self.failure = Failure(
                    self.case.name, self.failure.counterexample, self.failure.message + note
                )

    def try_each(self, workloads: Iterable[Workload]) -> None:
        """Try listed workloads until one fails. Call `run` first: Hypothesis shrinks only drawn workloads."""
        for workload in workloads:
            if self.failure is not None or self._fails(workload):
                return

    def _fails(self, workload: Workload) -> bool:
        self._num_tried += 1
        self._progress(f"{self._what}, example {self._num_tried}")
        try:
            measured = self.case.check(*self._arguments, workload, **self._options)
        except self.known:
            self._num_passed_over += 1
            return False
        except (PropertyFailure, RankError) as error:
            self.failure = Failure(self.case.name, workload, str(error))
            return True
        self._num_examples += 1
        if measured is not None:
            self._measured = measured if self._measured is None else self.case.worst(self._measured, measured)
        return False

    def verdict(self) -> Verdict:
        if self.failure is not None:
            return Verdict("fails", note=_shortened(self.failure.message.removeprefix(f"{self.case.name}: ")))
        if not self._num_examples:
            return Verdict("not checked", note="no example in which the hook completes with finite averages")
        note = self.case.measure if self._measured is not None else ""
        return Verdict("holds", self._measured, self._num_examples, note, self._num_passed_over)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield show(line), which overwrites a line on standard error if that is a terminal; clear it at last."""
    stream = sys.stderr
    if stream is None or not stream.isatty():
        yield lambda line: None
        return
    width = shutil.get_terminal_size().columns - 1  # no line may wrap

    def show(line: str) -> None:
        stream.write(f"{line[:width]:<{width}}\r")
        stream.flush()

    try:
        yield show
    finally:
        show("")
