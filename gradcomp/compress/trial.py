"""A trial of several compressions while training goes on: the turns, the rule, and the clock.

    round 0   none none none … │ bf16 bf16 … │ int8 …      turns of a few steps
    round 1   none none none … │ bf16 …                    in every round again: speeds drift
    …         the rule chooses

The first steps of a turn don't count: their compressors and buffers are new, and they wait for the last
candidate's all-reduce. Every other step is paired with the first candidate's step in the same place of the
same round. The differences are the candidate's gain. docs/auto.md has the rule.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch

from ..comm.reduced_values import ReducedValues
from ..comm.streams import Future, mark, seconds_between
from ..rules import COUNT, RANK, Rule
from .checkpoint import require_keys

WARM_UP_STEPS = 2  # of each turn
# A candidate that took this many times the fastest one's time in a round gets no turns in later rounds. The
# first candidate keeps its turns: the others are compared with it.
DROPPED_FROM = 1.5
# After the trial: a step is slow if it takes this many times the step of the trial. MAX_SLOW_STEPS in a row
# begin another trial. The ranks compare every CHECK_EVERY steps, and know the result at the next check.
SLOW, MAX_SLOW_STEPS, CHECK_EVERY = 1.25, 50, 25
# A trial that isn't sure goes on to twice and to four times its rounds. One that is ends early if a
# candidate is surely CLEAR times as fast as the first one.
LOOKS, CLEAR = (1, 2, 4), 2
# The probability, at most, that the lower end of any candidate's interval is above its true gain at any look.
RISK = 0.05
# After a trial that wasn't sure, another one comes after this many times its steps.
PAUSE = 10

TOLERANCE = Rule(
    "a number of at least 0 and below 1", lambda value: type(value) in (int, float) and 0 <= value < 1, float
)
TURN = Rule(
    f"an int above {WARM_UP_STEPS}: the first {WARM_UP_STEPS} steps of a turn don't count",
    lambda value: type(value) is int and value > WARM_UP_STEPS,
)


class Gain(NamedTuple):
    """How much shorter a candidate's steps are than the first candidate's, in seconds.

    median: of the pairs of steps.
    low, high: the interval for the true median.
    level: the probability that such an interval holds the true median, for any distribution of noise.
    """

    median: float
    low: float
    high: float
    level: float

    @classmethod
    def of(cls, first: Sequence[float], other: Sequence[float], num_compared: int) -> "Gain | None":
        """Return the gain of the steps `other` over the steps `first`, in pairs; None without pairs.

        first, other: seconds; inf if unknown.
        num_compared: the number of candidates that are compared with the first, which share RISK.

        The interval goes from the k-th smallest difference to the k-th largest one: the sign test's. The
        true median is below it with the probability that at most k - 1 of n fair coins show tails.
        """
        pairs = zip(first, other, strict=True)
        gains = sorted(a - b for a, b in pairs if math.isfinite(a) and math.isfinite(b))
        num, k = len(gains), 1
        if num == 0:
            return None
        below = 1 / 2**num
        while (more := below + math.comb(num, k) / 2**num) <= RISK / num_compared:
            below, k = more, k + 1
        return cls(statistics.median(gains), gains[k - 1], gains[-k], 1 - 2 * below)


def choose(seconds: Sequence[float], tolerance: float, current: int | None = None) -> int:
    """Return which candidate to use: the first that takes at most 1 + tolerance times the fastest.

    seconds: of a step, by candidate, the mildest first; inf for one that doesn't pay.
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
    return current if seconds[current] <= min(seconds) * (1 + 2 * tolerance) else first_within(1)


def median_of(seconds: Sequence[float]) -> float:
    """Return the median of the known times; inf if none is known."""
    known = [each for each in seconds if math.isfinite(each)]
    return statistics.median(known) if known else math.inf


@dataclass
class Trial:
    """The turns of a trial, and its result. dataclasses.asdict makes a checkpoint of it.

    names: the candidates, the mildest first.
    place: the number of ranks, and of ranks per node, for which the result holds.
    steps_per_turn, num_rounds, tolerance: AutoState's options when the trial began.
    before: the candidate that an earlier trial chose; None without one.
    taking_part: the candidates that take turns in this round.
    step: the number of steps in this round so far; negative in the first steps of a process, before it.
    seconds: by candidate, the times of the steps that count, of the ranks' mean; inf if unknown.
    waits: the time that each of the first candidate's steps waits for its averages, on the slowest rank.
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
    waits: list[float] = field(default_factory=list)
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
        return self.choice or self.taking_part[max(turn, 0)]

    @property
    def settings(self) -> tuple[Any, ...]:
        """What the result holds for: the place, the candidates, and the options."""
        return self.place, self.names, self.steps_per_turn, self.num_rounds, self.tolerance

    def round_of(
        self, seconds: Mapping[int, float], waits: Mapping[int, float]
    ) -> tuple[list[float], list[float]]:
        """Return this rank's (times of the steps of a round that count, waits), given by step."""
        steps = range(self.steps_per_turn * len(self.taking_part))
        counted = [step for step in steps if step % self.steps_per_turn >= WARM_UP_STEPS]
        first = [step for step in counted if step < self.steps_per_turn]
        return [seconds.get(i, math.inf) for i in counted], [waits.get(i, math.inf) for i in first]

    def end_round(self, seconds: Sequence[float], waits: Sequence[float], next_step: int) -> None:
        """Begin the next round, or choose.

        seconds, waits: as from round_of, of the ranks' mean, and of the slowest rank. Equal on all ranks.
        next_step: the number of the step that comes now.
        """
        num = self.steps_per_turn - WARM_UP_STEPS
        turns = [list(seconds[i : i + num]) for i in range(0, len(seconds), num)]
        self.waits += waits
        of_round = dict(zip(self.taking_part, turns, strict=True))
        for name, each in self.seconds.items():
            each += of_round.get(name, [math.inf] * num)
        self.step, self.round = 0, self.round + 1
        looks = [self.num_rounds * each for each in LOOKS]
        is_last = self.round >= looks[-1] or ((self.is_clear or self.round in looks) and self.is_sure)
        if not is_last:
            limit = DROPPED_FROM * min(map(median_of, turns))
            left = {name for name in self.taking_part[1:] if limit < min(of_round[name]) < math.inf}
            self.taking_part = [name for name in self.taking_part if name not in left]
        if is_last or (len(self.taking_part) == 1 and not self.unknown):
            self.choice, self.chosen_at = self._best(self._pays), next_step

    def _pays(self, name: str) -> bool:
        return not self.objection(name)

    def _best(self, pays: Callable[[str], bool]) -> str:
        """Return the candidate that the rule chooses if those pay for which pays(name) is true."""
        times, first = self.medians(), self.names[0]
        steps = [times[name] if pays(name) else math.inf for name in self.taking_part]
        before = self.taking_part.index(self.before) if self.before in self.taking_part else None
        return first if self.unknown else self.taking_part[choose(steps, self.tolerance, before)]

    @property
    def is_sure(self) -> bool:
        """Whether more rounds wouldn't help: all times are known, and the choice would be the same if every
        candidate paid whose gain isn't surely above the wait."""

        def may_pay(name: str) -> bool:
            gain = self.gain(name)
            return gain is None or gain.low <= self.wait < math.inf

        return len(self.names) == 1 or (not self.unknown and self._best(self._pays) == self._best(may_pay))

    def is_over_after(self, num_steps: int, every: int | None) -> bool:
        """Whether another trial comes, this many steps after the choice. every: AutoState.retrial_every."""
        pause = PAUSE * self.round * self.steps_per_turn * len(self.names)
        return every is not None and (num_steps >= every or (num_steps == pause and not self.is_sure))

    @property
    def is_clear(self) -> bool:
        """Whether a candidate that pays is surely at least CLEAR times as fast as the first one."""
        step, level = self.medians()[self.names[0]], 1 - 2 * RISK / max(len(self.names) - 1, 1)
        gains = filter(None, map(self.gain, filter(self._pays, self.taking_part)))
        return any(gain.level >= level and gain.low > step - step / CLEAR for gain in gains)

    @property
    def unknown(self) -> list[str]:
        """The candidates of which no step's time is known."""
        return [name for name, seconds in self.medians().items() if seconds == math.inf]

    @property
    def wait(self) -> float:
        """The median time that the first candidate's steps wait for their averages; inf if unknown."""
        return median_of(self.waits)

    def medians(self) -> dict[str, float]:
        """Return each candidate's median step, in seconds; inf for one that is unknown."""
        return {name: median_of(each) for name, each in self.seconds.items()}

    def gain(self, name: str) -> Gain | None:
        """Return a candidate's gain over the first one; None if it is unknown, or the first one itself."""
        first, compared = self.names[0], len(LOOKS) * (len(self.names) - 1)
        return None if name == first else Gain.of(self.seconds[first], self.seconds[name], compared)

    def objection(self, name: str) -> str:
        """Return in words why a candidate doesn't pay; "" if it does. The first one needs no gain.

        A candidate that an earlier trial chose pays if the median of its gain is half the tolerance: noise
        shouldn't flip the choice.
        """
        gain, step, is_in_use = self.gain(name), self.medians()[self.names[0]], name == self.before
        if name == self.names[0]:
            return ""
        if name not in self.taking_part:
            return f"it took more than {DROPPED_FROM} times the fastest one's time"
        if gain is None or not math.isfinite(self.wait):
            return "its gain or the wait is unknown"
        needed, found = (self.tolerance / 2, gain.median) if is_in_use else (self.tolerance, gain.low)
        if found <= needed * step:
            return f"its gain may be at most {needed:.1%} of a step"
        return "it gains more than the wait, so something else has changed" if gain.low > self.wait else ""

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each candidate; see AutoState.table."""
        rows = []
        for name, seconds in self.medians().items():
            gain = self.gain(name) or Gain(*[math.inf] * 4)
            times = {"ms": seconds, "wait_ms": self.wait if name == self.names[0] else math.inf}
            times |= {"gain_ms": gain.median, "gain_low_ms": gain.low, "gain_high_ms": gain.high}
            known = {key: each * 1e3 if math.isfinite(each) else None for key, each in times.items()}
            level = gain.level if math.isfinite(gain.level) else None
            row = {"candidate": name, **known, "level": level, "why": self.objection(name)}
            rows.append({**row, "sent_bytes": self.sent_bytes.get(name)})
        return rows

    @classmethod
    def from_dict(cls, given: Any) -> "Trial":
        """Return the trial that dataclasses.asdict has described.

        Raises KeyError for missing and unknown entries, ValueError for entries that don't fit.
        """
        require_keys("trial", given, [each.name for each in fields(cls)])
        try:
            trial = cls(**{**given, "place": tuple(given["place"])})
            wrong = next((name for name, is_right in trial._checks() if not is_right), None)
        except (TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"trial: an entry has another type than a trial's: {error}") from error
        if wrong is not None:
            raise ValueError(f"trial: {wrong} is {given[wrong]!r}, which doesn't fit {given['names']!r}")
        return trial

    def _checks(self) -> Iterator[tuple[str, bool]]:
        """Yield (name, whether its value fits) for every field. Raises TypeError or AttributeError, too."""
        names, times = self.names, [self.waits, *self.seconds.values()]
        yield "names", bool(names) and all(isinstance(each, str) for each in names)
        yield "place", len(self.place) == 2 and all(map(COUNT.accepts, self.place))
        yield "taking_part", self.taking_part[:1] == names[:1] and set(self.taking_part) <= set(names)
        yield "seconds", list(self.seconds) == names and {len(each) for each in times} == {len(self.waits)}
        yield "waits", all(isinstance(each, int | float) and each >= 0 for each in chain(*times))
        yield "sent_bytes", all(map(COUNT.accepts, self.sent_bytes.values()))
        yield "choice", self.choice in (None, *names)
        yield "before", self.before in (None, *names)
        yield "step", type(self.step) is int
        rules = {"steps_per_turn": TURN, "num_rounds": RANK, "tolerance": TOLERANCE}
        for name, rule in {**rules, "round": COUNT, "chosen_at": COUNT}.items():
            yield name, rule.accepts(getattr(self, name))


class SlowSteps:
    """The steps after a trial that were slow in a row, on the rank that has most of them."""

    def __init__(self) -> None:
        self._num = 0
        self._on_ranks: ReducedValues | None = None  # of the last check

    def are_too_many(self, steps: Sequence[Any], usual: float, groups: Any, device: torch.device) -> bool:
        """Add steps; return whether there were MAX_SLOW_STEPS at the last check. The host doesn't wait.

        steps: from StepClock.take.
        usual: the seconds of a step in the trial.
        groups: the process groups that compare their ranks.
        """
        for _, seconds in steps:
            self._num = self._num + 1 if seconds > SLOW * usual else 0
        if self._on_ranks is not None and self._on_ranks.wait()[0] >= MAX_SLOW_STEPS:
            return True
        self._on_ranks = ReducedValues("compare the speed of auto_hook's steps", [self._num], groups, device)
        return False


class StepClock:
    """The times of steps, and their waits for averages, by the number that a step is given.

    A step ends where its last bucket's hook begins, whether that hook waits for the average or DDP does: so
    its own wait belongs to the time of the next step. On CUDA by events on the stream of backward.

    Times that are not finite and positive are left out.

    now: the clock for the ends of steps, in seconds; None for the device's events or time.perf_counter.
    """

    def __init__(self, now: Callable[[], float] | None = None):
        self._now = now
        self._begin: Any = None  # of the last bucket
        self._marks: list[tuple[int, Any]] = []
        self._waits: dict[int, tuple[list[Any], list[Any]]] = {}

    def begin_bucket(self, device: torch.device) -> None:
        """Note that a bucket's hook begins now."""
        self._begin = mark(device)

    def add_wait(self, number: int, average: Future, device: torch.device) -> None:
        """Note that a step waits for an average: from its last bucket's begin to the last average."""
        begins, ends = self._waits.setdefault(number, ([], []))
        begins.append(self._begin)
        # On CUDA a callback's stream waits for the average, so the event in it does, too.
        average.add_done_callback(lambda _: ends.append(mark(device)))

    def end_step(self, number: int) -> None:
        """Note that a step has ended with the last bucket. number: stands for the time since the last end."""
        end, self._begin = self._begin if self._now is None else self._now(), None
        if end is not None:  # a step without buckets has no end
            self._marks.append((number, end))

    def forget(self) -> None:
        """Forget the steps so far: the time until the next step's end doesn't count."""
        self._marks, self._waits = [], {}

    def take(self, *, waits: bool = False) -> list[tuple[int, float]]:
        """Return (number, seconds) of the steps that have ended since the last call, and forget them.

        waits: whether the host waits for the device. Otherwise steps that the device hasn't ended are left.
        """
        events = [end for _, end in self._marks if isinstance(end, torch.cuda.Event)]
        if waits and events:
            events[-1].synchronize()
        num_ended = len(self._marks) - sum(not event.query() for event in events)
        ended, self._marks = self._marks[:num_ended], self._marks[max(num_ended - 1, 0) :]
        return [
            (number, seconds)
            for (_, first), (number, last) in pairwise(ended)
            if 0 < (seconds := seconds_between(first, last)) < math.inf
        ]

    def take_waits(self, *, of_each: bool) -> dict[int, float]:
        """Return the waits by number, without those that haven't ended, and forget them. The host waits.

        of_each: True where each bucket's average is waited for before the next bucket begins, as between the
            replicas of a sharded model: the sum of their waits.
        """
        taken, self._waits = self._waits, {}
        waits = {
            number: sum(map(seconds_between, begins, ends))
            if of_each
            else max(seconds_between(begins[-1], end) for end in ends)
            for number, (begins, ends) in taken.items()
            if len(ends) == len(begins)
        }
        return {number: seconds for number, seconds in waits.items() if seconds >= 0}
