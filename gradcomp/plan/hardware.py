"""Links and devices: the time of a collective, and the speed at which a GPU or a CPU computes and copies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradcomp.comm.delay import MIN_DELAY_S

from .candidates import Candidate, Collective, CollectiveKind, Group, Payload

# The round trip within a node, if links between nodes have a delay.
WITHIN_ROUND_TRIP_S = 50e-6


@dataclass(frozen=True)
class Rate:
    """The bandwidth and latency of a link for one kind of collective."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Nodes:
    """Nodes of several ranks behind one network card, or behind a few.

    ranks: the number of ranks in every node. They follow one another.
    within_bytes_per_s: of a rank's links to the other ranks of its node, in one direction.
    cards: the number of network cards in every node. Ranks share them evenly.

    Raises ValueError for less than one rank, cards that ranks can't share evenly, and a bandwidth that isn't
    positive.
    """

    ranks: int
    within_bytes_per_s: float
    cards: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"a node has {self.ranks} ranks; it must have at least 1")
        if self.cards < 1 or self.ranks % self.cards:
            raise ValueError(
                f"a node has {self.cards} network cards for {self.ranks} ranks; equally many ranks must "
                "share every card"
            )
        if not self.within_bytes_per_s > 0:
            raise ValueError(
                f"the bandwidth within a node is {self.within_bytes_per_s!r} bytes/s; it must be positive"
            )


ONE_RANK_NODES = Nodes(1, math.inf)


@dataclass(frozen=True)
class Link:
    """The network between nodes: every network card has one such link, which sends and receives at once.

    bytes_per_s: of a network card, in one direction.
    latency_s: of a message from one rank to another. With gathers_by_messages: of a message and its answer, a
        round trip. The smallest exchange takes as long, as gloo's sender waits for its receiver.
    has_tree: whether the backend may all-reduce along a tree, as NCCL does with small buffers.
    measured: by a collective's kind and group, a rate that replaces the link's. Within a node it is a rank's
        rate, otherwise a network card's.
    nodes: by default every rank is a node of its own, with its own card.
    gathers_by_messages: whether ranks exchange messages with all others at once, as hooks on gloo do with CPU
        tensors. Otherwise they all-gather along a ring.

    Raises ValueError for a bandwidth that isn't positive, and for a negative or infinite latency.
    """

    bytes_per_s: float
    latency_s: float
    has_tree: bool = False
    measured: Mapping[tuple[CollectiveKind, Group], Rate] = field(default_factory=dict)
    nodes: Nodes = ONE_RANK_NODES
    gathers_by_messages: bool = False

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"a link's bandwidth is {self.bytes_per_s!r} bytes/s; it must be positive")
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise ValueError(f"a link's latency is {self.latency_s!r} s; it must not be negative")

    @property
    def has_delay(self) -> bool:
        """Whether hooks find that a round trip takes long; see comm/delay.py."""
        return self.gathers_by_messages and self.latency_s >= MIN_DELAY_S

    def rate(self, collective: Collective) -> Rate:
        """Return a network card's rate; for a collective within a node, a rank's."""
        usual = Rate(self.bytes_per_s, self.latency_s)
        if collective.group == "within":
            latency_s = WITHIN_ROUND_TRIP_S if self.has_delay else self.latency_s
            usual = Rate(self.nodes.within_bytes_per_s, latency_s)
        return self.measured.get((collective.kind, collective.group), usual)

    def num_nodes(self, world_size: int) -> int:
        """Return the number of nodes. Raises ValueError if world_size isn't a multiple of a node's ranks."""
        if world_size % self.nodes.ranks:
            raise ValueError(
                f"{world_size} ranks are not whole nodes of {self.nodes.ranks} ranks; give a multiple"
            )
        return world_size // self.nodes.ranks

    def seconds(self, collective: Collective, world_size: int) -> float:
        """Return the time of one collective between world_size ranks."""
        return sum(self.parts_s(collective, world_size))

    def parts_s(self, collective: Collective, world_size: int) -> tuple[float, float]:
        """Return (the time that messages of no size take, the time that the bytes take) of one collective.

        The slower of the node's cards and a rank's links within the node counts.
        """
        kind, nodes, rate = collective.kind, self.nodes, self.rate(collective)
        waiting = self.num_messages(collective, world_size) * rate.latency_s
        if collective.group == "within":
            return waiting, self._within_bytes(collective, world_size) / rate.bytes_per_s
        cards_bytes_per_s = nodes.cards * rate.bytes_per_s
        transfer = max(
            self.leaving_bytes(collective, world_size) / cards_bytes_per_s,
            self._within_bytes(collective, world_size) / nodes.within_bytes_per_s,
        )
        if kind == "all-reduce" and collective.group == "all" and self.has_tree and world_size > 1:
            along_tree = 2 * math.ceil(math.log2(world_size)) * rate.latency_s
            leaving = 2 * collective.num_bytes if self.num_nodes(world_size) > 1 else 0
            within = 2 * collective.num_bytes if nodes.ranks > 1 else 0
            by_tree = along_tree, max(leaving / cards_bytes_per_s, within / nodes.within_bytes_per_s)
            return min((waiting, transfer), by_tree, key=sum)
        return waiting, transfer

    def num_messages(self, collective: Collective, world_size: int) -> float:
        """Return the number of messages, or round trips, that follow one another.

        An exchange takes one round trip, or half if its receives have been posted before.
        """
        size = _group_size(collective.group, world_size, self.nodes.ranks)
        if not self.gathers_by_messages or collective.kind == "all-reduce" or size == 1:
            return ring_steps(collective.kind, size)
        return 0.5 if collective.is_posted else 1

    def rated_bytes(self, collective: Collective, world_size: int) -> float:
        """Return the bytes that take the time of rate(collective), besides messages."""
        if collective.group == "within":
            return self._within_bytes(collective, world_size)
        return self.leaving_bytes(collective, world_size)

    def leaving_bytes(self, collective: Collective, world_size: int) -> float:
        """Return the bytes that leave a node in a ring, or in messages to every other rank.

        A ring leaves each node once. Messages leave it from every rank to every rank of other nodes.
        """
        num_nodes, per_node = self.num_nodes(world_size), self.nodes.ranks
        if collective.group == "within" or num_nodes == 1:
            return 0.0
        if collective.group == "between":
            return per_node * sent_bytes(collective, world_size, per_node)
        if self._is_by_messages(collective):
            return per_node * (world_size - per_node) / world_size * collective.num_bytes
        return sent_bytes(collective, world_size)

    def _within_bytes(self, collective: Collective, world_size: int) -> float:
        """Return the most bytes that a rank sends to ranks of its node."""
        per_node = self.nodes.ranks
        if collective.group == "between" or per_node == 1:
            return 0.0
        if collective.group == "all" and self._is_by_messages(collective):
            return (per_node - 1) / world_size * collective.num_bytes
        return sent_bytes(collective, world_size, per_node)

    def _is_by_messages(self, collective: Collective) -> bool:
        by_messages = ("all-to-all", "all-gather") if self.gathers_by_messages else ("all-to-all",)
        return collective.kind in by_messages


def ring_steps(kind: str, world_size: int) -> int:
    """Return the number of messages that follow one another: around a ring, or to each of the other ranks."""
    return (2 if kind == "all-reduce" else 1) * (world_size - 1)


def sent_bytes(collective: Collective, world_size: int, ranks_per_node: int = 1) -> float:
    """Return the bytes that a rank sends in a ring, or to every other rank of the collective's group."""
    size = _group_size(collective.group, world_size, ranks_per_node)
    sent = ring_steps(collective.kind, size) / size * collective.num_bytes
    return sent / ranks_per_node if collective.group == "between" else sent


def _group_size(group: Group, world_size: int, ranks_per_node: int) -> int:
    return {"all": world_size, "within": ranks_per_node, "between": world_size // ranks_per_node}[group]


def fitted_rate(samples: Sequence[tuple[Collective, float]], link: Link, world_size: int) -> Rate:
    """Fit a rate to measured times, with the least relative errors.

    samples: (collective, seconds), of one kind and group.
    link: the measured link. Its nodes count, not its own rates.

    Within a node the rate is a rank's, otherwise that of all cards of a node together.

    A negative latency becomes zero. A negative transfer time becomes zero too: the bandwidth is infinite.
    Raises ValueError for fewer than two sizes, or fewer than two ranks.
    """
    rows = [
        (link.num_messages(each, world_size) / seconds, link.rated_bytes(each, world_size) / seconds)
        for each, seconds in samples
    ]
    if len({sent / messages for messages, sent in rows if messages}) < 2:
        names = {each.kind for each, _ in samples}
        raise ValueError(
            f"{', '.join(sorted(names)) or 'a collective'} must be measured with at least two sizes, on at "
            f"least 2 ranks, to tell latency from bandwidth; there are {len(rows)} measurements on "
            f"{world_size} ranks"
        )
    # Least squares of latency · a + seconds per byte · b = 1.
    aa = sum(a * a for a, _ in rows)
    ab = sum(a * b for a, b in rows)
    bb = sum(b * b for _, b in rows)
    sum_a, sum_b = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    latency = (sum_a * bb - sum_b * ab) / determinant
    per_byte = (sum_b * aa - sum_a * ab) / determinant
    if latency < 0:
        latency, per_byte = 0.0, sum_b / bb
    elif per_byte < 0:
        latency, per_byte = sum_a / aa, 0.0
    return Rate(1 / per_byte if per_byte else math.inf, latency)


# Assumptions, not measurements. Kernels and links within a node reach this part of a data sheet's bandwidth.
BANDWIDTH_UTILIZATION = 0.8
LAUNCH_S = 2e-6  # from the end of one launch on a stream to the work of the next
ADAM_BYTES = 28  # per parameter: read weight, gradient, two moments; write weight and moments


@dataclass(frozen=True)
class Gpu:
    """A GPU, from its data sheet.

    memory_bytes_per_s: the bandwidth of its memory.
    peak_flops: the dense bf16 rate of its tensor cores.
    within_bytes_per_s: the bandwidth to other GPUs of the node, in one direction; None if unknown.
    """

    name: str
    memory_bytes_per_s: float
    peak_flops: float
    is_inline: bool = False
    within_bytes_per_s: float | None = None

    def has_time_of(self, hook: Candidate) -> bool:
        return True

    def local_s(self, hook: Candidate, payload: Payload, numel: int) -> float:
        """Return the time of the hook's own kernels on one bucket, from bytes moved and launches."""
        moved_s = payload.moved_bytes / (BANDWIDTH_UTILIZATION * self.memory_bytes_per_s)
        return moved_s + payload.num_launches * LAUNCH_S

    def compute_s(self, flops: float, utilization: float) -> float:
        """Return the time of this number of operations, at a part of the peak rate."""
        return flops / (utilization * self.peak_flops)

    def optimizer_s(self, numel: int) -> float:
        return ADAM_BYTES * numel / (BANDWIDTH_UTILIZATION * self.memory_bytes_per_s)


@dataclass(frozen=True)
class MeasuredDevice:
    """A device with measured times of hooks.

    local_ns: by hook, nanoseconds of the hook's own work per gradient element.
    is_inline: whether hooks compress on backward's thread, as on a CPU. Then only collectives run beside it.
    flops: operations per second in training.
    optimizer_ns: nanoseconds of the optimizer per parameter.
    """

    name: str
    local_ns: Mapping[str, float]
    is_inline: bool = True
    flops: float = 0.0
    optimizer_ns: float = 0.0

    def has_time_of(self, hook: Candidate) -> bool:
        return hook.flat_name in self.local_ns

    def local_s(self, hook: Candidate, payload: Payload, numel: int) -> float:
        """Return the time of the hook's own work on one bucket.

        Raises ValueError for a hook without a measured time.
        """
        if not self.has_time_of(hook):
            known = ", ".join(self.local_ns)
            raise ValueError(f"hook {hook.flat_name} has not been timed on {self.name}; there are {known}")
        return self.local_ns[hook.flat_name] * payload.relative_work * numel / 1e9

    def compute_s(self, flops: float, utilization: float) -> float:
        """Return the time of this number of operations. The measured rate includes the utilization."""
        return flops / self.flops

    def optimizer_s(self, numel: int) -> float:
        return self.optimizer_ns * numel / 1e9


Device = Gpu | MeasuredDevice

# Half of what data sheets add up over both directions: NVLink 4 and 3, and 16 lanes of PCIe 4.
NVLINK_4, NVLINK_3, PCIE_4 = 450e9, 300e9, 32e9

GPUS = (
    Gpu("H200", 4.8e12, 989e12, within_bytes_per_s=NVLINK_4),
    Gpu("H100", 3.35e12, 989e12, within_bytes_per_s=NVLINK_4),
    Gpu("A100", 2.039e12, 312e12, within_bytes_per_s=NVLINK_3),
    Gpu("L40S", 0.864e12, 362e12, within_bytes_per_s=PCIE_4),
    Gpu("RTX4090", 1.008e12, 165e12, within_bytes_per_s=PCIE_4),
)

# Measured with `python -m gradcomp.bench.local_work` on a quiet x86-64 core with AVX-512: torch 2.13, one
# thread, two transformer blocks of width 512, 4 ranks. optimizer_ns is an assumption.
CPU = MeasuredDevice(
    "cpu",
    {
        "none": 0.0,
        "bf16": 0.7,
        "fp16": 0.7,
        "int8": 2.4,
        "int4": 2.5,
        "powersgd:16": 3.1,
        "powersgd:16:bf16": 3.2,
        "powersgd:16:int8": 3.6,
        "powersgd:8": 2.6,
        "powersgd:8:bf16": 2.7,
        "powersgd:8:int8": 2.9,
        "powersgd:4": 2.1,
        "powersgd:4:bf16": 2.2,
        "powersgd:4:int8": 2.5,
        "powersgd:1": 1.4,
        "powersgd:1:bf16": 1.4,
        "powersgd:1:int8": 1.6,
    },
    flops=95e9,
    optimizer_ns=2.0,
)
