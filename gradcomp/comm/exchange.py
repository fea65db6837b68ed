"""How a payload is averaged: in one exchange, in two, or by the back end's own all-reduce.

    one exchange    every rank sends its whole payload to all others, and all ranks sum: one round trip
    two exchanges   each rank's shard to its owner, and the owners' sums to all: two round trips
    the back end's own

An exchange is an all-to-all or an all-gather. Between W ranks, one exchange sends W − 1 payloads per rank,
and two send 2 (W − 1) / W, as a ring does. gloo's rings take 2 (W − 1) round trips. What a payload holds, and
how it is summed, is the caller's: codes go through all_to_all and Gather, numbers through all_reduce.

gloo sends a message when its receiver has said that it is ready. Its own all-to-all and all-gather post their
sends first. So the rank that starts later, with its peer ready, hands its whole message to the connection
before it says that it is ready itself. The two directions of a link take turns, and on a slow link the
collective takes up to twice as long. On gloo's CPU tensors, therefore, each rank exchanges messages with all
others at once, and posts every receive before any send.

Whether one exchange pays depends on the delay of the links, the time from a message to its answer, which all
ranks must know alike. It is measured once per group, or given. Only whether it reaches MIN_DELAY_S counts, so
runs on the same links decide alike: links of one site take well below a millisecond, links between sites ten
and more.
"""

from __future__ import annotations

import math
import os
import time
import weakref
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from gradcomp import ops

from ..rules import described
from .process_group import Explaining, has_backend, kept_of

if TYPE_CHECKING:
    from .nodes import Nodes

# Collectives that are under way.
Works = Generator[dist.Work | None, None, None]

# The names of a group's collectives since torch 2.13, and before.
_OF_GROUP = ("all_to_all_single", "all_gather_single")
if not hasattr(dist.ProcessGroup, _OF_GROUP[0]):
    _OF_GROUP = ("alltoall_base", "_allgather_base")
# Their options, which a group of a class in Python, such as torchft's, may require.
SUM, _TO_ALL, _GATHER = dist.AllreduceOptions(), dist.AllToAllOptions(), AllgatherOptions()

# The tags of these messages. They are large: a program's own messages on the group hardly have such tags.
_FIRST_TAG, _NUM_TAGS = 2**30, 2**30

# The limit on the bytes that one exchange sends more than two, per rank, on a link with a delay.
ONE_EXCHANGE_BYTES = 2**18


# From this round trip on, a link has a delay.
MIN_DELAY_S = 0.005
# The round trip in milliseconds, in place of measuring it. Ranks that are given unlike ones use the largest.
GIVEN = "GRADCOMP_ROUND_TRIP_MS"
_SAMPLES, _MAX_ROUNDS = 5, 3
_ROUND_TRIP = "round_trip_s"


def takes_one_exchange(num_bytes: int, world_size: int, *, has_delay: bool) -> bool:
    """Return whether a payload of this size is averaged in one exchange, not in two.

    has_delay: see round_trip_s.

    Depends on nothing else, so all ranks decide alike. Between two ranks one exchange sends no more than two
    do. Between more it sends W − 2 payloads more, about, and pays where a round trip takes longer than these.
    """
    return world_size == 2 or (has_delay and (world_size - 2) * num_bytes <= ONE_EXCHANGE_BYTES)


def all_reduce(
    wire: torch.Tensor, group: dist.ProcessGroup, *, has_delay: bool, out: torch.Tensor | None = None
) -> Works:
    """Sum a 1-D tensor over the ranks, in place; or into ``out``, in its dtype. Yields each exchange.

    Only the size counts in the call, which posts the receives that it can: see Gather.

    Exchanges are for links with a delay, where ranks send messages: NCCL's own all-reduce is the best for
    sums, and so is gloo's without a delay. They add numbers in fp32 (fp64) in the order of the ranks, and
    round to the wire's dtype only if there are two exchanges. Every rank gets the same bits.
    """
    out = wire if out is None else out
    if not (has_delay and group.size() > 1 and takes_messages(wire, group)):
        return _own_all_reduce(wire, group, out)
    if takes_one_exchange(wire.nbytes, group.size(), has_delay=has_delay):
        rows = _rows_beside(wire, group)
        return _in_one_exchange(wire, rows, Gather(rows, group), out)
    shards = list(wire.tensor_split(group.size()))
    # Sums of shards are received where this rank's own values of them are, but no rank sends its sum before
    # it has got these.
    gather = Gather(shards, group)

    def in_two_exchanges() -> Works:
        own = shards[group.rank()]
        rows = _rows_beside(own, group)
        yield _Messages(rows, group, kind=0).send(shards)
        _sum(rows, own)
        yield gather(own)
        if out is not wire:
            out.copy_(wire)

    return in_two_exchanges()


def _own_all_reduce(wire: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor) -> Works:
    yield group.allreduce([wire], SUM)
    if out is not wire:
        ops.decompress_cast(wire, out=out)


def _in_one_exchange(
    wire: torch.Tensor, rows: Sequence[torch.Tensor], gather: Gather, out: torch.Tensor
) -> Works:
    yield gather(wire)
    _sum(rows, out)


class Gather:
    """An all-gather that begins when it is called with what this rank sends. Its receives are posted before.

    gloo's sender then needs no answer, and the message is under way for half a round trip. On other back ends
    nothing happens before.

    received: [ranks, n], or a row of it for each rank.
    """

    def __init__(self, received: torch.Tensor | Sequence[torch.Tensor], group: dist.ProcessGroup):
        self._received, self._group = received, group
        self._messages = _Messages(received, group, kind=1) if takes_messages(received[0], group) else None

    def __call__(self, sent: torch.Tensor) -> dist.Work:
        """Give ``sent`` [n] to every rank; get row r of ``received`` from rank r. Returns the collective."""
        if self._messages is None:
            assert isinstance(self._received, torch.Tensor)
            gathered = self._received.view(-1)
            return getattr(self._group, _OF_GROUP[1])(gathered, sent, _GATHER)  # type: ignore[no-any-return]
        own = self._received[self._group.rank()]
        if own is not sent:
            own.copy_(sent)
        return self._messages.send([sent] * self._group.size())


def all_to_all(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Give row r of ``sent`` [ranks, n] to rank r; get row r of ``received`` from it.

    Returns the collective under way.
    """
    if takes_messages(sent, group):
        received[group.rank()].copy_(sent[group.rank()])
        return _Messages(received, group, kind=0).send(sent)
    work: dist.Work = getattr(group, _OF_GROUP[0])(received.view(-1), sent.view(-1), [], [], _TO_ALL)
    return work


def all_gather(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Give ``sent`` [n] to every rank; get row r of ``received`` [ranks, n] from rank r.

    Returns the collective under way.
    """
    return Gather(received, group)(sent)


def reduce_scatter(own: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> Works:
    """Sum row r of every rank's ``sent`` [ranks, n] into rank r's ``own`` [n]. Yields the collective.

    On NCCL the sum is NCCL's. Elsewhere it is in fp32 (fp64), in the order of the ranks, and rounded once.
    """
    if has_backend(group, f"{sent.device.type}:nccl"):
        yield dist.reduce_scatter_tensor(own, sent.view(-1), group=group, async_op=True)
    else:
        received = torch.empty_like(sent)
        yield all_to_all(received, sent, group)
        _sum(received.unbind(), own)


def reduce_hierarchically(
    flat: torch.Tensor,
    nodes: Nodes,
    between: Callable[[torch.Tensor], Generator[dist.Work | None, None, torch.Tensor]],
    scale: float = 1.0,
) -> Works:
    """Sum a buffer within each node, reduce the sums between nodes, and write the result back on every rank.

    flat: [numel], floating-point.
    between: called with [part], the node's sum of scale · this rank's part of the buffer. Reduces it between
        the ranks of equal place, and returns the result. The last part is padded with zeros.

    Yields each collective in progress. Ranks whose between returns equal bits get equal bits.
    """
    parts = flat.new_empty(nodes.ranks_per_node, -(-flat.numel() // nodes.ranks_per_node))
    whole, padding = parts.view(-1).tensor_split([flat.numel()])
    torch.mul(flat, scale, out=whole)
    padding.zero_()
    part = torch.empty_like(parts[0])
    yield from reduce_scatter(part, parts, nodes.within)
    reduced = yield from between(part)
    yield all_gather(parts, reduced, nodes.within)
    flat.copy_(whole)


def takes_messages(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether the group's ranks exchange messages of such tensors: on gloo, on a CPU."""
    return tensor.device.type == "cpu" and has_backend(group, "cpu:gloo")


class _Messages(dist.Work):
    """One exchange: a message to and from every other rank. Rows of this rank itself aren't used.

    kind: 0 for all-to-all, 1 for all-gather.

    The constructor posts the receives; send() sends.
    """

    def __init__(
        self, received: torch.Tensor | Sequence[torch.Tensor], group: dist.ProcessGroup, *, kind: int
    ):
        super().__init__()
        self._group = group
        self._of_group: _GroupExchanges = kept_of(group).setdefault("exchanges", _GroupExchanges())
        self._of_group.num_exchanges += 1
        self._name = f"{self._of_group.num_exchanges} {kind}"
        rank, size = group.rank(), group.size()
        # Each rank begins with a different one.
        self._others = [(rank + distance) % size for distance in range(1, size)]
        self._works: list[dist.Work | None] = [
            dist.irecv(received[other], group=group, group_src=other, tag=self._tag(received[other]))
            for other in self._others
        ]
        under_way = self._of_group.under_way
        # When this exchange is complete, every rank has gone on to it, and sends no more messages of these.
        self._given_up = [each for each in [*under_way] if each() is None]
        under_way[weakref.ref(self)] = self._works

    def send(self, sent: torch.Tensor | Sequence[torch.Tensor]) -> _Messages:
        """Send each other rank its row."""
        self._works += [
            dist.isend(sent[other], group=self._group, group_dst=other, tag=self._tag(sent[other]))
            for other in self._others
        ]
        return self

    def _tag(self, message: torch.Tensor) -> int:
        """Number a message by exchange, kind and size: gloo takes a message that is too short for whole."""
        return _FIRST_TAG + zlib.crc32(f"{self._name} {message.nbytes}".encode()) % _NUM_TAGS

    def wait(self, timeout: Any = None) -> bool:
        """Wait for every message. Raises RuntimeError if a rank has ended or doesn't answer in time."""
        for work in self._works:
            assert work is not None  # irecv and isend return None on ranks outside the group only
            work.wait()
        for each in (weakref.ref(self), *self._given_up):
            self._of_group.under_way.pop(each, None)
        self._works, self._given_up = [], []
        return True


def _rows_beside(own: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return a row for each rank: this rank's own tensor, and new memory like it for all others."""
    rows = list(own.new_empty(group.size() - 1, own.numel()))
    rows.insert(group.rank(), own)
    return rows


def _sum(rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the sum of the rows to out, which may be one of them, in fp32 (fp64) and in their order."""
    wide = torch.promote_types(rows[0].dtype, torch.float32)
    is_read_late = any(row is out for row in rows[2:])
    total = out if out.dtype == wide and not is_read_late else torch.empty_like(rows[0], dtype=wide)
    if len(rows) > 1 and rows[0].dtype == wide:
        torch.add(rows[0], rows[1], out=total)
    else:
        total.copy_(rows[0])
        for row in rows[1:2]:
            total.add_(row)
    for row in rows[2:]:
        total.add_(row)
    if total is not out:
        out.copy_(total)


@dataclass
class _GroupExchanges:
    """The exchanges of a process group.

    num_exchanges: the number begun. It numbers them, so a rank that has left one out doesn't take another
        exchange's messages.
    under_way: their messages, by exchange. An error may end a step before anybody waits for an exchange. gloo
        can't take a receive back, and stops reading a connection when a message comes after its receive has
        been freed. So its messages stay until a later exchange is complete.
    """

    num_exchanges: int = 0
    under_way: dict[weakref.ref[_Messages], list[dist.Work | None]] = field(default_factory=dict)


# --- delay ---


def round_trip_s(
    tensor: torch.Tensor, group: dist.ProcessGroup, between: dist.ProcessGroup | None = None
) -> float:
    """Return the seconds from a message to its answer between a group's ranks, the same on all ranks.

    between: with nodes, the group of this rank's place, whose exchanges are timed. The others agree all the
        same: what is summed within a node and between nodes depends on it, too.

    The first call measures them: the shortest of a few exchanges, on the rank where that took longest. Every
    rank of the group must come to it in the same place among its collectives. 0 where ranks exchange no
    messages of such tensors themselves, such as on NCCL.

    Raises ValueError on every rank if a rank's environment gives anything but a finite number of at least 0.
    """
    kept, key = kept_of(group), (_ROUND_TRIP, tensor.device.type)
    if key not in kept:
        is_timed = group.size() > 1 and takes_messages(tensor, group)
        kept[key] = _agreed_s(group, between or group) if is_timed else 0.0
    found: float = kept[key]
    return found


def has_delay(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether a group's links have a delay for such tensors. For its place see round_trip_s."""
    return round_trip_s(tensor, group) >= MIN_DELAY_S


def _agreed_s(group: dist.ProcessGroup, timed: dist.ProcessGroup) -> float:
    text = os.environ.get(GIVEN)
    try:
        seconds = -1.0 if text is None else float(text) / 1e3
    except ValueError:
        seconds = math.nan
    given = _largest(seconds if text is None or seconds >= 0 else math.inf, group)
    if not given < math.inf:
        raise ValueError(
            f"{GIVEN} must be a finite number of at least 0, but on a rank it is not; on this rank it is "
            f"{described(text)}"
        )
    if given >= 0:
        return given
    shortest = math.inf
    for _ in range(_MAX_ROUNDS):
        # Busy processors make exchanges longer, too, but not every one.
        shortest = min(shortest, _largest(_measured_s(timed), group))
        if shortest < MIN_DELAY_S:
            break
    return shortest


def _measured_s(group: dist.ProcessGroup) -> float:
    """Return the time of the shortest of a few exchanges of a number each."""
    mine, times = torch.zeros(1, dtype=torch.float32, device="cpu"), []
    with Explaining.of("measure the delay of the links", group):
        for _ in range(_SAMPLES):
            received = mine.new_empty(group.size(), 1)
            begun = time.perf_counter()
            all_gather(received, mine, group).wait()
            times.append(time.perf_counter() - begun)
    return min(times)


def _largest(seconds: float, group: dist.ProcessGroup) -> float:
    # By messages: a profiler that counts a first step's all-reduces finds the buckets' alone.
    mine = torch.tensor([seconds], dtype=torch.float64, device="cpu")
    received = mine.new_empty(group.size(), 1)
    with Explaining.of("agree on the delay of the links", group):
        all_gather(received, mine, group).wait()
    return received.max().item()
