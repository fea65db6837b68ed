"""The interface of a compressor: the working set with which one bucket is averaged, step after step."""

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# A dict by name. A value is a 1-D tensor with one element per element of the bucket, which follows its
# parameters into other buckets; or a list with a tensor (or None) per tensor of the bucket, which follows
# them, too; or any other tensor, which is lost when buckets change. 1-D tensors of the first sort are this
# rank's own, all others are the same on all ranks. Entries named "error" or "…_error" have the scale of
# gradients.
State = dict[str, Any]

# Collectives that are under way, or None.
Works = Generator[dist.Work | None, None, None]


@dataclass(frozen=True)
class BucketSpec:
    """The bucket that a compressor is made for: tensors stored one after another in a flat buffer.

    shapes: the tensors' shapes, as hooks see them: a complex gradient as a real one with a last dimension of
    2.
    dtype, device: the buffer's dtype and device.
    world_size: the size of the group that averages it.
    seed: the seed for random choices, the same on all ranks.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    world_size: int
    seed: int

    @property
    def numels(self) -> list[int]:
        """The number of elements of each tensor."""
        return list(map(math.prod, self.shapes))


class Compressor(ABC):
    """One bucket's working set, which averages it and keeps its memory from step to step.

    A subclass is constructed as subclass(bucket: BucketSpec, options), with its own frozen dataclass of
    options.
    sent_numel: the number of elements that a rank sends per step, for statistics.
    is_same_on_all_processors: True if ranks on unlike processors get the same averages, bit for bit: nothing
        is summed or multiplied after the last collective that could be rounded in another way.
    """

    sent_numel: int = 0
    is_same_on_all_processors: bool = False

    @classmethod  # noqa: B027 may stay empty
    def warm_up(cls, bucket: BucketSpec, options: Any) -> None:
        """Do early what a bucket's first step would take long for, such as compiling kernels.

        It is called once per bucket, in one of the first steps, which average it otherwise. No collective.
        """

    @abstractmethod
    def average(self, flat: torch.Tensor, group: dist.ProcessGroup, seed: int) -> None:
        """Replace the gradients by (an approximation of) their mean over the ranks, in place.

        flat: [numel], the bucket's buffer, undivided. seed: the seed for this step's random choices, the same
        on all ranks.

        This is a collective. On CUDA it runs on a side stream and must not synchronize with the host; on a
        CPU it runs to its end before the hook returns, unless there are stages.
        """

    def stages(self, flat: torch.Tensor, group: dist.ProcessGroup, seed: int) -> Works:
        """Average in steps: yield every collective that was issued with async_op, instead of waiting for it.

        Optional. On a CPU the hook returns while the collective is under way, and a later bucket's hook goes
        on from here. It may yield None, for a collective that needs no waiting.
        """
        self.average(flat, group, seed)
        yield from ()

    @abstractmethod
    def state(self) -> State:
        """Return the tensors to keep across a restart or a change of buckets; nothing else refers to them."""

    @abstractmethod
    def load(self, state: State) -> None:
        """Continue from another compressor's state(). Entries may be missing after a change of buckets."""

    @classmethod  # noqa: B027 may stay empty
    def check_state(
        cls, state: State, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, options: Any
    ) -> None:
        """Raise ValueError for a checkpoint's state that `load` could not take.

        shapes, dtype: the tensors' shapes and the dtype of the bucket that the state was saved for.

        Entries of one element per element, and lists of one entry per tensor, have been checked to be so.
        """

    def leave_out(self, unused: Sequence[int]) -> None:  # noqa: B027 may stay empty
        """Note, before average, the positions of the tensors that this rank's backward has not used.

        A hook may not be able to know them all (see BucketPart.unused).
        """

    def current_error(self) -> torch.Tensor | None:
        """Return this rank's error, [numel], to be read only; None if none is kept. For recorders."""
        error: torch.Tensor | None = self.state().get("error")
        return error

    def add_to_error(self, offset: int, values: torch.Tensor) -> None:
        """Add averages that were not used to this rank's error, from this offset in the bucket on."""
        state = self.state()
        if "error" in state:
            state["error"][offset : offset + len(values)] += values
            self.load(state)

    def scale_errors(self, factor: float) -> None:
        """Multiply this rank's errors, for gradients that are scaled by factor from the next step on."""
        self.load(with_scaled_errors(self.state(), factor))


def errors_in(state: State) -> State:
    """Return the entries of a state that are errors."""
    return {name: value for name, value in state.items() if name.endswith("error")}


def with_scaled_errors(state: State, factor: float) -> State:
    """Return a state with its errors multiplied by factor."""
    return {name: value * factor if name.endswith("error") else value for name, value in state.items()}
