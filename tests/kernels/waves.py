"""Predict how evenly the programs of a launch fill a GPU, for DDP's buckets of real models.

A GPU holds a number of programs at once. Programs start in the order of the grid, each in the first place
that becomes free. A program's cost is its number of elements, and START_NUMEL for its start.
"""

import functools
import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence

from benchmarks import models
from gradcomp.plan import BUCKET_CAP_BYTES

MULTIPROCESSORS = (108, 128, 132, 142)
MAX_WASTE = 1.10
START_NUMEL = 5120  # 20 KB: what the kernels' rows on an H100 lose per program

Shapes = tuple[tuple[int, ...], ...]


def waste(numels: Sequence[int], num_places: int) -> float:
    """Return the time until the last program has ended, over the time if all places ended together."""
    costs = [numel + START_NUMEL for numel in numels]
    ends = [0] * num_places
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends) * num_places / sum(costs)


def times_streaming(numels: Sequence[int], num_places: int) -> float:
    """Return the time until the last program has ended, over the time if no program had to start."""
    return waste(numels, num_places) * sum(numel + START_NUMEL for numel in numels) / sum(numels)


@functools.cache
def full_buckets(model: str) -> dict[Shapes, int]:
    """Return the buckets of 25 MB or more, and how often the model has each."""
    buckets = Counter(tuple(map(tuple, bucket)) for bucket in models.buckets(model))
    return {
        bucket: count
        for bucket, count in buckets.items()
        if sum(map(math.prod, bucket)) * 4 >= BUCKET_CAP_BYTES
    }


def mean_wastes(
    numels_of: Callable[[Shapes, int], Sequence[int]],
    num_resident: int,
    measure: Callable[[Sequence[int], int], float] = waste,
) -> dict[tuple[str, int], float]:
    """Return the mean waste over a model's full buckets, by model and number of multiprocessors.

    numels_of: returns a launch's elements by program, for a bucket and a number of multiprocessors.
    num_resident: programs that a multiprocessor holds.
    measure: what is computed of a launch: waste or times_streaming.
    """
    found = {}
    for model in models.MODELS:
        buckets = full_buckets(model)
        for num_multiprocessors in MULTIPROCESSORS:
            found[model, num_multiprocessors] = sum(
                count * measure(numels_of(bucket, num_multiprocessors), num_resident * num_multiprocessors)
                for bucket, count in buckets.items()
            ) / sum(buckets.values())
    return found
