"""How a payload is averaged: in one exchange, in two, or by the back end's own all-reduce.

    one exchange    every rank sends its whole payload to all others, and all ranks sum: one way
    two exchanges   each rank's shard to its owner, and the owners' sums to all: two ways

An exchange is an all-to-all or an all-gather. Between W ranks, one exchange sends W − 1 payloads per rank,
and two send 2 (W − 1) / W, as a ring does. What a payload holds, and how it is summed, is the caller's: codes
go through all_to_all and all_gather, numbers through all_reduce.

On gloo's CPU tensors each rank exchanges messages with all others at once, and posts every receive before any
send. gloo's own collectives post sends first, so the two directions of a link take turns.

gloo sends a message when its receiver has said that it is ready. Where the delay of the links is known, a
_Channel numbers the exchanges of about one size, and posts the receives of the next numbers: a message takes
one way, not a round trip. Messages name their exchange: each gets its own, however a step ends.

All ranks must know the delay of the links alike: the time from a message to its answer, measured once per
group, or given. Only whether it reaches MIN_DELAY_S counts, so runs on the same links decide alike: links of
one site take well below a millisecond, links between sites ten and more.
"""

from __future__ import annotations

import math
import os
import timeit
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from gradcomp import ops

from ..rules import described
from .nodes import nodes_of
from .process_group import Explaining, has_backend
from .torch_private import backend_of, cpu_backend_of, enable_record_function

# Collectives that are under way.
Works = Generator[dist.Work | None, None, None]

# The names of a group's collectives since torch 2.13, and before.
_OF_GROUP = ("all_to_all_single", "all_gather_single")
if not hasattr(dist.ProcessGroup, _OF_GROUP[0]):
    _OF_GROUP = ("alltoall_base", "_allgather_base")
# Their options, which a group of a class in Python, such as torchft's, may require.
SUM, _TO_ALL, _GATHER = dist.AllreduceOptions(), dist.AllToAllOptions(), AllgatherOptions()

# The tags of messages without and with a channel: large, as a program's own messages hardly have such tags.
_FIRST_TAG, _NUM_TAGS = 2**30, 2**29
_FIRST_OF_CHANNELS, _NUM_OF_CHANNEL = 2**30 + 2**29, 2**24
# In front of a channel's message: the exchange's number, its kind and the message's bytes, in int64.
_HEADING_BYTES, _KINDS = 24, ("all-to-all", "all-gather")
# The limits on what a channel posts ahead, in bytes and exchanges. Larger exchanges have none.
AHEAD_BYTES, _MAX_AHEAD = 2**23, 64

# The limit on the bytes that one exchange sends more than two, per rank, on a link with a delay.
ONE_EXCHANGE_BYTES = 2**18

_Rows = torch.Tensor | Sequence[torch.Tensor]  # one for every rank

# From this round trip on, a link has a delay.
MIN_DELAY_S = 0.005
# The round trip in milliseconds, in place of measuring it. Ranks that are given unlike ones use the largest.
GIVEN = "GRADCOMP_ROUND_TRIP_MS"
_SAMPLES, _MAX_ROUNDS = 5, 3
_CPU = torch.device("cpu")


def takes_one_exchange(num_bytes: int, world_size: int, *, has_delay: bool) -> bool:
    """Return whether a payload of this size is averaged in one exchange, not in two.

    has_delay: see round_trip_s.

    Depends on nothing else, so all ranks decide alike. Between two ranks one exchange sends no more than two
    do. Between more it sends W − 2 payloads more, about, and pays where a round trip takes longer than these.
    """
    return world_size == 2 or (has_delay and (world_size - 2) * num_bytes <= ONE_EXCHANGE_BYTES)


def channel_for(num_bytes: int, world_size: int) -> int | None:
    """Return the exponent of the channel for messages of this size, in a group that knows its delay.

    None if they are so large that no receives are posted ahead.
    """
    exponent = (_HEADING_BYTES + num_bytes).bit_length()
    return exponent if 1 < world_size and (world_size - 1) << exponent <= AHEAD_BYTES else None


def all_reduce(
    wire: torch.Tensor, group: dist.ProcessGroup, *, has_delay: bool, out: torch.Tensor | None = None
) -> Works:
    """Sum a 1-D tensor over the ranks, in place; or into ``out``, in its dtype. Yields each exchange.

    Exchanges are for links with a delay, where ranks send messages: NCCL's own all-reduce is the best for
    sums, and so is gloo's without a delay. They add numbers in fp32 (fp64) in the order of the ranks, and
    round to the wire's dtype only if there are two exchanges. Every rank gets the same bits.
    """
    out, rank, size = wire if out is None else out, group.rank(), group.size()
    exchanges = _exchanges_of(wire, group) if has_delay and size > 1 else None
    if exchanges is None:
        yield group.allreduce([wire], SUM)
        if out is not wire:
            ops.cast(wire, out=out)
        return
    is_one = takes_one_exchange(wire.nbytes, size, has_delay=has_delay)
    shards = [wire] * size if is_one else wire.tensor_split(size)
    own = shards[rank]
    rows = list(own.new_empty(size - 1, own.numel()))  # of the others
    rows.insert(rank, own)
    yield _Exchange(1 if is_one else 0, rows, shards, exchanges, group)
    _sum(rows, out if is_one else own)
    if not is_one:
        yield _Exchange(1, shards, [own] * size, exchanges, group)
        if out is not wire:
            out.copy_(wire)


def all_to_all(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Give row r of ``sent`` [ranks, n] to rank r; get row r of ``received`` from it.

    Returns the collective under way.
    """
    if (exchanges := _exchanges_of(sent, group)) is not None:
        received[group.rank()].copy_(sent[group.rank()])
        return _Exchange(0, received, sent, exchanges, group)
    work: dist.Work = getattr(group, _OF_GROUP[0])(received.view(-1), sent.view(-1), [], [], _TO_ALL)
    return work


def all_gather(received: _Rows, sent: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Give ``sent`` [n] to every rank; get row r of ``received`` [ranks, n] from rank r.

    Returns the collective under way.
    """
    if (exchanges := _exchanges_of(sent, group)) is not None:
        own = received[group.rank()]
        if own is not sent:
            own.copy_(sent)
        return _Exchange(1, received, [sent] * group.size(), exchanges, group)
    assert isinstance(received, torch.Tensor)
    work: dist.Work = getattr(group, _OF_GROUP[1])(received.view(-1), sent, _GATHER)
    return work


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
    group: dist.ProcessGroup,
    ranks_per_node: int,
    between: Callable[[torch.Tensor, dist.ProcessGroup], Works],
    scale: float = 1.0,
) -> Works:
    """Sum a buffer within each node, reduce the sums between nodes, and write the result back on every rank.

    flat: [numel], floating-point.
    between: called with [part], the node's sum of scale · this rank's part of the buffer, and the ranks of
        equal place. Reduces the part in place, with equal bits. The last part is padded with zeros.

    Yields each collective in progress.
    """
    nodes = nodes_of(group, ranks_per_node)
    parts = flat.new_empty(nodes.within.size(), -(-flat.numel() // nodes.within.size()))
    whole, padding = parts.view(-1).tensor_split([flat.numel()])
    torch.mul(flat, scale, out=whole)
    padding.zero_()
    part = torch.empty_like(parts[0])
    yield from reduce_scatter(part, parts, nodes.within)
    yield from between(part, nodes.between)
    yield all_gather(parts, part, nodes.within)
    flat.copy_(whole)


class _Exchange(dist.Work):
    """One exchange: a message to and from every other rank. Rows of this rank itself aren't used.

    kind: the index of its name in _KINDS.
    received, sent: a row for every rank.
    exchanges: the group's.

    Holds no process group, and after wait() nothing of one: connections end with the group.
    """

    def __init__(
        self, kind: int, received: _Rows, sent: _Rows, exchanges: _Exchanges, group: dist.ProcessGroup
    ):
        super().__init__()
        rank, size = group.rank(), group.size()
        self._number, self._kind = exchanges.num_begun + 1, kind
        # Each rank begins with a different one.
        others = [(rank + distance) % size for distance in range(1, size)]
        rows, messages = [received[other] for other in others], [sent[other] for other in others]
        exponent = None
        if exchanges.round_trip_s is not None:
            exponent = channel_for(max(row.nbytes for each in (received, sent) for row in each), size)
        if exponent is not None:  # before anything is posted: it may fail
            packed = {id(row): row for row in messages}  # once, if it goes to several ranks
            for key, row in packed.items():
                heading = torch.tensor([self._number, kind, row.nbytes], dtype=torch.int64, device=_CPU)
                packed[key] = torch.cat([each.view(-1).view(torch.uint8) for each in (heading, row)])
            messages = [packed[id(row)] for row in messages]
        exchanges.num_begun = self._number
        if exponent is not None:
            channel = exchanges.channels.setdefault(exponent, _Channel(exponent))
            tag, memory, works = channel.take(others, group)
            tags = [tag] * len(others)
        else:
            memory, tags = rows, list(map(self._tag, messages))
            works = [
                dist.irecv(row, group=group, group_src=other, tag=self._tag(row))
                for row, other in zip(rows, others, strict=True)
            ]
        self._receives = list(zip(rows, others, memory, strict=True))
        # Not yet waited for: gloo waits without end for what it has waited for.
        self._works = works
        self._under_way = exchanges.under_way
        self._under_way[self._number] = weakref.ref(self), self._works
        for other, message, tag in zip(others, messages, tags, strict=True):
            self._works.append(dist.isend(message, group=group, group_dst=other, tag=tag))

    def _tag(self, row: torch.Tensor) -> int:
        """Tell a message without a channel by its heading: gloo takes one that is too short for whole."""
        return _FIRST_TAG + zlib.crc32(repr([self._number, self._kind, row.nbytes]).encode()) % _NUM_TAGS

    def wait(self, timeout: Any = None) -> bool:
        """Wait for all. Raises RuntimeError if a rank has ended, is late, or is at another exchange."""
        try:
            while self._receives:
                self._works[0].wait()
                del self._works[0]
                row, source, message = self._receives.pop(0)
                if message is row:
                    continue
                number, kind, num_bytes = heading = message[:_HEADING_BYTES].view(torch.int64).tolist()
                if heading != [self._number, self._kind, row.nbytes]:
                    raise RuntimeError(
                        f"rank {source} of the group has sent {num_bytes} bytes as its exchange {number}, an "
                        f"{_KINDS[kind]}, where this rank needs {row.nbytes} bytes"
                    )
                with torch.inference_mode():  # the row may have been made in it
                    row.view(-1).view(torch.uint8).copy_(message[_HEADING_BYTES:][:num_bytes])
            # Every rank has begun this exchange, and those before: what was given up of them comes, too.
            for number, (exchange, works) in [*self._under_way.items()]:
                if number == self._number or (number < self._number and exchange() is None):
                    while works:
                        works[0].wait()
                        del works[0]
                    self._under_way.pop(number, None)
        except RuntimeError as error:
            kind = _KINDS[self._kind]
            raise RuntimeError(f"{error} (exchange {self._number} of the group: {kind})") from error
        self._under_way = {}
        return True


# A tag; memory and a receive for each other rank.
_Posted = tuple[int, list[torch.Tensor], list[Any]]


@dataclass
class _Channel:
    """The exchanges whose largest message has less than 2**exponent bytes, with a heading. They are numbered.

    ahead: of those to come. How many depends on the exchanges so far alone: torch's debug level DETAIL
        compares the number of receives.
    """

    exponent: int
    num_posted: int = 0
    ahead: deque[_Posted] = field(default_factory=deque)

    def take(self, others: list[int], group: dist.ProcessGroup) -> _Posted:
        """Return what is posted for the next exchange. Post others ahead: two for each that is taken."""
        most = min(_MAX_AHEAD, AHEAD_BYTES // (len(others) << self.exponent))
        enable_record_function(False)  # torch's profiles crash if a work ends in another one
        try:
            for _ in range(min(3, 1 + most - len(self.ahead))):
                tag = _FIRST_OF_CHANNELS + self.exponent * _NUM_OF_CHANNEL + self.num_posted % _NUM_OF_CHANNEL
                with torch.inference_mode(False):  # it may be taken in another mode
                    memory = [torch.empty(2**self.exponent, dtype=torch.uint8, device=_CPU) for _ in others]
                    works = [
                        dist.irecv(each, group=group, group_src=other, tag=tag)
                        for each, other in zip(memory, others, strict=True)
                    ]
                self.ahead.append((tag, memory, works))
                self.num_posted += 1
        finally:
            enable_record_function(True)
        return self.ahead.popleft()


@dataclass
class _Exchanges:
    """The exchanges on a process group's connections.

    num_begun: numbers them, so a rank that has left one out doesn't take another exchange's messages.
    under_way: what they have posted, by number. An error may end a step before anybody waits for an
        exchange. gloo can't take a receive back, and stops reading a connection when a message comes after
        its receive has been freed. So its messages stay until a later exchange waits for them.
    channels: by exponent.
    round_trip_s: see there; None before the ranks have agreed on it. There are no channels until then.
    """

    num_begun: int = 0
    under_way: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    channels: dict[int, _Channel] = field(default_factory=dict)
    round_trip_s: float | None = None


# Of each group with its back end, and of back ends, which several objects for a group may have.
_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Any, _Exchanges]] = weakref.WeakKeyDictionary()
_of_backends: weakref.WeakValueDictionary[int, _Exchanges] = weakref.WeakValueDictionary()


def _exchanges_of(tensor: torch.Tensor, group: dist.ProcessGroup) -> _Exchanges | None:
    """Return a group's exchanges; None if its ranks exchange no messages of such tensors, as on NCCL."""
    if tensor.device.type != "cpu":
        return None
    kept = _kept.get(group)
    if kept is None or kept[0] is not cpu_backend_of(group):
        if not has_backend(group, "cpu:gloo"):
            return None
        backend = backend_of(group, _CPU)
        kept = _kept[group] = backend, _of_backends.setdefault(id(backend), _Exchanges())
    return kept[1]


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
    if (exchanges := _exchanges_of(tensor, group)) is None:
        return 0.0
    timed = (_exchanges_of(tensor, between) if between else None) or exchanges
    if exchanges.round_trip_s is None:
        timed.round_trip_s = None  # a message whose receive is posted ahead takes no time
        exchanges.round_trip_s = _agreed_s(group, between or group) if group.size() > 1 else 0.0
    timed.round_trip_s = exchanges.round_trip_s
    return exchanges.round_trip_s


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
    return min(timeit.repeat(lambda: _largest(0.0, group), number=1, repeat=_SAMPLES))


def _largest(seconds: float, group: dist.ProcessGroup) -> float:
    # By messages: a profiler that counts a first step's all-reduces finds the buckets' alone.
    mine = torch.tensor([seconds], dtype=torch.float64, device="cpu")
    received = mine.new_empty(group.size(), 1)
    with Explaining.of("agree on the delay of the links", group):
        all_gather(received, mine, group).wait()
    return received.max().item()
