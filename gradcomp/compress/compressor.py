"""The interface of a compressor, which averages one bucket step after step."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.exchange import Works, takes_one_exchange

# A compressor's state by name. There are three kinds of values:
#   "error", a 1-D tensor with one element per element of the bucket: each rank has its own, in the unit of
#       gradients; moves with its parameters to other buckets
#   a list with a tensor or None per tensor of the bucket: the same on all ranks; moves with its parameters
#   any other tensor: the same on all ranks; kept for a bucket of the same parameters
State = dict[str, Any]
Group = Literal["all", "within", "between"]


@dataclass(frozen=True)
class Collective:
    """One collective of a hook.

    num_bytes: the size of the whole buffer, all ranks' parts together. If group is "between": the sum over a
        node's ranks.
    group: the ranks that take part: "all"; "within", the ranks of a node; "between", one rank of every node.
        Every rank of a node is in a "between" of its own.
    """

    kind: Literal["all-reduce", "reduce-scatter", "all-to-all", "all-gather"]
    num_bytes: int
    group: Group = "all"


@dataclass(frozen=True)
class BucketSpec:
    """The bucket that a compressor is made for: tensors stored one after another in a flat buffer.

    shapes: the tensors' shapes in hooks: a complex gradient is a real one with a last dimension of 2.
    dtype, device: the buffer's dtype and device.
    world_size: the number of ranks that average the bucket.
    seed: the seed for random choices, the same on all ranks.
    draws: for each tensor, a number: seed + draw is the tensor's own seed in any bucket; None without one.
    ranks_per_node: the number of ranks on each node, for hierarchical compressors; 1 if the group is
        averaged without nodes. comm.nodes.nodes_of returns the groups.
    place: this rank's number in its node.
    has_delay: whether a round trip between ranks (nodes) takes long; see comm/exchange.py.
    is_shard: whether a rank gets the sum of its own shard only, not the average of all: the flat buffer then
        has a row of padded gradients for each rank. Shapes and errors are of whole tensors.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    world_size: int
    seed: int
    ranks_per_node: int = 1
    has_delay: bool = False
    is_shard: bool = False
    draws: tuple[int, ...] | None = None
    place: int = 0

    @property
    def numels(self) -> list[int]:
        """The number of elements of each tensor."""
        return list(map(math.prod, self.shapes))

    def exchanges(self, num_bytes: int, num_senders: int | None) -> list[Collective]:
        """Return a payload's exchanges between ranks (nodes): one of num_senders payloads; two if None."""
        group: Group = "all" if self.ranks_per_node == 1 else "between"
        if num_senders is not None:
            return [Collective("all-gather", num_senders * num_bytes, group)]
        return [Collective("all-to-all", num_bytes, group), Collective("all-gather", num_bytes, group)]

    def summing(self, num_bytes: int, within_bytes: int) -> list[Collective]:
        """Return the collectives of exchange.all_reduce; with nodes, of exchange.reduce_hierarchically.

        num_bytes, within_bytes: the size of the whole buffer, and of the buffer that is summed within nodes.
        """
        per_node, num_nodes = self.ranks_per_node, self.world_size // self.ranks_per_node
        if self.has_delay and num_nodes > 1 and self.device.type == "cpu":
            is_one = takes_one_exchange(-(-num_bytes // per_node), num_nodes, has_delay=True)
            summed = self.exchanges(num_bytes, num_nodes if is_one else None)
        else:
            summed = [Collective("all-reduce", num_bytes, "all" if per_node == 1 else "between")]
        if per_node == 1:
            return summed
        first, last = (Collective(kind, within_bytes, "within") for kind in ("reduce-scatter", "all-gather"))
        return [first, *summed, last]


class Compressor(ABC):
    """Averages one bucket, and keeps the bucket's error from step to step.

    A subclass is constructed as subclass(bucket: BucketSpec, options), with its own frozen dataclass of
    options. It implements `average` or `reduce`.

    sent_numel: the number of elements that a rank sends per step, for statistics; with nodes, that a node
        sends to other nodes.
    sent_exactly: the positions of the tensors that it sends exactly. It keeps no errors of them.
        If another compressor has left an error of such a tensor, the state adds it to the tensor's gradient
        before the next `reduce`.
    is_plain: whether an average is a plain all-reduce of the gradients, which the state then does itself.
    is_same_on_all_processors: True if ranks on different processors get bit-identical averages. Then no sum
        or product after the last collective depends on the processor's rounding.
    sums_shards: whether the class takes a BucketSpec with is_shard.
    """

    sent_numel: int = 0
    sent_exactly: Collection[int] = ()
    is_plain: bool = False
    is_same_on_all_processors: bool = False
    sums_shards: ClassVar[bool] = False

    def __init__(self, bucket: BucketSpec, options: Any):  # noqa: B027 a subclass has its own
        pass

    @classmethod  # noqa: B027 may stay empty
    def warm_up(cls, bucket: BucketSpec, options: Any) -> None:
        """Prepare a bucket's first compressed step, for example by compiling kernels.

        It is called once per bucket, in a step before compression starts, and must start no collective.
        """

    @classmethod
    def collectives(cls, bucket: BucketSpec, options: Any) -> list[Collective]:
        """Return the collectives of a bucket's compressed step, in the order of `reduce`.

        Optional: `python -m gradcomp plan` asks the hooks that it names.
        """
        raise NotImplementedError(f"a plan needs {cls.__name__}.collectives, which is not defined")

    def average(self, flat: Tensor, group: dist.ProcessGroup, seed: int) -> None:
        """Replace the gradients by their (approximate) mean over the ranks, in place. A collective.

        flat: [numel], the bucket's buffer, undivided.
        seed: the seed for this step's random choices, the same on all ranks.

        On CUDA it runs on a side stream and must not synchronize with the host. On a CPU it runs to its end
        before the hook returns, unless the compressor implements `reduce`.
        """
        raise NotImplementedError(f"{type(self).__name__} implements neither average nor reduce")

    def reduce(
        self, flat: Tensor, out: Tensor, group: dist.ProcessGroup, seed: int, unused: Collection[int] = ()
    ) -> Works:
        """Average in stages: yield every collective issued with async_op instead of waiting for it.

        On a CPU the hook returns while the collective is in progress, and a later bucket's hook resumes the
        generator. Yield None for a collective that needs no waiting.

        flat, group, seed: as in `average`.
        out: flat itself, which gets the mean. If the bucket's is_shard is true, this rank's shard, which gets
            the (approximate) sum of this rank's row of flat; flat may be changed.
        unused: the positions of tensors that this rank's backward did not use, as far as a hook can tell.
        """
        self.average(flat, group, seed)
        yield from ()

    @abstractmethod
    def state(self) -> State:
        """Return the tensors to keep across a restart or a change of buckets, as copies."""

    @abstractmethod
    def load(self, state: State) -> None:
        """Continue from another compressor's state(). After a change of buckets, entries may be missing."""

    def snapshot(self) -> Callable[[], None]:
        """Copy what a step changes. Returns a function that takes the compressor back to now.

        CompressorState.undo_step calls it. Override it where state() takes long.
        """
        return partial(self.load, self.state())

    @classmethod  # noqa: B027 may stay empty
    def check_entry(cls, entry: dict[str, Tensor], *, of_bucket: bool) -> None:
        """Raise ValueError for a checkpoint's entry that `load` can't load.

        of_bucket: whether it belongs to all parameters of a bucket together, not to one parameter.

        The caller has checked that tensors are dense, and that floating-point values are finite.
        """

    def current_error(self) -> Tensor | None:
        """Return this rank's error, [numel], for reading only; None without one. Recorders call this."""
        error: Tensor | None = self.state().get("error")
        return error

    def add_to_error(self, offset: int, values: Tensor) -> None:
        """Add unused averages to this rank's error.

        offset: the position in the bucket of the first value.
        """
        state = self.state()
        if "error" in state:
            state["error"][offset : offset + len(values)] += values
            self.load(state)
