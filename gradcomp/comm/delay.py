"""How long a group's messages are under way: the time from a message to its answer.

It decides how sums are exchanged (see exchange.py), so all ranks must know the same. It is measured once per
group. Links of one site take well below a millisecond, sites and clouds ten and more. Only on which side of
MIN_DELAY_S it is counts, so that runs on the same links decide alike.
"""

import math
import time
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..rules import described
from .exchange import all_gather, takes_messages
from .process_group import Operation, device_for, resolve_group
from .reduced_values import ReducedValues

# From this round trip on, a link has a delay.
MIN_DELAY_S = 0.005
_NUM_SAMPLES = 5

_round_trips: WeakKeyDictionary[dist.ProcessGroup, float] = WeakKeyDictionary()


def round_trip_s(tensor: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Return the seconds from a message to its answer between a group's ranks, the same on all ranks.

    The first call measures them: the shortest of a few exchanges, on the rank where that took longest. Every
    rank of the group must come to it in the same place among its collectives. 0 where ranks exchange no
    messages of such tensors themselves, such as on NCCL.
    """
    if group.size() == 1 or not takes_messages(tensor, group):
        return 0.0
    if group not in _round_trips:
        _round_trips[group] = _measured_s(group)
    return _round_trips[group]


def has_delay(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether a group's links have a delay for such tensors. For its place see round_trip_s."""
    return round_trip_s(tensor, group) >= MIN_DELAY_S


def set_round_trip(seconds: float, process_group: dist.ProcessGroup | None = None) -> None:
    """Set how long a message and its answer take between a group's ranks, in place of measuring it.

    seconds: from 0.005 on, averages take as few exchanges as they can. Ranks that give unlike numbers all use
        the largest.
    process_group: None for the default group.

    Call it on every rank, before the group's first average. Matters on gloo's CPU tensors only.

    Raises ValueError for a number that isn't finite and at least 0.

    Example::

        dist.init_process_group("gloo")
        gradcomp.set_round_trip(0.05)
    """
    if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
        raise ValueError(f"set_round_trip takes finite seconds, at least 0, got {described(seconds)}")
    group = resolve_group("set_round_trip", process_group)
    _round_trips[group] = _agreed(seconds, group)


def inherit_round_trip(group: dist.ProcessGroup, parent: dist.ProcessGroup) -> None:
    """Give a group that is part of another what was set for that one, if anything was."""
    if parent in _round_trips:
        _round_trips.setdefault(group, _round_trips[parent])


def _measured_s(group: dist.ProcessGroup) -> float:
    mine, shortest = torch.zeros(1), math.inf
    with Operation.of("measure the delay of the links", group):
        for _ in range(_NUM_SAMPLES):
            received = torch.empty(group.size(), 1)
            begun = time.perf_counter()
            all_gather(received, mine, group).wait()
            shortest = min(shortest, time.perf_counter() - begun)
    return _agreed(shortest, group)


def _agreed(seconds: float, group: dist.ProcessGroup) -> float:
    what = "agree on the delay of the links"
    found: Any = ReducedValues(what, [seconds], [group], device_for(group, ())).wait()
    return float(found[0])
