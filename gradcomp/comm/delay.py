"""How long a group's messages are under way: the time from a message to its answer.

It decides how payloads are exchanged (exchange.py), so all ranks must know the same. It is measured once per
group, or given. Only whether it reaches MIN_DELAY_S counts, so runs on the same links decide alike: links of
one site take well below a millisecond, links between sites ten and more.
"""

import math
import os
import time
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..rules import described
from .exchange import all_gather, takes_messages
from .process_group import Operation
from .reduced_values import ReducedValues

# From this round trip on, a link has a delay.
MIN_DELAY_S = 0.005
# The round trip in milliseconds, in place of measuring it. Ranks that are given unlike ones use the largest.
GIVEN = "GRADCOMP_ROUND_TRIP_MS"
_SAMPLES, _MAX_ROUNDS = 5, 3

_round_trips: WeakKeyDictionary[dist.ProcessGroup, float] = WeakKeyDictionary()


def round_trip_s(
    tensor: torch.Tensor, group: dist.ProcessGroup, between: dist.ProcessGroup | None = None
) -> float:
    """Return the seconds from a message to its answer between a group's ranks, the same on all ranks.

    between: by nodes, the group of this rank's place, whose exchanges are timed. The others agree all the
        same: what is summed within a node and between nodes depends on it, too.

    The first call measures them: the shortest of a few exchanges, on the rank where that took longest. Every
    rank of the group must come to it in the same place among its collectives. 0 where ranks exchange no
    messages of such tensors themselves, such as on NCCL.

    Raises ValueError on every rank if a rank's environment gives anything but a finite number of at least 0.
    """
    if group.size() == 1 or not takes_messages(tensor, group):
        return 0.0
    if group not in _round_trips:
        _round_trips[group] = _agreed_s(group, between or group)
    return _round_trips[group]


def has_delay(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether a group's links have a delay for such tensors. For its place see round_trip_s."""
    return round_trip_s(tensor, group) >= MIN_DELAY_S


def _agreed_s(group: dist.ProcessGroup, timed: dist.ProcessGroup) -> float:
    given = _largest(_given_s(), group)
    if not given < math.inf:
        raise ValueError(
            f"{GIVEN} must be a finite number of at least 0, but on a rank it is not; on this rank it is "
            f"{described(os.environ.get(GIVEN))}"
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


def _given_s() -> float:
    """Return the given round trip; -1 without one, inf for one that is none."""
    text = os.environ.get(GIVEN)
    if text is None:
        return -1.0
    try:
        seconds = float(text) / 1e3
    except ValueError:
        return math.inf
    return seconds if seconds >= 0 else math.inf


def _measured_s(group: dist.ProcessGroup) -> float:
    """Return the time of the shortest of a few exchanges of a number each."""
    mine, times = torch.zeros(1), []
    with Operation.of("measure the delay of the links", group):
        for _ in range(_SAMPLES):
            received = torch.empty(group.size(), 1)
            begun = time.perf_counter()
            all_gather(received, mine, group).wait()
            times.append(time.perf_counter() - begun)
    return min(times)


def _largest(seconds: float, group: dist.ProcessGroup) -> float:
    what = "agree on the delay of the links"
    return ReducedValues(what, [seconds], [group], torch.device("cpu")).wait()[0]
