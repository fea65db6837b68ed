"""Check an operation, then time it beside the alternatives, on any device.

Each Case is checked first: every provider's result against a float64 reference, after the outputs
were filled with NaN. Only then is it timed, the providers taking turns within one run.

Before each call the cache is emptied by reading a buffer four times its size: reading leaves no dirty
lines behind for the timed call to write back.

On CUDA the device time is taken with events, and the stream is held by a sleeping kernel long enough
for the host to enqueue the whole call, so that launch costs don't show in the device time; they are
measured separately, as host time. On CPU the time is the wall clock's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

Provider = Callable[[], Sequence[torch.Tensor]]

WARM_UP_CALLS = 3
MIN_ROUNDS, MAX_ROUNDS = 5, 500
MIN_HOST_CALLS, MAX_HOST_CALLS = 3, 30
# Only a lead: a slower clock makes the sleeping kernel last longer, which does no harm.
SLEEP_CYCLES_PER_US = 2000
MAX_HEAD_START_US = 50_000
CPU_CACHE_BYTES = 2**25  # of the last level, roughly; torch doesn't tell


@dataclass
class Setup:
    """A case's tensors and callables, alive while it runs.

    providers: name -> the call to time; it returns the tensors that hold its results.
    reference: yields the right results in float64, one per result tensor.
    outputs: tensors to be filled with NaN before each provider is checked.
    restore: puts the inputs back before each provider is checked, for providers that work in place.
    num_launches: counts what a provider launches in a call; None where that isn't asked.
    """

    providers: dict[str, Provider]
    reference: Callable[[], Iterable[torch.Tensor]]
    outputs: Sequence[torch.Tensor] = ()
    restore: Callable[[], object] = lambda: None
    num_launches: Callable[[Provider], int] | None = None


@dataclass(frozen=True)
class Case:
    """One operation on one problem.

    num_bytes: the least it can move, each input read once and each output written once; every
    provider's rate is reckoned with it. max_error: the bound for error_of(result, reference).
    baseline: the provider that the others' ratios refer to. seconds: for its rounds, where the clock's
    own are too many. num_buckets: what a call handles, for the host's time per bucket. num_elements: of the
    gradients, for the bytes per element; None where that says nothing.
    """

    name: str
    label: str
    dtype: str
    num_bytes: int
    max_error: float
    build: Callable[[], Setup]
    baseline: str
    error_of: Callable[[torch.Tensor, torch.Tensor], float] = field(default_factory=lambda: elementwise_error)
    seconds: float | None = None
    num_buckets: int = 1
    num_elements: int | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.label} {self.dtype}"


@dataclass(frozen=True)
class Timing:
    """Quantiles over the rounds, in microseconds; host_us only where the host doesn't compute."""

    p20_us: float
    p50_us: float
    p80_us: float
    num_rounds: int
    host_us: float | None


class WrongResultError(Exception):
    """A provider's result is further from the reference than the case allows."""


def elementwise_error(
    result: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype | None = None
) -> float:
    """max |result − reference| / max(|reference|, the smallest normal number of dtype).

    Below that number a floating-point format has an absolute precision, not a relative one.
    dtype: the narrowest on the way to the result; result's own when not given.
    """
    if result.shape != reference.shape:
        raise WrongResultError(f"shape {tuple(result.shape)}, expected {tuple(reference.shape)}")
    if result.numel() == 0:
        return 0.0
    floor = torch.finfo(dtype or result.dtype).smallest_normal
    error = (result.double() - reference).abs_() / reference.abs().clamp_(min=floor)
    return error.max().item()  # NaN if there is one


def rounding_error(dtype: torch.dtype) -> float:
    """The error allowed to scaling and casting: one unit in the last place and a half.

    Half of one for rounding the result; another half because the scale is rounded too, or because
    torch's way rounds twice; the rest is slack for the products of these.
    """
    return 1.5 * torch.finfo(dtype).eps


def check(case: Case, setup: Setup) -> dict[str, float]:
    """Every provider's error. Raises WrongResultError for one beyond the bound, or not a number."""
    errors = {}
    references = list(setup.reference())
    for name, provider in setup.providers.items():
        setup.restore()
        for output in setup.outputs:
            output.fill_(float("nan"))
        results = provider()
        error = 0.0
        for result, reference in zip(results, references, strict=True):
            each = case.error_of(result, reference)
            # Written so that NaN fails.
            if not each <= case.max_error:
                raise WrongResultError(f"{case}: {name} is off by {each:.3g}, allowed {case.max_error:.3g}")
            error = max(error, each)
        errors[name] = error
    setup.restore()
    return errors


class Clock:
    """Times calls on one device, and knows the copy bandwidth it measured there."""

    def __init__(self, device: torch.device, quick: bool = False):
        self.device = device
        self.seconds_per_case = (0.2 if quick else 2.0) if self.on_cuda else (0.1 if quick else 3.0)
        cache_bytes = CPU_CACHE_BYTES
        if self.on_cuda:
            cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.zeros(cache_bytes, dtype=torch.float32, device=device)  # 4 times as many bytes
        self.copy_gb_per_s = self._copy_bandwidth(quick)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def time(
        self, providers: dict[str, Callable[[], object]], seconds: float | None = None
    ) -> dict[str, Timing]:
        """Time the providers in turn, round after round, every second round backwards."""
        seconds = self.seconds_per_case if seconds is None else min(seconds, self.seconds_per_case)
        host_us: dict[str, float | None] = {}
        for name, call in providers.items():
            for _ in range(WARM_UP_CALLS):
                call()
            host_us[name] = self._host_us(call, seconds) if self.on_cuda else None
        samples: dict[str, list[float]] = {name: [] for name in providers}
        order = list(providers)
        deadline = time.perf_counter() + seconds
        for num_rounds in range(MAX_ROUNDS):
            if num_rounds >= MIN_ROUNDS and time.perf_counter() > deadline:
                break
            for name in order:
                samples[name].append(self._once_us(providers[name], host_us[name]))
            order.reverse()
        return {name: _quantiles(samples[name], host_us[name]) for name in providers}

    def _once_us(self, call: Callable[[], object], host_us: float | None) -> float:
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
        """The median time for which a call keeps the host, the device being idle at its start."""
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

    def _copy_bandwidth(self, quick: bool) -> float:
        """GB/s of copying a large buffer within the device, bytes read plus bytes written."""
        num_bytes = (2**30 if self.on_cuda else 2**26) // (4 if quick else 1)
        source = torch.randn(num_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        timing = self.time({"copy": lambda: target.copy_(source)})["copy"]
        return gb_per_s(2 * num_bytes, timing.p50_us)


def gb_per_s(num_bytes: int, time_us: float) -> float:
    return num_bytes / time_us / 1e3


def _quantiles(samples_us: list[float], host_us: float | None) -> Timing:
    p20, _, _, p80 = statistics.quantiles(samples_us, n=5, method="inclusive")
    return Timing(p20, statistics.median(samples_us), p80, len(samples_us), host_us)


def run_case(case: Case, clock: Clock) -> list[dict[str, object]]:
    """Check the case, time it, and return one row per provider."""
    setup = case.build()
    errors = check(case, setup)
    timings = clock.time(setup.providers, case.seconds)
    # After the timing, which has warmed the providers up.
    launches = {n: setup.num_launches(p) for n, p in setup.providers.items()} if setup.num_launches else {}
    baseline_us = timings[case.baseline].p50_us
    rows = []
    for name, timing in timings.items():
        rate = gb_per_s(case.num_bytes, timing.p50_us)
        rows.append(
            {
                "case": case.name,
                "label": case.label,
                "dtype": case.dtype,
                "provider": name,
                "num_bytes": case.num_bytes,
                "p20_us": timing.p20_us,
                "p50_us": timing.p50_us,
                "p80_us": timing.p80_us,
                "host_us": timing.host_us,
                "host_us_per_bucket": None if timing.host_us is None else timing.host_us / case.num_buckets,
                "bytes_per_element": case.num_bytes / case.num_elements if case.num_elements else None,
                "num_rounds": timing.num_rounds,
                "gb_per_s": rate,
                "percent_of_copy": 100 * rate / clock.copy_gb_per_s,
                "copy_gb_per_s": clock.copy_gb_per_s,
                "baseline": case.baseline,
                "times_baseline": baseline_us / timing.p50_us,
                "error": errors[name],
                "num_launches": launches.get(name),
            }
        )
    return rows
