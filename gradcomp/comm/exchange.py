"""How a payload is averaged: in one exchange, in two, or by the back end's own all-reduce.

    one exchange    every rank sends its whole payload to all others, and all ranks sum: one way
    two exchanges   each rank's shard to its owner, and the owners' sums to all: two ways
    the back end's own

An exchange is an all-to-all or an all-gather. Between W ranks, one exchange sends W − 1 payloads per rank,
and two send 2 (W − 1) / W, as a ring does. gloo's rings take 2 (W − 1) round trips. What a payload holds, and
how it is summed, is the caller's: codes go through all_to_all and all_gather, numbers through all_reduce.

gloo sends a message when its receiver has said that it is ready. Its own all-to-all and all-gather post their
sends first. So the rank that starts later, with its peer ready, hands its whole message to the connection
before it says that it is ready itself. The two directions of a link take turns, and on a slow link the
collective takes up to twice as long. On gloo's CPU tensors, therefore, each rank exchanges messages with all
others at once, and posts every receive before any send.

Where the delay of the links is known, it posts receives long before: a message takes one way, not a round
trip. A _Channel numbers the exchanges of about one size, and posts the receives of the next numbers. So each
gets its message, whatever comes, and however a step ends. A message says of which exchange it is.

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
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from gradcomp import ops

from ..rules import described
from .process_group import Explaining, has_backend, kept_of
from .torch_private import backend_of, unrecorded

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

# The tags of messages without and with a channel. They are large: a program's own messages on the group
# hardly have such tags.
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
_ROUND_TRIP = "round_trip_s"


def takes_one_exchange(num_bytes: int, world_size: int, *, has_delay: bool) -> bool:
    """Return whether a payload of this size is averaged in one exchange, not in two.

    has_delay: see round_trip_s.

    Depends on nothing else, so all ranks decide alike. Between two ranks one exchange sends no more than two
    do. Between more it sends W − 2 payloads more, about, and pays where a round trip takes longer than these.
    """
    return world_size == 2 or (has_delay and (world_size - 2) * num_bytes <= ONE_EXCHANGE_BYTES)


def is_posted_ahead(num_bytes: int, world_size: int) -> bool:
    """Return whether receives of messages of this size are posted ahead in a group that knows its delay."""
    return 1 < world_size and (world_size - 1) << (_HEADING_BYTES + num_bytes).bit_length() <= AHEAD_BYTES


def all_reduce(
    wire: torch.Tensor, group: dist.ProcessGroup, *, has_delay: bool, out: torch.Tensor | None = None
) -> Works:
    """Sum a 1-D tensor over the ranks, in place; or into ``out``, in its dtype. Yields each exchange.

    Exchanges are for links with a delay, where ranks send messages: NCCL's own all-reduce is the best for
    sums, and so is gloo's without a delay. They add numbers in fp32 (fp64) in the order of the ranks, and
    round to the wire's dtype only if there are two exchanges. Every rank gets the same bits.
    """
    out = wire if out is None else out
    if not (has_delay and group.size() > 1 and takes_messages(wire, group)):
        yield group.allreduce([wire], SUM)
        if out is not wire:
            ops.decompress_cast(wire, out=out)
    elif takes_one_exchange(wire.nbytes, group.size(), has_delay=has_delay):
        rows = _rows_beside(wire, group)
        yield all_gather(rows, wire, group)
        _sum(rows, out)
    else:
        shards = wire.tensor_split(group.size())
        own = shards[group.rank()]
        rows = _rows_beside(own, group)
        yield _Exchange(0, rows, shards, group)
        _sum(rows, own)
        yield all_gather(shards, own, group)
        if out is not wire:
            out.copy_(wire)


def all_to_all(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Give row r of ``sent`` [ranks, n] to rank r; get row r of ``received`` from it.

    Returns the collective under way.
    """
    if takes_messages(sent, group):
        received[group.rank()].copy_(sent[group.rank()])
        return _Exchange(0, received, sent, group)
    work: dist.Work = getattr(group, _OF_GROUP[0])(received.view(-1), sent.view(-1), [], [], _TO_ALL)
    return work


def all_gather(received: _Rows, sent: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Give ``sent`` [n] to every rank; get row r of ``received`` [ranks, n] from rank r.

    Returns the collective under way.
    """
    if takes_messages(sent, group):
        own = received[group.rank()]
        if own is not sent:
            own.copy_(sent)
        return _Exchange(1, received, [sent] * group.size(), group)
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


class _Exchange(dist.Work):
    """One exchange: a message to and from every other rank. Rows of this rank itself aren't used.

    kind: the index of its name in _KINDS.
    received, sent: a row for every rank.

    Holds no process group, and after wait() nothing of one: connections end with the group.
    """

    def __init__(self, kind: int, received: _Rows, sent: _Rows, group: dist.ProcessGroup):
        super().__init__()
        of_group, rank, size = _exchanges_of(group), group.rank(), group.size()
        self._number, self._kind = of_group.num_exchanges + 1, kind
        # Each rank begins with a different one.
        others = [(rank + distance) % size for distance in range(1, size)]
        rows, messages = [received[other] for other in others], [sent[other] for other in others]
        channel = of_group.channel(received, sent, group)
        if channel is not None:
            messages = list(map(cache(self._pack), messages))
        of_group.num_exchanges = self._number
        if channel is not None:
            tag, posted = channel.take(others, group)
            tags = [tag] * len(others)
        else:
            tags = list(map(self._tag, messages))
            posted = _receives(rows, map(self._tag, rows), others, group)
        self._receives = list(zip(rows, others, posted, strict=True))
        # Not yet waited for: gloo waits without end for what it has waited for.
        self._works: list[Any] = [work for _, work in posted]
        self._under_way = of_group.under_way
        self._under_way[self._number] = weakref.ref(self), self._works
        for other, message, tag in zip(others, messages, tags, strict=True):
            self._works.append(dist.isend(message, group=group, group_dst=other, tag=tag))

    def _heading(self, row: torch.Tensor) -> list[int]:
        return [self._number, self._kind, row.nbytes]

    def _tag(self, row: torch.Tensor) -> int:
        """Tell a message without a channel by its heading: gloo takes one that is too short for whole."""
        return _FIRST_TAG + zlib.crc32(repr(self._heading(row)).encode()) % _NUM_TAGS

    def _pack(self, row: torch.Tensor) -> torch.Tensor:
        heading = torch.tensor(self._heading(row), dtype=torch.int64, device="cpu")
        return torch.cat([each.view(-1).view(torch.uint8) for each in (heading, row)])

    @torch.inference_mode()  # the row may have been made in it
    def _unpack(self, message: torch.Tensor, row: torch.Tensor, source: int) -> None:
        number, kind, num_bytes = heading = message[:_HEADING_BYTES].view(torch.int64).tolist()
        if heading != self._heading(row):
            raise RuntimeError(
                f"rank {source} of the group has sent {num_bytes} bytes as its exchange {number}, an "
                f"{_KINDS[kind]}, where this rank needs {row.nbytes} bytes"
            )
        row.view(-1).view(torch.uint8).copy_(message[_HEADING_BYTES : _HEADING_BYTES + num_bytes])

    def wait(self, timeout: Any = None) -> bool:
        """Wait for all. Raises RuntimeError if a rank has ended, is late, or is at another exchange."""
        try:
            while self._receives:
                self._works[0].wait()
                del self._works[0]
                row, source, (message, _) = self._receives.pop(0)
                if message is not row:
                    self._unpack(message, row, source)
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


def _receives(
    rows: Sequence[torch.Tensor], tags: Iterable[int], others: Sequence[int], group: dist.ProcessGroup
) -> list[tuple[torch.Tensor, Any]]:
    """Post receives into rows from other ranks. Returns (row, work) for each."""
    each = zip(rows, tags, others, strict=True)
    return [(row, dist.irecv(row, group=group, group_src=other, tag=tag)) for row, tag, other in each]


@dataclass
class _Channel:
    """The exchanges whose largest message has less than 2**exponent bytes, with a heading. They are numbered.

    ahead: (tag, (memory, work) from each other rank) of those to come. How many depends on the exchanges so
        far alone: torch's debug level DETAIL compares the number of receives.
    """

    exponent: int
    num_posted: int = 0
    ahead: deque[tuple[int, list[tuple[torch.Tensor, Any]]]] = field(default_factory=deque)

    def take(self, others: list[int], group: dist.ProcessGroup) -> tuple[int, list[tuple[torch.Tensor, Any]]]:
        """Return the next exchange's tag and receives. Post others ahead: two for each that is taken."""
        most = min(_MAX_AHEAD, AHEAD_BYTES // (len(others) << self.exponent))
        for _ in range(min(3, 1 + most - len(self.ahead))):
            tag = _FIRST_OF_CHANNELS + self.exponent * _NUM_OF_CHANNEL + self.num_posted % _NUM_OF_CHANNEL
            with torch.inference_mode(False), unrecorded():  # it may be taken in another mode, or profile
                memory = [torch.empty(2**self.exponent, dtype=torch.uint8, device="cpu") for _ in others]
                self.ahead.append((tag, _receives(memory, [tag] * len(others), others, group)))
            self.num_posted += 1
        return self.ahead.popleft()


@dataclass
class _GroupExchanges:
    """The exchanges on a process group's connections.

    num_exchanges: the number begun. It numbers them, so a rank that has left one out doesn't take another
        exchange's messages.
    under_way: what they have posted, by number. An error may end a step before anybody waits for an
        exchange. gloo can't take a receive back, and stops reading a connection when a message comes after
        its receive has been freed. So its messages stay until a later exchange waits for them.
    channels: by exponent.
    """

    num_exchanges: int = 0
    under_way: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    channels: dict[int, _Channel] = field(default_factory=dict)

    def channel(self, received: _Rows, sent: _Rows, group: dist.ProcessGroup) -> _Channel | None:
        """Return the channel of an exchange; None if it is large, and before the delay is known."""
        if _ROUND_TRIP not in kept_of(group):
            return None
        num_bytes = max(row.nbytes for rows in (received, sent) for row in rows)
        if not is_posted_ahead(num_bytes, group.size()):
            return None
        exponent = (_HEADING_BYTES + num_bytes).bit_length()
        return self.channels.setdefault(exponent, _Channel(exponent))


# Of each group with its back end, and of back ends, which several objects for a group may have.
_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Any, _GroupExchanges]] = weakref.WeakKeyDictionary()
_of_backends: weakref.WeakValueDictionary[int, _GroupExchanges] = weakref.WeakValueDictionary()


def _exchanges_of(group: dist.ProcessGroup) -> _GroupExchanges:
    backend, kept = backend_of(group, torch.device("cpu")), _kept.get(group)
    if kept is None or kept[0] is not backend:
        kept = _kept[group] = backend, _of_backends.setdefault(id(backend), _GroupExchanges())
    return kept[1]


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
    if not takes_messages(tensor, group):
        return 0.0
    timed = between or group
    if _ROUND_TRIP not in kept_of(group):
        kept_of(timed).pop(_ROUND_TRIP, None)  # a message whose receive is posted ahead takes no time
        kept_of(group)[_ROUND_TRIP] = _agreed_s(group, timed) if group.size() > 1 else 0.0
    found: float = kept_of(group)[_ROUND_TRIP]
    kept_of(timed)[_ROUND_TRIP] = found
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
    times = []
    for _ in range(_SAMPLES):
        begun = time.perf_counter()
        _largest(0.0, group)
        times.append(time.perf_counter() - begun)
    return min(times)


def _largest(seconds: float, group: dist.ProcessGroup) -> float:
    # By messages: a profiler that counts a first step's all-reduces finds the buckets' alone.
    mine = torch.tensor([seconds], dtype=torch.float64, device="cpu")
    received = mine.new_empty(group.size(), 1)
    with Explaining.of("agree on the delay of the links", group):
        all_gather(received, mine, group).wait()
    return received.max().item()
