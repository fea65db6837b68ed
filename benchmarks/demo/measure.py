"""Measure a hook while it trains: bytes on the wire, time per step, losses."""

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WARMUP_STEPS = 5  # not timed: DDP rebuilds its buckets, and allocators and caches fill
SHOW_EVERY_S = 2.0
LAST_STEPS = 10  # the steps over which the reported training loss is averaged


class WireMeter(TorchDispatchMode):
    """A counter of the bytes that this rank hands to collectives inside a ``with`` block.

    They are those of all-reduces over all ranks that send as much. Every collective is an operator of torch's
    dispatcher, whether DDP's C++ reducer or a hook issues it; so are messages from one rank to another.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_bytes = Fraction(0)

    @property
    def num_bytes(self) -> int:
        return round(self._num_bytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
            num_bytes = sum(tensor.nbytes for tensor in tensors)
            self._num_bytes += num_bytes * share_of_all_reduce(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def share_of_all_reduce(operator: str) -> Fraction:
    """Return the bytes that a rank sends per byte of a collective's tensors, divided by an all-reduce's."""
    if operator in ("alltoall_base_", "_allgather_base_"):
        return Fraction(1, 2)
    if operator == "_reduce_scatter_base_":
        return Fraction(dist.get_world_size(), 2)  # of its output
    if operator == "send":
        return Fraction(dist.get_world_size(), 2 * (dist.get_world_size() - 1))
    return Fraction(operator != "recv_")


class Recorder:
    """The history of one run. Most steps are timed; in the others bytes are counted instead.

    A step between two counted ones is assumed to send as many bytes as the last counted one. is_alone: the
    ranks don't communicate.
    """

    def __init__(self, steps: int, device: torch.device, *, is_alone: bool = False) -> None:
        self.steps, self.device, self.is_alone = steps, device, is_alone
        self.every = max(2, steps // 10)
        self.losses: list[Tensor] = []
        self.step_bytes: list[int] = []
        self.timed_ms: list[float] = []
        self.validation_losses: list[tuple[int, float]] = []
        self._shown_at = -math.inf

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count the bytes of the step that runs inside, or time it."""
        step = len(self.step_bytes)
        if step < WARMUP_STEPS or step % self.every == 0:
            with WireMeter() as meter:
                yield
            self.step_bytes.append(meter.num_bytes)
        else:
            started = time.perf_counter()
            yield
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.timed_ms.append((time.perf_counter() - started) * 1e3)
            self.step_bytes.append(self.step_bytes[-1])

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
            "ms_per_step": statistics.median(self.timed_ms),
            "loss": statistics.mean(losses[-LAST_STEPS:]),
            "validation_loss": self.validation_losses[-1][1],
            "losses": losses,
            "validation_losses": self.validation_losses,
            "step_bytes": self.step_bytes,
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
