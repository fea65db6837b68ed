"""A hook's collectives in a step, from the library's own layouts: their bytes, and a network's time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

import torch

from gradcomp.comm.exchange import MIN_DELAY_S, takes_one_exchange
from gradcomp.compress.compressor import BucketSpec
from gradcomp.compress.powersgd import LEAST_HIERARCHICAL_BYTES, PowerSGDOptions
from gradcomp.compress.quantized import QuantizedOptions
from gradcomp.compress.quantized_all_reduce import Form, LayoutFor
from gradcomp.hooks.named_hooks import NamedHook
from gradcomp.layout import BlockLayout

from .models import Shape

SUM_BYTES = 4  # an element of the exact sum within a node
GLOO_THREADS = 2  # gloo's own collectives that run at the same time

CollectiveKind = Literal["all-reduce", "reduce-scatter", "all-to-all", "all-gather"]
Group = Literal["all", "within", "between"]
Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True)
class Collective:
    """One collective of a hook.

    num_bytes: the size of the whole buffer, all ranks' parts together. If group is "between": the sum over a
        node's ranks.
    group: the ranks that take part: "all"; "within", the ranks of a node; "between", one rank of every node.
        Every rank of a node is in a "between" of its own.
    is_posted: whether ranks post its receives long before: a message needs no answer then (exchange.Gather).
    """

    kind: CollectiveKind
    num_bytes: int
    group: Group = "all"
    is_posted: bool = False


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
        one if its receives were posted before. On NCCL every message is half of one: an all-reduce has the
        messages of a tree between nodes, an all-gather those of a ring, and an all-to-all sends all at once.
        """
        if collective.group == "within" or self.num_nodes == 1:
            return 0.0
        size = self.num_nodes if collective.group == "between" else self.world_size
        if self.by_messages:
            one = 0.5 if collective.is_posted else 1.0
            return 2 * (size - 1) if collective.kind == "all-reduce" else one
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
    options = hook.options
    if not hook.is_hierarchical:
        network = replace(network, ranks_per_node=1)
    if isinstance(options, PowerSGDOptions):
        return _powersgd(options, shapes, dtype, network)
    if isinstance(options, QuantizedOptions):
        layout_for = partial(BlockLayout, shapes, options.block_size)
        return _quantized(layout_for, options.bits, dtype, None, network)
    numel = sum(map(math.prod, shapes))
    if hook.name == "none":  # DDP's own all-reduce, whatever the delay
        return (Collective("all-reduce", numel * dtype.itemsize),)
    wire_bytes = numel * (options.wire_dtype or dtype).itemsize
    return _sum(wire_bytes, numel * dtype.itemsize, network, network.has_delay)


def _quantized(
    layout_for: LayoutFor,
    bits: int,
    dtype: torch.dtype,
    uncompressed_dtype: torch.dtype | None,
    network: Network,
) -> tuple[Collective, ...]:
    """Return a quantized all-reduce's collectives: flat if ranks_per_node is 1, else hierarchical."""
    per_node = network.ranks_per_node
    exact = uncompressed_dtype or (dtype if per_node == 1 else torch.promote_types(dtype, torch.float32))
    bucket = BucketSpec((), dtype, torch.device("cpu"), network.world_size, 0, per_node, network.has_delay)
    form = Form.of(layout_for, bucket, bits, exact.itemsize)
    layout = form.layout
    _, shard_bytes = layout.sections(bits, exact.itemsize)
    num_bytes = layout.world_size * shard_bytes * (form.num_senders or 1)
    if not num_bytes:
        return ()
    group: Group = "all" if per_node == 1 else "between"
    in_one = (Collective("all-gather", num_bytes, group),)
    exchanged = in_one if form.num_senders else _two_exchanges(num_bytes, group)
    if per_node == 1:
        return exchanged
    numel = layout.world_size * (layout.shard_numel + layout.exact_numel)
    summed = Collective("reduce-scatter", numel * SUM_BYTES, "within")
    return (summed, *exchanged, Collective("all-gather", num_bytes, "within"))


def _powersgd(
    options: PowerSGDOptions, shapes: tuple[Shape, ...], dtype: torch.dtype, network: Network
) -> tuple[Collective, ...]:
    """Return PowerSGD's collectives: P with the uncompressed tensors, then Q."""
    layout = options.layout(shapes, dtype)
    if options.is_quantized:
        uncompressed = layout.numel - sum(matrix.numel for matrix in layout.matrices)
        wide, exact = torch.promote_types(dtype, torch.float32), options.uncompressed_dtype or dtype
        layouts = options.wire_layouts((layout.p_numels, uncompressed, layout.q_numels))
        wires = [_quantized(layout_for, 8, wide, exact, network) for layout_for in layouts]
    else:
        itemsize = (options.factor_dtype or dtype).itemsize
        sizes = (layout.wire_numel * itemsize, layout.q_numel * itemsize)
        wires = [_factors(size, network) for size in sizes if size]
    first, *later = wires or ((),)
    # Both wires' receives are posted with the first. Only a wire in one flat exchange begins with a gather.
    for each in later:
        is_gather = [collective.kind for collective in each] == ["all-gather"]
        first += (replace(each[0], is_posted=True),) if is_gather else each
    return first


def _factors(num_bytes: int, network: Network) -> tuple[Collective, ...]:
    """Return the collectives that sum one of PowerSGD's wires; see PowerSGDCompressor._sum."""
    is_small = num_bytes < LEAST_HIERARCHICAL_BYTES
    is_pair = network.by_messages and network.world_size == 2 and is_small
    if is_small:
        network = replace(network, ranks_per_node=1)
    return _sum(num_bytes, num_bytes, network, network.has_delay or is_pair)


def _sum(num_bytes: int, within_bytes: int, network: Network, has_delay: bool) -> tuple[Collective, ...]:
    """Return the collectives of exchange.all_reduce; with nodes, the collectives of reduce_hierarchically.

    num_bytes, within_bytes: the size of the whole buffer, and of the buffer that is summed within nodes.
    """
    per_node, size = network.ranks_per_node, network.num_nodes
    group: Group = "all" if per_node == 1 else "between"
    if not has_delay or size == 1:
        summed: tuple[Collective, ...] = (Collective("all-reduce", num_bytes, group),)
    elif takes_one_exchange(-(-num_bytes // per_node), size, has_delay=True):
        summed = (Collective("all-gather", size * num_bytes, group),)
    else:
        summed = _two_exchanges(num_bytes, group)
    if per_node == 1:
        return summed
    first = Collective("reduce-scatter", within_bytes, "within")
    return (first, *summed, replace(first, kind="all-gather"))


def _two_exchanges(num_bytes: int, group: Group) -> tuple[Collective, ...]:
    return (
        Collective("all-to-all", num_bytes, group),
        Collective("all-gather", num_bytes, group, is_posted=True),
    )
