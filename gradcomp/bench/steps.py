"""Time training steps with every hook, in rounds. Every hook of a round gets a new DDP model."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from gradcomp.hooks import debugging_hooks
from gradcomp.hooks.named_hooks import NamedHook

from .group import Group, synchronize
from .workloads import Workload

# States compress from this step on: the earliest that PowerSGDState accepts.
FIRST_COMPRESSED_STEP = 2
NOOP = "noop"  # the name of a step without any communication


def register(model: DistributedDataParallel, name: str, ranks_per_node: int) -> None:
    """Register the hook of this name; see NamedHook.form_named. "none" stands for no hook."""
    if name == NOOP:
        model.register_comm_hook(None, debugging_hooks.noop_hook)
    else:
        hook = NamedHook.form_named(name)
        hook.register(model, FIRST_COMPRESSED_STEP, ranks_per_node if hook.is_hierarchical else 1)


# Steps before the timed ones. DDP rebuilds its buckets after the first. States compress from the third on.
# The fourth finds everything compiled and allocated. The last one is timed, to choose the number of steps.
WARM_UP_STEPS = FIRST_COMPRESSED_STEP + 3
NUM_ROUNDS = 3
MIN_STEPS, MAX_STEPS = 3, 200


class Trainer:
    """Runs steps of a workload. The optimizer changes no weight, so all steps are alike."""

    def __init__(self, workload: Workload, group: Group, bucket_cap_mb: float):
        self.workload, self.group, self.bucket_cap_mb = workload, group, bucket_cap_mb
        self.optimizer = torch.optim.AdamW(workload.parameters, lr=0.0, weight_decay=0.0)

    @contextmanager
    def model(self, hook: str) -> Iterator[DistributedDataParallel]:
        """Yield a new DDP model with the hook of this name, and free the model afterwards."""
        model = DistributedDataParallel(self.workload.module, bucket_cap_mb=self.bucket_cap_mb)
        register(model, hook, self.group.ranks_per_node)
        try:
            yield model
        finally:
            del model
            self.optimizer.zero_grad(set_to_none=True)
            gc.collect()  # frees the DDP model, and with it the model's hooks on the parameters

    def step(self, model: DistributedDataParallel) -> None:
        """Run one step."""
        loss = self.workload.loss(model(*self.workload.arguments, **self.workload.keywords))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def timed_steps(self, model: DistributedDataParallel, limit_s: float) -> list[float]:
        """Run WARM_UP_STEPS, then as many steps as fit in limit_s. A collective.

        Returns each step's time on its slowest rank, without the warm-up.
        """
        for _ in range(WARM_UP_STEPS - 1):
            self.step(model)
        (usual_s,) = self.group.slowest([self._timed(model)])
        num_steps = min(MAX_STEPS, max(MIN_STEPS, int(limit_s / usual_s)))
        return self.group.slowest([self._timed(model) for _ in range(num_steps)])

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
            with trainer.model(name) as model:
                samples[name] += trainer.timed_steps(model, limit_s / NUM_ROUNDS)
    return samples


@dataclass(frozen=True)
class HookTime:
    """The times of steps with a hook, in seconds.

    name: as in docs/accuracy.md, hierarchical if it ends with HIERARCHICAL, or NOOP.
    step_p20_s, step_p50_s, step_p80_s: quantiles over num_steps steps, each on its slowest rank.
    collective_bytes: see plan.Traffic; 0 for NOOP.
    """

    name: str
    step_p20_s: float
    step_p50_s: float
    step_p80_s: float
    num_steps: int
    collective_bytes: float

    @classmethod
    def of(cls, name: str, samples_s: Sequence[float], collective_bytes: float) -> HookTime:
        """Return the quantiles of a hook's step times."""
        p20, _, _, p80 = statistics.quantiles(samples_s, n=5, method="inclusive")
        return cls(name, p20, statistics.median(samples_s), p80, len(samples_s), collective_bytes)
