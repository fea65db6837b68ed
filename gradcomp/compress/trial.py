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
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import torch

from gradcomp import ops

from ..rules import COUNT, RANK
from .checkpoint import counts, require_keys

WARM_UP_STEPS = 2  # of each turn
# A candidate that took this many times the fastest one's time in a round gets no turns in later rounds.
DROPPED_FROM = 1.5


def choose(seconds: Sequence[float], tolerance: float, current: int | None = None) -> int:
    """Return which candidate to use: the first that takes at most 1 + tolerance times the fastest.

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
    """The turns of a trial, and its result. dataclasses.asdict makes a checkpoint of it.

    names: the candidates, the mildest first.
    place: the number of ranks, and of ranks per node, for which the result holds.
    steps_per_turn, num_rounds, tolerance: AutoState's options when the trial began.
    before: the candidate that an earlier trial chose; None without one.
    taking_part: the candidates that take turns in this round.
    step: the number of steps in this round so far.
    seconds: by candidate, the median times of a step, one for each round.
    sent_bytes: by candidate, the bytes that a rank sends per step; with nodes, a node.
    choice: the chosen candidate; None during the trial.
    chosen_at: the number of the first step with the choice; 0 during the trial.
    """

    names: list[str]
    place: tuple[int, int]
    steps_per_turn: int
    num_rounds: int
    tolerance: float
    before: str | None = None
    taking_part: list[str] = field(default_factory=list)
    step: int = 0
    round: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    choice: str | None = None
    chosen_at: int = 0

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

    def end_round(self, seconds: Sequence[float], next_step: int) -> None:
        """Begin the next round, or choose.

        seconds: of a step, for each candidate that takes part; inf if unknown. Equal on all ranks.
        next_step: the number of the step that comes now.
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
            self.chosen_at = next_step

    def medians(self) -> dict[str, float]:
        """Return each candidate's median over the rounds, in seconds; inf for one that is unknown."""
        return {name: statistics.median(each) if each else math.inf for name, each in self.seconds.items()}

    @classmethod
    def from_dict(cls, given: Any) -> "Trial":
        """Return the trial that dataclasses.asdict has described.

        Raises KeyError for missing and unknown entries, ValueError for entries that don't fit.
        """
        require_keys("trial", given, [each.name for each in fields(cls)])
        names, taking_part, seconds = given["names"], given["taking_part"], given["seconds"]
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names) or not names:
            raise ValueError(f"trial: names is {names!r}, but must be a list of names")
        if (
            not isinstance(taking_part, list)
            or not taking_part
            or any(each not in names for each in taking_part)
        ):
            raise ValueError(f"trial: taking_part is {taking_part!r}, but must be some of {names}")
        is_by_name = isinstance(seconds, dict) and list(seconds) == names
        if not is_by_name or not all(isinstance(each, list) for each in seconds.values()):
            raise ValueError(
                f"trial: seconds is {seconds!r}, but must have a list of times for each of {names}"
            )
        for name in ("choice", "before"):
            if given[name] not in (None, *names):
                raise ValueError(f"trial: {name} is {given[name]!r}, but must be one of {names}")
        place, sent_bytes = counts("trial: place", given["place"]), given["sent_bytes"]
        if len(place) != 2 or not isinstance(sent_bytes, dict):
            raise ValueError(
                f"trial: place is {place} and sent_bytes {sent_bytes!r}, but must be two numbers and a dict"
            )
        numbers = {name: COUNT(f"trial: {name}", given[name]) for name in ("step", "round", "chosen_at")}
        options = {name: RANK(f"trial: {name}", given[name]) for name in ("steps_per_turn", "num_rounds")}
        return cls(
            names,
            (place[0], place[1]),
            tolerance=_checked_time("tolerance", given["tolerance"]),
            before=given["before"],
            taking_part=taking_part,
            seconds={
                name: [_checked_time(f"a time of {name}", each) for each in seconds[name]] for name in names
            },
            sent_bytes={name: COUNT(f"trial: bytes of {name}", each) for name, each in sent_bytes.items()},
            choice=given["choice"],
            **numbers,
            **options,
        )


def _checked_time(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"trial: {name} is {value!r}, but must be finite and at least 0")
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
