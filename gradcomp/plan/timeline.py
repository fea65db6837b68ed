"""One step's timeline: when buckets are ready, and what backward hides of averaging them.

backward   ───bucket 0───│───bucket 1───│──────bucket 2──────│
overlap                  └ compress, communicate │ └ … │     └ compress, communicate │
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class BucketTimes(NamedTuple):
    """Of one bucket: when backward alone would have it ready, the hook's own work, and its collectives."""

    ready_s: float
    local_s: float
    communication_s: float


def end_of_backward(buckets: Sequence[BucketTimes], backward_s: float, *, overlaps: bool) -> float:
    """Return the time from backward's start until every bucket is averaged.

    overlaps: buckets are compressed and sent beside backward, one after another, in their order. The hook's
    own work takes the device from backward: what starts before a bucket is ready makes that bucket as much
    later. Otherwise backward waits for each bucket.
    """
    if not overlaps:
        return backward_s + sum(each.local_s + each.communication_s for each in buckets)
    taken = idle_at = 0.0
    starts: list[float] = []
    num_taken = 0

    def delayed(time: float) -> float:
        """Return when backward gets as far as it would by itself at this time."""
        nonlocal taken, num_taken
        while num_taken < len(starts) and starts[num_taken] < time + taken:
            taken += buckets[num_taken].local_s
            num_taken += 1
        return time + taken

    for each in buckets:
        start = max(delayed(each.ready_s), idle_at)
        starts.append(start)
        idle_at = start + each.local_s + each.communication_s
    return max(delayed(backward_s), idle_at)
