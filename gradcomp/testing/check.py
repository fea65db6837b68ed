"""Check the properties that apply to a hook, and report the smallest workloads found on which one fails."""

from __future__ import annotations

import io
import math
import sys
import threading
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
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
LONGEST_MESSAGE = 18  # lines; a longer one holds a traceback: its middle lines are left out
MOST_PRINTED = 5  # lines of a hook's own
_CAPTURED = threading.RLock()  # standard output is the whole process's: checks take turns
LONGEST_S = 180.0  # of a check with 25 examples; right hooks take 10 to 60 s of a CPU


@dataclass(frozen=True)
class Failure:
    """A property that fails for a hook, the smallest workload found on which it fails, and its message."""

    property: str
    counterexample: Workload
    message: str
    advice: str = ""  # the claim with which the property wouldn't apply to the hook

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

    outcome: Literal["holds", "fails", "not claimed", "not checked"]
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
        names = [each.advice.partition(" ")[0] for each in self.failures if each.advice]
        # A hook with the claim tracks may keep NaN, too. If it also hides inf, its next report says so.
        tracks = [name for name in names if name.startswith("tracks=")]
        claimed = ", ".join(name for name in names if not tracks or name != "shows_nonfinite=False")
        last = [f"\nIf all is intended: claims=dataclasses.replace(claims_of(hook, make_state), {claimed})"]
        return "\n".join([head, *rows, *(f"\n{failure}" for failure in self.failures), *last * bool(claimed)])


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
    if unknown := set(only) - set(properties.__all__):
        raise ValueError(f"unknown properties {sorted(unknown)}; known: {properties.__all__}")
    searched = [each for each in PROPERTIES if not only or each.name in only]
    failing = Claims(start=PROBED_STEPS - 3)  # of a hook that fails in the probe
    subject = Subject(hook, make_state, claims or failing, ranks, LONGEST_S * max(1.0, max_examples / 25))
    world_sizes = WORLD_SIZES if world_size is None else (world_size,)
    limits = (world_sizes, dtypes or (torch.float32, torch.float64), device)
    with _CAPTURED, redirect_stdout(io.StringIO()):
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
            if report.verdicts["completes"].outcome == "holds":
                raise error
            not_checked = Verdict("not checked", note="the hook does not complete")
            verdicts = dict.fromkeys(properties.__all__, not_checked) | report.verdicts
            return replace(report, claims=None, verdicts=verdicts)
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
        in_processes = each is properties.same_in_processes
        found: Verdict | Failure
        if fail_fast and report.failures:
            found = Verdict("not checked", note="a property before it fails")
        elif reason := each.reason(subject):
            found = Verdict("not claimed", note=reason)
        elif in_processes and (reason := subject.why_not_in_processes() if processes else "switched off"):
            found = Verdict("not checked", note=reason)
        else:
            _show(f"{subject.name}: {position} of {len(searched)}, {each.name}")
            found = _search(each, subject, drawn, max_examples, known)
        if isinstance(found, Failure):
            report.failures.append(found)
            known += each.explains
            shown = found.message.removeprefix(f"{each.name}: ").splitlines()[0]
            found = Verdict("fails", note=shorten(shown, 90, placeholder="…"))
        report.verdicts[each.name] = found
    _show("")
    return report


def _search(
    searched: Property, subject: Subject, drawn: Drawn, max_examples: int, known: list[type[AssertionError]]
) -> Verdict | Failure:
    """Search for a workload on which a property of a hook fails; return the failure if it comes again.

    known: exceptions that have failed an earlier property. Workloads that raise one are passed over.
    """
    measured: list[float | None] = []
    failures: list[Failure] = []
    too_slow = ""

    def fails(workload: Workload) -> bool:
        nonlocal too_slow
        try:
            measured.append(searched.measured(subject, workload))
        except tuple(known):
            pass
        except TooSlow as error:
            too_slow = str(error)
        except (PropertyFailure, RankError) as error:
            failures.append(Failure(searched.name, workload, str(error)))
            return True
        return False

    if (strategy := searched.workloads(drawn)) is not None:
        num_drawn = max(2, math.ceil(max_examples * searched.fraction))
        with suppress(NoSuchExample, Flaky):
            find(strategy, fails, settings=settings(REPEATED, max_examples=num_drawn, phases=PHASES))
    if not failures:  # the drawn ones come first, as they shrink further
        any(map(fails, islice(searched.listed(drawn), max_examples)))
    # A busy machine accuses nobody: the last failure or the first one must come again, in a new run.
    found, subject = [*failures[-1:], *failures[:1]], replace(subject)
    failures.clear()
    with redirect_stdout(io.StringIO()) as printed:
        any(fails(each.counterexample) for each in found)
    if failures:
        message = failures[0].message
        if subject.make_state is None and "ProcessGroup' object has no attribute" in message:
            message += "\nIs the hook's state missing? Without make_state it is the process group."
        if advice := searched.advice(subject, failures[0].counterexample):
            message += f"\nIf that is intended, claim {advice}"
        if lines := printed.getvalue().splitlines()[-MOST_PRINTED:]:
            message = "\n".join([message, "The hook printed, at the end:", *lines])
        return replace(failures[0], message=message, advice=advice)
    if too_slow:
        return Verdict("not checked", None, len(measured), too_slow)
    if found:
        note = f"not every time: {found[-1].message.splitlines()[0]}"
        return Verdict("not checked", note=shorten(note, 160, placeholder="…"))
    if not measured:
        return Verdict("not checked", note="no example in which the hook completes with finite averages")
    values = [each for each in measured if each is not None]
    worst, note = (searched.worst(values), searched.measure) if values else (None, "")
    return Verdict("holds", worst, len(measured), note)


def _show(progress: str) -> None:
    """Overwrite a line on standard error if that is a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"{progress:<79.79}", end="\r", file=sys.stderr, flush=True)
