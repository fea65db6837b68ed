"""Time training steps with every hook, in rounds. Every hook of a round gets a new DDP model."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradcomp import ops
from gradcomp.hooks import debugging_hooks, default_hooks, powerSGD_hook, quantization_hooks
from gradcomp.plan.candidates import Candidate, form_named
from gradcomp.plan.measurements import NOOP, HookTime

from .group import Group, synchronize
from .workloads import Workload

# States compress from this step on: the earliest that PowerSGDState accepts.
FIRST_COMPRESSED_STEP = 2


def register(model: DistributedDataParallel, name: str, ranks_per_node: int) -> None:
    """Register the hook of this name; see form_named. "none" stands for no hook.

    ranks_per_node: for a hook by nodes.
    """
    if name == NOOP:
        model.register_comm_hook(None, debugging_hooks.noop_hook)
    elif name != "none":
        model.register_comm_hook(*state_and_hook(form_named(name), ranks_per_node))


def state_and_hook(candidate: Candidate, ranks_per_node: int) -> tuple[Any, Any]:
    """Return a candidate's state and hook, for the default group. ranks_per_node: for a hook by nodes."""
    ranks_per_node = ranks_per_node if candidate.is_by_nodes else 1
    if candidate.rank is not None:
        options = candidate.powersgd_options
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=options.matrix_approximation_rank,
            start_powerSGD_iter=FIRST_COMPRESSED_STEP,
            min_compression_rate=options.min_compression_rate,
            factor_dtype=options.factor_dtype,
            uncompressed_dtype=options.uncompressed_dtype,
            ranks_per_node=ranks_per_node,
        )
        return state, powerSGD_hook.powerSGD_hook
    if candidate.bits is not None:
        quantized = quantization_hooks.QuantizationState(
            bits=candidate.bits, start_iter=FIRST_COMPRESSED_STEP, ranks_per_node=ranks_per_node
        )
        return quantized, quantization_hooks.quantization_hook
    hooks = {
        None: default_hooks.allreduce_hook,
        torch.bfloat16: default_hooks.bf16_compress_hook,
        torch.float16: default_hooks.fp16_compress_hook,
    }
    return None, hooks[candidate.wire_dtype]


class ReadyTimes:
    """The times from begin() until the last backward's buckets were ready, by the device's clock."""

    def __init__(self, device: torch.device):
        self._device = device
        self._times: list[tuple[int, float | torch.cuda.Event, float | torch.cuda.Event]] = []
        self.begin()

    def begin(self) -> None:
        """Start to count: the next buckets' times are counted from now."""
        self._start = self._now()

    def add(self, index: int) -> None:
        """Note that the bucket of this index is ready. Bucket 0 begins a new backward."""
        if index == 0:
            self._times = []
        self._times.append((index, self._start, self._now()))

    def seconds(self) -> list[float]:
        """Return the last backward's times, by bucket. Synchronize the device first."""
        ordered = sorted(self._times, key=lambda each: each[0])
        return [_between(start, end) for _, start, end in ordered]

    def _now(self) -> float | torch.cuda.Event:
        if not ops.has_streams(self._device):
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def recording_hook(state: ReadyTimes, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Note the time, and return the bucket unchanged."""
    state.add(bucket.index())
    return debugging_hooks.noop_hook(None, bucket)


def _between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return float(start.elapsed_time(end)) / 1e3


# Steps before the timed ones. DDP rebuilds its buckets after the first. States compress from the third on.
# The fourth finds everything compiled and allocated. The last one is timed, to choose the number of steps.
WARM_UP_STEPS = FIRST_COMPRESSED_STEP + 3
NUM_ROUNDS = 3
MIN_STEPS, MAX_STEPS = 3, 200


@dataclass
class Trainer:
    """Runs steps of a workload. The optimizer changes no weight, so all steps are alike."""

    workload: Workload
    group: Group
    bucket_cap_mb: float
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.workload.parameters, lr=0.0, weight_decay=0.0)

    @contextmanager
    def model(
        self, register_on: Callable[[DistributedDataParallel], None]
    ) -> Iterator[DistributedDataParallel]:
        """Yield a new DDP model with a hook, and free the model afterwards."""
        model = DistributedDataParallel(self.workload.module, bucket_cap_mb=self.bucket_cap_mb)
        register_on(model)
        try:
            yield model
        finally:
            del model
            self.optimizer.zero_grad(set_to_none=True)
            gc.collect()  # frees the DDP model, and with it the model's hooks on the parameters

    def step(self, model: DistributedDataParallel, mark: Callable[[], None] = lambda: None) -> None:
        """Run one step. mark: called before and after each part."""
        workload = self.workload
        mark()
        loss = workload.loss(model(*workload.arguments, **workload.keywords))
        mark()
        loss.backward()
        mark()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mark()

    def timed_steps(self, model: DistributedDataParallel, limit_s: float) -> list[float]:
        """Return the times of some steps, each on its slowest rank. A collective."""
        num_steps = self.warm_up(model, limit_s)
        return self.group.slowest([self._timed(model) for _ in range(num_steps)])

    def warm_up(self, model: DistributedDataParallel, limit_s: float) -> int:
        """Run WARM_UP_STEPS, and return the number of steps that fit in limit_s. A collective."""
        for _ in range(WARM_UP_STEPS - 1):
            self.step(model)
        usual_s = self._timed(model)
        return self.group.agree(min(MAX_STEPS, max(MIN_STEPS, int(limit_s / usual_s))))

    def _timed(self, model: DistributedDataParallel) -> float:
        synchronize(self.group.device)
        start = time.perf_counter()
        self.step(model)
        synchronize(self.group.device)
        return time.perf_counter() - start


def hook_times(
    trainer: Trainer, names: Sequence[str], limit_s: float, progress: Callable[[str], None]
) -> dict[str, list[float]]:
    """Return step times by hook, with the hooks interleaved in rounds. A collective.

    limit_s: the time of each hook's steps, all rounds together.
    """
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(NUM_ROUNDS):
        for name in names if index % 2 == 0 else reversed(names):
            progress(f"round {index + 1} of {NUM_ROUNDS}: steps with {name}")
            add_hook = partial(register, name=name, ranks_per_node=trainer.group.ranks_per_node)
            with trainer.model(add_hook) as model:
                samples[name] += trainer.timed_steps(model, limit_s / NUM_ROUNDS)
    return samples


def hook_time(name: str, samples_s: Sequence[float], local_s: float | None) -> HookTime:
    """Return the quantiles of a hook's step times."""
    p20, _, _, p80 = statistics.quantiles(samples_s, n=5, method="inclusive")
    return HookTime(name, p20, statistics.median(samples_s), p80, len(samples_s), local_s)


@dataclass(frozen=True)
class Parts:
    """The median times of a step's parts without communication.

    ready_at: for every bucket, the part of backward's time after which the bucket is ready.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    ready_at: list[float]


def step_parts(trainer: Trainer, limit_s: float) -> Parts:
    """Time a step's parts, without communication. A collective."""
    marks: list[float] = []
    ready = ReadyTimes(trainer.group.device)

    def mark() -> None:
        synchronize(trainer.group.device)
        marks.append(time.perf_counter())
        ready.begin()

    samples: list[list[float]] = []
    ready_s: list[list[float]] = []
    with trainer.model(lambda model: model.register_comm_hook(ready, recording_hook)) as model:
        for _ in range(trainer.warm_up(model, limit_s)):
            marks.clear()
            trainer.step(model, mark)
            samples.append([after - before for before, after in pairwise(marks)])
            ready_s.append(ready.seconds())
    slowest = [trainer.group.slowest(part) for part in zip(*samples, strict=True)]
    forward_s, backward_s, optimizer_s = map(statistics.median, slowest)
    medians = [statistics.median(times) for times in zip(*ready_s, strict=True)]
    ready_at = [min(1.0, max(medians[: index + 1]) / backward_s) for index in range(len(medians))]
    return Parts(forward_s, backward_s, optimizer_s, ready_at)
