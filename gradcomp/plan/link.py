"""How long a collective takes with one link per rank: messages times latency, bytes over bandwidth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .candidates import Collective, CollectiveKind


@dataclass(frozen=True)
class Rate:
    """A link as one kind of collective sees it."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Link:
    """The network between ranks: every rank has one such link, in both directions at once.

    bytes_per_s, latency_s: of a message from one rank to another. has_tree: the backend may all-reduce along
    a tree, as NCCL does with small buffers. measured: other rates for some kinds of collectives.

    Raises ValueError for a bandwidth that isn't positive and a latency that is negative.
    """

    bytes_per_s: float
    latency_s: float
    has_tree: bool = False
    measured: Mapping[CollectiveKind, Rate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"a link's bandwidth is {self.bytes_per_s!r} bytes/s; it has to be positive")
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise ValueError(f"a link's latency is {self.latency_s!r} s; it must not be negative")

    def rate(self, kind: CollectiveKind) -> Rate:
        return self.measured.get(kind) or Rate(self.bytes_per_s, self.latency_s)

    def seconds(self, collective: Collective, world_size: int) -> float:
        """Return the time of one collective between world_size ranks."""
        rate = self.rate(collective.kind)
        time = ring_steps(collective.kind, world_size) * rate.latency_s
        time += sent_bytes(collective, world_size) / rate.bytes_per_s
        if collective.kind == "all-reduce" and self.has_tree and world_size > 1:
            along_tree = 2 * math.ceil(math.log2(world_size)) * rate.latency_s
            return min(time, along_tree + 2 * collective.num_bytes / rate.bytes_per_s)
        return time


def ring_steps(kind: CollectiveKind, world_size: int) -> int:
    """Return the messages that follow one another: around a ring, or to one rank after another."""
    return (2 if kind == "all-reduce" else 1) * (world_size - 1)


def sent_bytes(collective: Collective, world_size: int) -> float:
    """Return the bytes that a rank sends in a ring, or to every other rank."""
    return ring_steps(collective.kind, world_size) / world_size * collective.num_bytes


def fitted_rate(kind: CollectiveKind, world_size: int, samples: Iterable[tuple[int, float]]) -> Rate:
    """Return the rate with the least relative errors on (bytes, seconds) of a kind of collective.

    A latency or a transfer time that would be negative is taken as zero; then the bandwidth is infinite.
    Raises ValueError for fewer than two different sizes, where the two can't be told apart.
    """
    steps = ring_steps(kind, world_size)
    rows = [
        (steps / seconds, sent_bytes(Collective(kind, num_bytes), world_size) / seconds)
        for num_bytes, seconds in samples
    ]
    if steps < 1 or len({sent / latency for latency, sent in rows}) < 2:
        raise ValueError(
            f"{kind} has to be measured with two different sizes at least, on 2 ranks at least, to tell "
            f"latency from bandwidth; there are {len(rows)} measurements on {world_size} ranks"
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
