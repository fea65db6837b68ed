"""One step's timeline: when buckets are ready, and what backward hides of averaging them.

On a GPU, with a side stream:

    backward      ───bucket 0───│───bucket 1───│──────bucket 2──────│
    side stream                 └ compress, communicate │ └ … │     └ compress, communicate │

On a CPU, where hooks compress on backward's thread:

    backward      ───bucket 0───│ compress │───bucket 1───│ compress │──────bucket 2──────│ compress │
    network                                └ communicate ──────────│ └ communicate │                 └ …
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class BucketTimes(NamedTuple):
    """When backward alone would have a bucket ready, and how long its own work and its collectives take."""

    ready_s: float
    local_s: float
    communication_s: float


def end_of_backward(buckets: Sequence[BucketTimes], backward_s: float, *, is_inline: bool) -> float:
    """Return the time from backward's start until every bucket is averaged.

    is_inline: hooks compress on backward's thread, and only collectives run beside it. Otherwise buckets are
    compressed and sent beside backward, one after another, in their order. The hook's own work takes the
    device from backward: what starts before a bucket is ready makes that bucket as much later.
    """
    if is_inline:
        compressed_at = sent_at = 0.0
        for each in buckets:
            compressed_at += each.local_s
            sent_at = max(each.ready_s + compressed_at, sent_at) + each.communication_s
        return max(backward_s + compressed_at, sent_at)
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
