"""What a compressor is: the working set with which one bucket is averaged, step after step."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.

# By name: a 1-D tensor with an element for each of the bucket's, which follows its parameters into other buckets; a list with
# a tensor (or None) for each of the bucket's tensors, which does, too; any other tensor, which is lost when buckets change.
# Elements are this rank's own, everything else is the same on all ranks.
State = dict[str, Any]


@dataclass(frozen=True)
class BucketSpec:
    """What a compressor is made for: tensors that lie one after another in a flat buffer.

    shapes: of the tensors, as hooks see them: a complex gradient as a real one with a last dimension of 2. dtype, device: of
    the buffer. world_size: of the group that averages it. seed: for random choices, the same on all ranks.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    world_size: int
    seed: int

    @property
    def numels(self) -> list[int]:
        """Elements of each tensor."""
        return list(map(math.prod, self.shapes))


class Compressor(ABC):
    """One bucket's working set: averages it, and remembers from step to step.

    A subclass is constructed as subclass(bucket: BucketSpec, options), with its own frozen dataclass of options.
    sent_numel: elements that a rank sends per step, for statistics.
    """

    sent_numel: int = 0

    @abstractmethod
    def average(self, flat: torch.Tensor, group: dist.ProcessGroup, seed: int) -> None:
        """Replace the gradients by (an approximation of) their mean over the ranks, in place.

        flat: [numel], the bucket's buffer, undivided. seed: of this step's random choices, the same on all ranks.

        Collective. On CUDA it runs on a side stream, and must not wait for the host. On a CPU it runs straight through.
        """

    @abstractmethod
    def state(self) -> State:
        """What has to be kept across a restart or a change of buckets, as tensors of its own."""

    @abstractmethod
    def load(self, state: State) -> None:
        """Continue from what another compressor's state() gave. Entries may lack after a change of buckets."""

    def leave_out(self, unused: Sequence[int]) -> None:  # noqa: B027 may stay empty
        """Before average: the tensors, by index, that this rank's backward has not used, so far as a hook can know."""

    def add_to_error(self, offset: int, values: torch.Tensor) -> None:
        """Add to this rank's error, from this element of the bucket on, what was averaged but has not been used."""
        state = self.state()
        if "error" in state:
            state["error"][offset : offset + len(values)] += values
            self.load(state)
