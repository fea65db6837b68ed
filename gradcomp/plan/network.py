"""A network between nodes: the bytes that a collective sends over it, and the messages that it waits for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gradcomp.comm.exchange import MIN_DELAY_S

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
