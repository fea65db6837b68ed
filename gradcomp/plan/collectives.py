"""A hook's collectives in a step, from the library's own layouts: buckets, bytes, and a network's time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from gradcomp.comm.exchange import MIN_DELAY_S, channel_for
from gradcomp.compress.compressor import BucketSpec, Collective
from gradcomp.hooks.named_hooks import NamedHook
from gradcomp.reducer.bucket import assign_buckets

Shape = tuple[int, ...]

# DDP's defaults: torch.nn.parallel.DistributedDataParallel(bucket_cap_mb=25), and 1 MiB for the first bucket.
FIRST_BUCKET_BYTES, BUCKET_CAP_BYTES = 2**20, 25 * 2**20
GLOO_THREADS = 2  # gloo's own collectives that run at the same time

Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True)
class Network:
    """Ranks on nodes, and the network between the nodes. Links within a node count as infinitely fast.

    world_size: the number of ranks.
    bytes_per_s: of a node in one direction, all its network cards together.
    round_trip_s: the time from a message to its answer between two nodes.
    ranks_per_node: the ranks of a node, which follow one another. With 1, every rank has a network card.
    backend: "nccl", or "gloo" with CPU tensors.

    Raises ValueError for ranks that aren't whole nodes, and a bandwidth that isn't positive.
    """

    world_size: int
    bytes_per_s: float = math.inf
    round_trip_s: float = 0.0
    ranks_per_node: int = 1
    backend: Backend = "nccl"

    def __post_init__(self) -> None:
        if min(self.world_size, self.ranks_per_node) < 1 or self.world_size % self.ranks_per_node:
            raise ValueError(
                f"{self.world_size} ranks are not whole nodes of {self.ranks_per_node} ranks; give a multiple"
            )
        if not self.bytes_per_s > 0:
            raise ValueError(f"the bandwidth is {self.bytes_per_s!r} bytes/s; it must be positive")

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @property
    def by_messages(self) -> bool:
        """Whether hooks send messages to all other ranks at once. NCCL gathers along a ring."""
        return self.backend == "gloo"

    @property
    def has_delay(self) -> bool:
        """Whether hooks find that a round trip takes long; see comm/exchange.py."""
        return self.by_messages and self.round_trip_s >= MIN_DELAY_S

    def sent_bytes(self, collective: Collective) -> float:
        """Return the bytes that leave a node.

        A ring leaves each node once. Messages leave it from each of its ranks to every rank of other nodes.
        """
        kind, others = collective.kind, 1 - 1 / self.num_nodes
        num_passes = 2 if kind == "all-reduce" else 1
        if collective.group == "within" or self.num_nodes == 1:
            return 0.0
        if collective.group == "between":
            return num_passes * others * collective.num_bytes
        if kind == "all-to-all" or (kind == "all-gather" and self.by_messages):
            return self.ranks_per_node * others * collective.num_bytes
        return num_passes * (1 - 1 / self.world_size) * collective.num_bytes

    def num_round_trips(self, collective: Collective) -> float:
        """Return the round trips that a collective of no bytes waits for.

        On gloo every step of an all-reduce's ring is one, and so is an exchange with all other ranks; half of
        one if its receives are posted ahead. On NCCL every message is half of one: an all-reduce has the
        messages of a tree between nodes, an all-gather those of a ring, and an all-to-all sends all at once.
        """
        if collective.group == "within" or self.num_nodes == 1:
            return 0.0
        size = self.num_nodes if collective.group == "between" else self.world_size
        if self.by_messages:
            row_bytes = -(-collective.num_bytes // self.world_size)
            of_exchange = 0.5 if channel_for(row_bytes, size) is not None else 1.0
            return 2 * (size - 1) if collective.kind == "all-reduce" else of_exchange
        if collective.kind == "all-reduce":
            return math.ceil(math.log2(self.num_nodes))
        return 0.5 * (size - 1) if collective.kind == "all-gather" else 0.5


@dataclass(frozen=True)
class Traffic:
    """What a hook sends in a step that compresses, and the network's time for it.

    sent_bytes: what leaves a node.
    transfer_s: sent_bytes over the node's bandwidth.
    wait_s: the round trips that follow one another.

    Backward hides a part of both times, and compressing takes time of its own.
    """

    sent_bytes: float
    transfer_s: float
    wait_s: float


def buckets_of(
    shapes: Sequence[Shape], itemsize: int = 4, cap_bytes: float = BUCKET_CAP_BYTES
) -> list[list[Shape]]:
    """Return the shapes of each bucket of a model of one dtype, as DDP has them from its second iteration on.

    DDP rebuilds its buckets in the order in which gradients become ready: the reversed order is assumed. A
    bucket closes once it reaches its cap, so one large tensor makes a large bucket.
    """
    backwards = [tuple(shape) for shape in reversed(shapes)]
    sizes = [math.prod(shape) * itemsize for shape in backwards]
    buckets = assign_buckets(sizes, [None] * len(sizes), (min(FIRST_BUCKET_BYTES, cap_bytes), cap_bytes))
    return [[backwards[index] for index in bucket] for bucket in buckets]


def traffic(
    buckets: Sequence[Sequence[Shape]],
    hook: NamedHook,
    network: Network,
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
) -> Traffic:
    """Return a hook's traffic in a step of DDP.

    buckets: the shapes of each bucket's gradients; see buckets_of.
    dtype: the gradients', or each bucket's.
    """
    dtypes = [dtype] * len(buckets) if isinstance(dtype, torch.dtype) else dtype
    given = zip(buckets, dtypes, strict=True)
    by_bucket = [collectives_of(hook, tuple(shapes), each, network) for shapes, each in given]
    collectives = [each for bucket in by_bucket for each in bucket]
    sent_bytes = sum(map(network.sent_bytes, collectives))
    transfer_s = sent_bytes / network.bytes_per_s
    trips = [sum(map(network.num_round_trips, bucket)) for bucket in by_bucket]
    num_trips = sum(trips)  # on NCCL one bucket follows another
    if network.by_messages:
        # All buckets' exchanges are under way together, but of gloo's own all-reduces only GLOO_THREADS are.
        has_all_reduces = any(each.kind == "all-reduce" for each in collectives)
        num_trips = max([num_trips / (GLOO_THREADS if has_all_reduces else len(trips)), *trips])
    wait_s = num_trips * network.round_trip_s
    return Traffic(sent_bytes, transfer_s, wait_s)


@cache
def collectives_of(
    hook: NamedHook, shapes: tuple[Shape, ...], dtype: torch.dtype, network: Network
) -> tuple[Collective, ...]:
    """Return a hook's collectives on a bucket of gradients with these shapes, in a step that compresses."""
    if hook.name == "none":  # DDP's own all-reduce, whatever the delay
        return (Collective("all-reduce", sum(map(math.prod, shapes)) * dtype.itemsize),)
    per_node = network.ranks_per_node if hook.is_hierarchical else 1
    device = torch.device("cpu" if network.by_messages else "cuda")
    bucket = BucketSpec(shapes, dtype, device, network.world_size, 0, per_node, network.has_delay)
    return tuple(hook.compressor.collectives(bucket, hook.options))
