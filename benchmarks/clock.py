"""Time calls on any device, with the calls of several providers interleaved.

Before each call the cache is emptied by reading a buffer four times the cache's size. Reading, unlike
writing, leaves no dirty lines for the timed call to write back.

On CUDA, events measure the device time. Before the first event a sleeping kernel holds the stream until the
host has enqueued the whole call, so the device time has no launch costs. These are measured separately, as
host time. On a CPU the wall clock measures the time.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch

WARM_UP_CALLS = 3
MIN_ROUNDS, MAX_ROUNDS = 5, 500
MIN_HOST_CALLS, MAX_HOST_CALLS = 3, 30
# The rate at which the sleeping kernel counts; a slower clock makes it last longer, which does no harm.
SLEEP_CYCLES_PER_US = 2000
MAX_HEAD_START_US = 50_000
CPU_CACHE_BYTES = 2**25  # roughly the last level's size, which torch doesn't tell


class Quantiles(NamedTuple):
    """The quantiles of one number per round: the middle 60 % of the rounds are between p20 and p80."""

    p20: float
    p50: float
    p80: float


@dataclass(frozen=True)
class Timing:
    """A call's time in each of the rounds, in µs. host_us is None where the host computes."""

    samples_us: Sequence[float]
    host_us: float | None = None

    @property
    def us(self) -> Quantiles:
        return _quantiles(self.samples_us)

    def times(self, baseline: "Timing") -> Quantiles:
        """Compute how many times as fast as the baseline the call is, round by round.

        A machine that is slow for a second slows both, so ratios vary less than times.
        """
        pairs = zip(baseline.samples_us, self.samples_us, strict=True)
        return _quantiles([theirs / ours for theirs, ours in pairs])


class Clock:
    """Times calls on one device, and measures the copy bandwidth there."""

    def __init__(self, device: torch.device, quick: bool = False):
        self.device, self.quick = device, quick
        self.seconds_per_case = (0.2 if quick else 0.5) if self.on_cuda else (0.1 if quick else 3.0)
        cache_bytes = CPU_CACHE_BYTES
        if self.on_cuda:
            cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.zeros(cache_bytes, dtype=torch.float32, device=device)  # 4 times as many bytes
        self._copied_bytes = (2**30 if self.on_cuda else 2**26) // (4 if quick else 1)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def time(
        self, providers: Mapping[str, Callable[[], object]], seconds: float | None = None
    ) -> dict[str, Timing]:
        """Time the providers' calls, round after round, each round in a random order.

        The call before a call changes its time. In a random order every call comes before every other one
        equally often.
        """
        host_us: dict[str, float | None] = {}
        for name, call in providers.items():
            for _ in range(WARM_UP_CALLS):
                call()
            host_us[name] = self._host_us(call, self._seconds(seconds)) if self.on_cuda else None
        samples_us: dict[str, list[float]] = {name: [] for name in providers}
        order, orders = list(providers), random.Random(0)
        deadline = time.perf_counter() + self._seconds(seconds)
        for num_rounds in range(MAX_ROUNDS):
            if num_rounds >= MIN_ROUNDS and time.perf_counter() > deadline:
                break
            orders.shuffle(order)
            for name in order:
                samples_us[name].append(self.sample_us(providers[name], host_us[name]))
        return {name: Timing(samples, host_us[name]) for name, samples in samples_us.items()}

    def _seconds(self, seconds: float | None) -> float:
        return self.seconds_per_case if seconds is None else min(seconds, self.seconds_per_case)

    def sample_us(self, call: Callable[[], object], host_us: float | None = None) -> float:
        """Time one call with an empty cache. host_us: the host's time for the call, on CUDA."""
        torch.sum(self._flush)
        if host_us is not None:
            return self._once_on_cuda_us(call, host_us)
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    def _once_on_cuda_us(self, call: Callable[[], object], host_us: float) -> float:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        head_start_us = min(1.5 * host_us + 50, MAX_HEAD_START_US)
        torch.cuda._sleep(int(head_start_us * SLEEP_CYCLES_PER_US))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) * 1e3

    def _host_us(self, call: Callable[[], object], seconds: float) -> float:
        """Measure the median time for which a call keeps the host. The device is idle at its start."""
        samples: list[float] = []
        deadline = time.perf_counter() + seconds
        for num_calls in range(MAX_HOST_CALLS):
            if num_calls >= MIN_HOST_CALLS and time.perf_counter() > deadline:
                break
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            call()
            samples.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize(self.device)
        return statistics.median(samples)

    @cached_property
    def copy_gb_per_s(self) -> float:
        """The bandwidth of copying a large buffer within the device, bytes read plus bytes written."""
        timing = self.time({"copy": self.copy(2 * self._copied_bytes)})["copy"]
        return gb_per_s(2 * self._copied_bytes, timing.us.p50)

    def copy(self, num_bytes: int) -> Callable[[], object]:
        """Return a call that copies within the device, and so moves num_bytes: half read, half written."""
        source = torch.ones(num_bytes // 2, dtype=torch.uint8, device=self.device)
        return partial(torch.empty_like(source).copy_, source)


def gb_per_s(num_bytes: int, time_us: float) -> float:
    return num_bytes / time_us / 1e3


def _quantiles(samples: Sequence[float]) -> Quantiles:
    p20, _, _, p80 = statistics.quantiles(samples, n=5, method="inclusive")
    return Quantiles(p20, statistics.median(samples), p80)
