"""The interface of a compressor, which averages one bucket step after step."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ..comm.exchange import Works

# A compressor's state by name. There are three kinds of values:
#   "error", a 1-D tensor with one element per element of the bucket: each rank has its own, in the unit of
#       gradients; moves with its parameters to other buckets
#   a list with a tensor or None per tensor of the bucket: the same on all ranks; moves with its parameters
#   any other tensor: the same on all ranks; kept for a bucket of the same parameters
State = dict[str, Any]


@dataclass(frozen=True)
class BucketSpec:
    """The bucket that a compressor is made for: tensors stored one after another in a flat buffer.

    shapes: the tensors' shapes in hooks: a complex gradient is a real one with a last dimension of 2.
    dtype, device: the buffer's dtype and device.
    world_size: the number of ranks that average the bucket.
    seed: the seed for random choices, the same on all ranks.
    ranks_per_node: the number of ranks on each node, for compressors that average by nodes; 1 if the group is
        averaged without nodes. comm.nodes.nodes_of returns the groups.
    has_delay: whether a round trip between ranks (nodes) takes long; see comm/delay.py.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    world_size: int
    seed: int
    ranks_per_node: int = 1
    has_delay: bool = False

    @property
    def numels(self) -> list[int]:
        """The number of elements of each tensor."""
        return list(map(math.prod, self.shapes))


class Compressor(ABC):
    """Averages one bucket, and keeps the bucket's error from step to step.

    A subclass is constructed as subclass(bucket: BucketSpec, options), with its own frozen dataclass of
    options.

    sent_numel: the number of elements that a rank sends per step, for statistics; by nodes, that a node sends
        to other nodes.
    is_same_on_all_processors: True if ranks on different processors get bit-identical averages. Then no sum
        or product after the last collective depends on the processor's rounding.
    of_shards: the class that reduce-scatters with the same options and the same state; None without one.
    """

    sent_numel: int = 0
    is_same_on_all_processors: bool = False
    of_shards: ClassVar["type[ShardCompressor] | None"] = None

    def __init__(self, bucket: BucketSpec, options: Any):  # noqa: B027 a subclass has its own
        pass

    @property
    def is_plain(self) -> bool:
        """True if the next average is a plain all-reduce of the gradients. The state then does it itself.

        Ranks may disagree, so `stages` must issue the same all-reduce, and no other collective.
        """
        return False

    @classmethod  # noqa: B027 may stay empty
    def warm_up(cls, bucket: BucketSpec, options: Any) -> None:
        """Prepare a bucket's first compressed step, for example by compiling kernels.

        It is called once per bucket, in one of the steps before compression starts. It must not start a
        collective.
        """

    @classmethod
    def claims(cls, options: Any) -> dict[str, Any]:
        """Return promises that gradcomp.testing checks, as fields of its Claims by name.

        Optional. The kit infers the fields that are missing.
        """
        return {}

    @abstractmethod
    def average(self, flat: torch.Tensor, group: dist.ProcessGroup, seed: int) -> None:
        """Replace the gradients by their (approximate) mean over the ranks, in place. A collective.

        flat: [numel], the bucket's buffer, undivided.
        seed: the seed for this step's random choices, the same on all ranks.

        On CUDA it runs on a side stream and must not synchronize with the host. On a CPU it runs to its end
        before the hook returns, unless the compressor implements `stages`.
        """

    def stages(self, flat: torch.Tensor, group: dist.ProcessGroup, seed: int) -> Works:
        """Average in stages: yield every collective issued with async_op instead of waiting for it.

        Optional. On a CPU the hook returns while the collective is in progress, and a later bucket's hook
        resumes the generator. Yield None for a collective that needs no waiting. Arguments as in `average`.
        """
        self.average(flat, group, seed)
        yield from ()

    @abstractmethod
    def state(self) -> State:
        """Return the tensors to keep across a restart or a change of buckets, as copies."""

    @abstractmethod
    def load(self, state: State) -> None:
        """Continue from another compressor's state(). After a change of buckets, entries may be missing."""

    @classmethod  # noqa: B027 may stay empty
    def check_entry(cls, entry: dict[str, torch.Tensor], *, of_bucket: bool) -> None:
        """Raise ValueError for a checkpoint's entry that `load` can't load.

        of_bucket: whether it belongs to all parameters of a bucket together, not to one parameter.

        The caller has checked that tensors are dense, and that floating-point values are finite.
        """

    def leave_out(self, unused: Sequence[int]) -> None:  # noqa: B027 may stay empty
        """Set the positions of the tensors that this rank's backward has not used. Called before `average`.

        The list may be incomplete, because a hook can't always tell; see Bucket.unused.
        """

    def current_error(self) -> torch.Tensor | None:
        """Return this rank's error, [numel], for reading only; None without one. Recorders call this."""
        error: torch.Tensor | None = self.state().get("error")
        return error

    def add_to_error(self, offset: int, values: torch.Tensor) -> None:
        """Add unused averages to this rank's error.

        offset: the position in the bucket of the first value.
        """
        state = self.state()
        if "error" in state:
            state["error"][offset : offset + len(values)] += values
            self.load(state)

    def scale_errors(self, factor: float) -> None:
        """Multiply this rank's errors by factor, because the next steps' gradients are scaled by it, too."""
        self.load(with_scaled_errors(self.state(), factor))


class ShardCompressor(Compressor):
    """Sums this rank's shard of one bucket. The bucket's shapes are those of whole tensors.

    Elements in its state are in the order of whole tensors, without padding, so that they fit any number of
    ranks.
    """

    @abstractmethod
    def reduce_scatter(self, flat: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Works:
        """Write the (approximate) sum over the ranks of this rank's row to shard. A collective, in stages.

        flat: [world size · n], a ShardBucket's buffer. It may be changed.
        shard: [n], in flat's dtype.
        """

    def average(self, flat: torch.Tensor, group: dist.ProcessGroup, seed: int) -> None:
        """Raise TypeError: no rank gets the averages of other shards."""
        raise TypeError(
            f"{type(self).__name__} sums a shard, and averages nothing. Likely cause: it was made for "
            "compress_reduce_scatter, but called by a hook that averages"
        )


def errors_in(state: State) -> State:
    """Return the entries of a state that are errors."""
    return {name: value for name, value in state.items() if name == "error"}


def with_scaled_errors(state: State, factor: float) -> State:
    """Return a state with its errors multiplied by factor."""
    return {name: value * factor if name == "error" else value for name, value in state.items()}
