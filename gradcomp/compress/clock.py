"""The times of steps and of buckets, on the device's clock. The host waits when it reads them."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from gradcomp import ops

from ..comm.streams import Future


def mark(device: torch.device) -> Any:
    """Return the time, on CUDA as an event on the current stream."""
    if not ops.has_streams(device):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def wait_until(end: Any) -> None:
    """Wait until the device has passed a mark."""
    if isinstance(end, torch.cuda.Event):
        end.synchronize()


def seconds_between(first: Any, last: Any) -> float:
    """Return the time between two marks. The host waits for the second."""
    if isinstance(first, torch.cuda.Event):
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3
    return float(last - first)


class StepClock:
    """The times of steps, and their waits for averages, by the number that a step is given.

    A step ends where its last bucket's hook begins, whether that hook waits for the average or DDP does: so
    its own wait belongs to the time of the next step. On CUDA by events on the stream of backward.

    now: the clock for the ends of steps, in seconds; None for the device's events or time.perf_counter.
    """

    def __init__(self, now: Callable[[], float] | None = None):
        self._now = now
        self._begin: Any = None  # of the last bucket
        self._marks: list[tuple[int | None, Any]] = []
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

    def end_step(self, number: int | None) -> None:
        """Note that a step has ended with the last bucket.

        number: stands for the time since the last step's end; None if that time doesn't count.
        """
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
            (number, seconds_between(first, last))
            for (_, first), (number, last) in pairwise(ended)
            if number is not None
        ]

    def take_waits(self, *, of_each: bool) -> dict[int, float]:
        """Return the waits by number, without those that haven't ended, and forget them. The host waits.

        of_each: True where each bucket's average is waited for before the next bucket begins, as between the
            replicas of a sharded model: the sum of their waits.
        """
        taken, self._waits = self._waits, {}
        return {
            number: sum(map(seconds_between, begins, ends))
            if of_each
            else max(seconds_between(begins[-1], end) for end in ends)
            for number, (begins, ends) in taken.items()
            if len(ends) == len(begins)
        }
