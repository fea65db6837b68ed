"""A hook that notes when each bucket is ready in backward, and communicates nothing."""

import time

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.hooks import debugging_hooks

# No `from __future__ import annotations`: DDP compares a hook's annotations with types.


class ReadyTimes:
    """When each bucket of the last backward was ready, after the begin() before it, by the device's clock."""

    def __init__(self, device: torch.device):
        self._device = device
        self._times: list[tuple[int, float | torch.cuda.Event, float | torch.cuda.Event]] = []
        self.begin()

    def begin(self) -> None:
        """Note the current time as the one that the next buckets' are counted from."""
        self._start = self._now()

    def add(self, index: int) -> None:
        """Note that the bucket of this index is ready. The first one begins a new backward."""
        if index == 0:
            self._times = []
        self._times.append((index, self._start, self._now()))

    def seconds(self) -> list[float]:
        """Return the last backward's times, by bucket; the device has to have done its work."""
        ordered = sorted(self._times, key=lambda each: each[0])
        return [_between(start, end) for _, start, end in ordered]

    def _now(self) -> float | torch.cuda.Event:
        if not ops.has_streams(self._device):
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def recording_hook(state: ReadyTimes, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the bucket as it is, and note the time."""
    state.add(bucket.index())
    return debugging_hooks.noop_hook(None, bucket)


def _between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return float(start.elapsed_time(end)) / 1e3
