"""Check the properties that apply to a hook, and report the smallest workloads found on which one fails."""

from __future__ import annotations

import io
import math
import shutil
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from textwrap import shorten
from typing import Literal

import torch
from hypothesis import Phase, Verbosity, find, settings
from hypothesis.errors import Flaky, NoSuchExample

from gradcomp.comm.bucket import Hook
from gradcomp.testing import properties
from gradcomp.testing.claims import PROBE, PROBED_STEPS, Claims, claims_of
from gradcomp.testing.properties.subject import Property, PropertyFailure, Subject, TooSlow
from gradcomp.testing.ranks import RankError
from gradcomp.testing.run import MakeState, Ranks
from gradcomp.testing.strategies import WORLD_SIZES, Drawn
from gradcomp.testing.workload import Workload

PROPERTIES: tuple[Property, ...] = tuple(getattr(properties, name) for name in properties.__all__)
PHASES = (Phase.generate, Phase.shrink)
REPEATED = settings(derandomize=True, database=None, deadline=None, verbosity=Verbosity.quiet)
Outcome = Literal["holds", "fails", "not claimed", "not checked"]
LONGEST_MESSAGE = 14  # lines; a longer one holds a traceback: its middle lines are left out
MOST_PRINTED = 5  # lines of a hook's own
_CAPTURED = threading.RLock()  # standard output is the whole process's: checks take turns
LONGEST_S = 180.0  # of a check with 25 examples; right hooks take 10 to 60 s of a CPU


@dataclass(frozen=True)
class Failure:
    """A property that fails for a hook, the smallest workload found on which it fails, and its message."""

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
    """

    outcome: Outcome
    measured: float | None = None
    num_examples: int = 0
    note: str = ""

    def __str__(self) -> str:
        shown = self.note if self.measured is None else f"{self.note} {self.measured:.2g}"
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
            raise PropertyFailure(f"\n{self}")

    def __str__(self) -> str:
        width = max(map(len, self.verdicts), default=0)
        rows = [f"{name:<{width}}  {verdict}" for name, verdict in self.verdicts.items()]
        head = f"{self.hook}\n{'property':<{width}}  {'verdict':<12}{'examples':>8}  measured"
        return "\n".join([head, *rows, *(f"\n{failure}" for failure in self.failures)])


def check_hook(
    hook: Hook,
    make_state: MakeState = None,
    *,
    world_size: int | None = None,
    max_examples: int = 25,
    claims: Claims | None = None,
    ranks: Ranks = "simulated",
    dtypes: Sequence[torch.dtype] | None = None,
    device: str = "cpu",
    only: Sequence[str] = (),
    processes: bool = True,
    fail_fast: bool = False,
) -> Report:
    """Check a communication hook: search for workloads on which it fails a property that applies to it.

    make_state: make_state(process_group) makes a rank's state. None if the state is the process group.
    world_size: the number of ranks; by default 2 and 3, and in some workloads 1, 4, 5 and 16.
    max_examples: the number of workloads drawn for a property, and the most that are listed for it.
        `completes` draws twice as many, and expensive properties fewer.
    claims: the hook's claims; by default claims_of infers them from its state and a probe.
    ranks: "simulated", in this process; or "gloo", in processes: hook and make_state must be picklable then.
    dtypes: the gradients' dtypes; by default float32 and float64, and in some workloads bfloat16, if the hook
        runs in it.
    device: the gradients' device.
    only: the names of the properties to check; empty for all.
    processes: check `same_in_processes`, for which hook and make_state must be importable by name, and a
        script guarded by `if __name__ == "__main__":`.
    fail_fast: end at the first property that fails; the others are not checked.

    The same call draws the same workloads. A counterexample is the smallest that Hypothesis finds. Properties
    pass over workloads on which `completes` or `finite_in_finite_out` fails. A line on standard error shows
    the progress, if that is a terminal; what the hook prints is shown with a failure, except in processes.
    What would take longer than three minutes (or more, for over 25 examples) is not checked.

    Raises TypeError if make_state can't be called; ValueError for an unknown name in `only`, or as claims_of.
    """
    if make_state is not None and not callable(make_state):
        expected = "make_state is a function of the process group that returns a new state"
        raise TypeError(f"{expected}, got {make_state!r}")
    known = [each.name for each in PROPERTIES]
    if unknown := set(only) - set(known):
        raise ValueError(f"unknown properties {sorted(unknown)}; known: {known}")
    searched = [each for each in PROPERTIES if not only or each.name in only]
    failing = Claims(start=PROBED_STEPS - 3)  # of a hook that fails in the probe
    subject = Subject(hook, make_state, claims or failing, ranks, LONGEST_S * max(1.0, max_examples / 25))
    world_sizes = WORLD_SIZES if world_size is None else (world_size,)
    limits = (world_sizes, dtypes or (torch.float32, torch.float64), device)
    with _CAPTURED, redirect_stdout(io.StringIO()), ExitStack() as at_end:
        at_end.callback(_show, "")
        _show(f"{subject.name}: inferring its claims")
        try:
            if claims is None:
                subject = replace(subject, claims=claims_of(hook, make_state, device, ranks))
            drawn = Drawn(subject.claims, *limits)
            if dtypes is None:
                with suppress(RankError, TooSlow):
                    subject.run(replace(PROBE, dtype=torch.bfloat16, device=device))
                    drawn = replace(drawn, left_out=())
        except RankError as error:  # the hook fails in the probe: when does it?
            report = _report(subject, PROPERTIES[:1], Drawn(subject.claims, *limits), max_examples)
            if report.verdicts[PROPERTIES[0].name].outcome == "holds":
                raise error
            not_checked = Verdict("not checked", note="the hook does not complete")
            return replace(report, claims=None, verdicts=dict.fromkeys(known, not_checked) | report.verdicts)
        return _report(subject, searched, drawn, max_examples, processes, fail_fast)


def _report(
    subject: Subject,
    searched: Sequence[Property],
    drawn: Drawn,
    max_examples: int,
    processes: bool = True,
    fail_fast: bool = False,
) -> Report:
    report = Report(subject.name, subject.claims)
    known: list[type[AssertionError]] = []
    for position, each in enumerate(searched, 1):
        if fail_fast and report.failures:
            report.verdicts[each.name] = Verdict("not checked", note="a property before it fails")
            continue
        if reason := each.reason(subject):
            report.verdicts[each.name] = Verdict("not claimed", note=reason)
            continue
        if each is properties.same_in_processes:
            reason = subject.why_not_in_processes() if processes else "switched off"
            if reason:
                report.verdicts[each.name] = Verdict("not checked", note=reason)
                continue
        _show(f"{subject.name}: {position} of {len(searched)}, {each.name}")
        search = _Search(each, subject, tuple(known))
        if (strategy := each.workloads(drawn)) is not None:
            num_drawn = max(2, math.ceil(max_examples * each.fraction))
            limits = settings(REPEATED, max_examples=num_drawn, phases=PHASES)
            with suppress(NoSuchExample, Flaky):
                find(strategy, search.fails, settings=limits)
        # The drawn ones come first, as they shrink further.
        for workload in islice(each.listed(drawn), max_examples):
            if search.failure is not None or search.fails(workload):
                break
        search.confirm()
        report.verdicts[each.name] = search.verdict()
        known += each.explains if search.first is not None else ()
        if search.failure is not None:
            workload, message = search.failure.counterexample, search.failure.message
            if subject.make_state is None and "ProcessGroup' object has no attribute" in message:
                message += "\nIs the hook's state missing? Without make_state it is the process group."
            message += each.advice(subject, workload)
            if search.printed:
                message = "\n".join([message, "The hook printed, at the end:", *search.printed])
            report.failures.append(replace(search.failure, message=message))
    return report


@dataclass
class _Search:
    """The search for a workload on which a property of a hook fails.

    known: exceptions that have failed an earlier property. Workloads that raise one are passed over.
    failure, first: the last failure, and the first one.
    measured: the measured value, if any, of each workload on which the property holds.
    printed: the last lines that the hook printed when it failed again.
    """

    searched: Property
    subject: Subject
    known: tuple[type[AssertionError], ...] = ()
    failure: Failure | None = None
    measured: list[float | None] = field(default_factory=list)
    first: Failure | None = None
    printed: Sequence[str] = ()
    too_slow: str = ""

    def confirm(self) -> None:
        """Drop a failure if neither it nor the first one comes again: a busy machine accuses nobody."""
        found, self.failure = [each for each in (self.failure, self.first) if each is not None], None
        self.subject = replace(self.subject)  # it has kept no run
        with redirect_stdout(io.StringIO()) as printed:
            any(self.fails(each.counterexample) for each in found)
        self.printed = printed.getvalue().splitlines()[-MOST_PRINTED:]

    def fails(self, workload: Workload) -> bool:
        try:
            measured = self.searched.measured(self.subject, workload)
        except self.known:
            return False
        except TooSlow as error:
            self.too_slow = str(error)
            return False
        except (PropertyFailure, RankError) as error:
            self.failure = Failure(self.searched.name, workload, str(error))
            self.first = self.first or self.failure
            return True
        self.measured.append(measured)
        return False

    def verdict(self) -> Verdict:
        if self.failure is not None:
            message = self.failure.message.removeprefix(f"{self.searched.name}: ")
            return Verdict("fails", note=shorten(message.splitlines()[0], 90, placeholder="…"))
        if self.too_slow:
            return Verdict("not checked", None, len(self.measured), self.too_slow)
        if self.first is not None:
            note = f"not every time: {self.first.message.splitlines()[0]}"
            return Verdict("not checked", note=shorten(note, 160, placeholder="…"))
        if not self.measured:
            return Verdict("not checked", note="no example in which the hook completes with finite averages")
        values = [each for each in self.measured if each is not None]
        worst, note = (self.searched.worst(values), self.searched.measure) if values else (None, "")
        return Verdict("holds", worst, len(self.measured), note)


def _show(progress: str) -> None:
    """Overwrite a line on standard error if that is a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1  # no line may wrap
        print(f"{progress[:width]:<{width}}", end="\r", file=sys.stderr, flush=True)
