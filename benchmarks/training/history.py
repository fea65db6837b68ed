"""The history of a run: each step's bytes and time, and losses."""

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.training.wire import Wire

SHOW_EVERY_S = 2.0


class Recorder:
    """The history of one run.

    wire: counts each step's bytes.
    num_validations: after as many parts of the steps, about.
    is_alone: the ranks don't communicate.
    """

    def __init__(self, steps: int, wire: Wire, num_validations: int, is_alone: bool) -> None:
        self.steps, self.is_alone = steps, is_alone
        self.every = max(2, steps // num_validations)
        self.losses: list[Tensor] = []
        self.step_bytes: list[int] = []
        self.step_s: list[float] = []
        self.validation_losses: list[tuple[int, float]] = []
        self._wire, self._shown_at = wire, -math.inf

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the step that runs inside, and count its bytes."""
        before, started = self._wire.num_bytes, time.perf_counter()
        yield
        self.step_s.append(time.perf_counter() - started)
        self.step_bytes.append(self._wire.num_bytes - before)

    def show(self, label: str) -> None:
        """Print rank 0's progress: after the last step, and at most every two seconds before."""
        step, now = len(self.step_bytes), time.monotonic()
        if dist.get_rank() != 0 or (now < self._shown_at + SHOW_EVERY_S and step < self.steps):
            return
        self._shown_at = now
        print(
            f"{label:12} step {step:>{len(str(self.steps))}}/{self.steps}   loss {self.losses[-1].item():.3f}"
            f"   validation {self.validation_losses[-1][1]:.3f}   {self.step_bytes[-1]:,} B/step",
            flush=True,
        )

    def is_time_to_validate(self) -> bool:
        step = len(self.step_bytes)
        return step % self.every == 0 or step == self.steps

    def add_validation(self, loss: Tensor) -> None:
        """Record this rank's validation loss after the steps so far."""
        self.validation_losses.append((len(self.step_bytes), mean_over_ranks(loss).item()))

    def result(self) -> dict:
        """Return summary and history, with losses averaged over the ranks. Every rank must call it."""
        if not (self.step_bytes[-1] or self.is_alone):
            raise RuntimeError(
                "a step handed 0 bytes to collectives: the hook does not communicate, or bypasses torch's "
                "dispatcher"
            )
        losses = mean_over_ranks(torch.stack(self.losses)).tolist()
        return {
            "bytes_per_step": self.step_bytes[-1],
            # In the first half DDP rebuilds its buckets, caches fill, and auto_hook tries its candidates.
            "ms_per_step": statistics.mean(self.step_s[self.steps // 2 :]) * 1e3,
            "validation_loss": self.validation_losses[-1][1],
            "losses": losses,
            "validation_losses": self.validation_losses,
            "step_bytes": self.step_bytes,
            "step_s": self.step_s,
        }


def mean_over_ranks(values: Tensor) -> Tensor:
    """Average ``values`` over the ranks; a collective."""
    values = values.clone()
    dist.all_reduce(values)
    return values / dist.get_world_size()


def check_replicas(parameters: list[Tensor]) -> None:
    """Raise RuntimeError unless every rank holds the same fp32 parameters, bit for bit."""
    bits = torch.cat([parameter.detach().flatten() for parameter in parameters]).view(torch.int32)
    lowest, highest = bits.clone(), bits.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    if differing := int((lowest != highest).sum()):
        raise RuntimeError(
            f"{differing} of {bits.numel()} parameters differ between the ranks after training: the hook has "
            "given the ranks different gradients, or they run on unlike CPUs (docs/powersgd.md)"
        )
