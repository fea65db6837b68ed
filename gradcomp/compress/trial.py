"""A trial of several compressions while training goes on: the turns, the rule, and the clock.

    round 0   none none none … │ bf16 bf16 … │ int8 …      turns of a few steps
    round 1   none none none … │ bf16 …                    in every round again: speeds drift
    …         the rule chooses

The first steps of a turn don't count: their compressors and buffers are new, and they wait for the last
candidate's all-reduce.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from gradcomp import ops

from ..rules import COUNT
from .checkpoint import require_keys

WARM_UP_STEPS = 2  # of each turn
# A candidate that took this many times the fastest one's time in a round gets no turns in later rounds.
DROPPED_FROM = 1.5


def choose(seconds: Sequence[float], tolerance: float, current: int | None = None) -> int:
    """Return which candidate to use: the first whose step takes at most 1 + tolerance times the fastest.

    seconds: of a step, by candidate, the mildest first.
    current: the one in use, if there was an earlier trial. So that noise doesn't flip the choice, it stays
        unless a milder one is within half the tolerance, or it is itself outside twice the tolerance.
    """

    def first_within(part: float) -> int:
        limit = min(seconds) * (1 + part * tolerance)
        return next(i for i, each in enumerate(seconds) if each <= limit)

    if current is None:
        return first_within(1)
    if (milder := first_within(1 / 2)) < current:
        return milder
    is_near = seconds[current] <= min(seconds) * (1 + 2 * tolerance)
    return current if is_near else first_within(1)


@dataclass
class Trial:
    """The turns of a trial, and its result.

    names: the candidates, the mildest first.
    steps_per_turn, num_rounds, tolerance: AutoState's options.
    before: the candidate that an earlier trial chose; None without one.
    taking_part: the candidates that take turns in this round.
    step: the number of steps in this round so far.
    seconds: by candidate, the median times of a step, one for each round.
    choice: the chosen candidate; None during the trial.
    """

    names: list[str]
    steps_per_turn: int
    num_rounds: int
    tolerance: float
    before: str | None = None
    taking_part: list[str] = field(default_factory=list)
    step: int = 0
    round: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    choice: str | None = None

    def __post_init__(self) -> None:
        self.taking_part = self.taking_part or list(self.names)
        self.seconds = self.seconds or {name: [] for name in self.names}
        if len(self.names) == 1:
            self.choice = self.names[0]

    @property
    def current(self) -> str:
        """The candidate to use now."""
        turn = min(self.step // self.steps_per_turn, len(self.taking_part) - 1)
        return self.choice or self.taking_part[turn]

    @property
    def is_measuring(self) -> bool:
        """True if the time up to the end of this step counts."""
        return self.choice is not None or self.step % self.steps_per_turn >= WARM_UP_STEPS

    @property
    def is_round_over(self) -> bool:
        return self.choice is None and self.step >= self.steps_per_turn * len(self.taking_part)

    def end_round(self, seconds: Sequence[float]) -> None:
        """Begin the next round, or choose.

        seconds: of a step, for each candidate that takes part; inf if unknown. The same on all ranks.
        """
        for name, each in zip(self.taking_part, seconds, strict=True):
            if math.isfinite(each):
                self.seconds[name].append(each)
        limit = DROPPED_FROM * min(seconds)
        left = zip(self.taking_part, seconds, strict=True)
        self.taking_part = [name for name, each in left if each <= limit or not self.seconds[name]]
        self.step, self.round = 0, self.round + 1
        is_known = all(self.seconds.values())
        if is_known and (self.round >= self.num_rounds or len(self.taking_part) == 1):
            before = self.names.index(self.before) if self.before in self.names else None
            self.choice = self.names[choose(list(self.medians().values()), self.tolerance, before)]

    def medians(self) -> dict[str, float]:
        """Return each candidate's median over the rounds, in seconds; inf for one that is unknown."""
        return {name: statistics.median(each) if each else math.inf for name, each in self.seconds.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return what `from_dict` needs, in plain types."""
        return {
            "names": list(self.names),
            "before": self.before,
            "taking_part": list(self.taking_part),
            "step": self.step,
            "round": self.round,
            "seconds": {name: list(each) for name, each in self.seconds.items()},
            "choice": self.choice,
        }

    @classmethod
    def from_dict(cls, given: Any, steps_per_turn: int, num_rounds: int, tolerance: float) -> "Trial":
        """Return the trial that as_dict() has described.

        Raises KeyError for missing and unknown entries, ValueError for entries that don't fit.
        """
        expected = ("names", "before", "taking_part", "step", "round", "seconds", "choice")
        require_keys("trial", given, expected)
        names, taking_part = (
            [str(each) for each in given[name]] if isinstance(given[name], list | tuple) else []
            for name in ("names", "taking_part")
        )
        seconds = given["seconds"]
        is_timed = isinstance(seconds, dict) and list(seconds) == names
        if not names or not taking_part or not set(taking_part) <= set(names) or not is_timed:
            raise ValueError(f"trial: names is {given['names']!r} and taking_part {given['taking_part']!r}")
        for name in ("choice", "before"):
            if given[name] is not None and given[name] not in (names if name == "choice" else [given[name]]):
                raise ValueError(f"trial: {name} is {given[name]!r}, but must be one of {names}")
        times = {name: [_checked_time(name, each) for each in seconds[name]] for name in names}
        steps, rounds = (COUNT(f"trial: {name}", given[name]) for name in ("step", "round"))
        made = cls(names, steps_per_turn, num_rounds, tolerance, given["before"], taking_part, steps, rounds)
        made.seconds, made.choice = times, given["choice"]
        return made


def _checked_time(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"trial: a time of {name} is {value!r}, but must be finite and at least 0")
    return float(value)


class StepClock:
    """The times between the ends of steps: on CUDA by events on the stream of backward, else by the clock.

    now: the clock, in seconds; None for the device's events or time.perf_counter.
    """

    def __init__(self, now: Callable[[], float] | None = None):
        self._now = now
        self._marks: list[tuple[str | None, Any]] = []

    def end_step(self, name: str | None, device: torch.device) -> None:
        """Note that a step ends now.

        name: the candidate whose time it was since the last step's end; None if that time doesn't count.
        """
        if self._now is not None or not ops.has_streams(device):
            self._marks.append((name, (self._now or time.perf_counter)()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        self._marks.append((name, event))

    def forget(self) -> None:
        """Forget the steps so far: the time until the next step's end doesn't count."""
        self._marks = []

    def take(self, *, waits: bool = False) -> list[tuple[str, float]]:
        """Return (candidate, seconds) of the steps that have ended since the last call, and forget them.

        waits: whether the host waits for the device. Otherwise steps that the device hasn't ended are left.
        """
        events = [mark for _, mark in self._marks if isinstance(mark, torch.cuda.Event)]
        if waits and events:
            events[-1].synchronize()
        num_ended = len(self._marks) - sum(not event.query() for event in events)
        ended, self._marks = self._marks[:num_ended], self._marks[max(num_ended - 1, 0) :]
        return [
            (name, _seconds_between(first, last))
            for (_, first), (name, last) in pairwise(ended)
            if name is not None
        ]


def _seconds_between(first: Any, last: Any) -> float:
    if isinstance(first, torch.cuda.Event):
        return float(first.elapsed_time(last)) / 1e3
    return float(last - first)
