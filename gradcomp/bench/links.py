"""Time the collectives that hooks use, by size: what a link's latency and bandwidth are fitted to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from gradcomp.comm.exchange import all_gather, all_to_all
from gradcomp.comm.process_group import resolve_group
from gradcomp.plan.candidates import CollectiveKind
from gradcomp.plan.measurements import KINDS, LinkSample

from .group import Group, synchronize

SIZES_BYTES = (2**12, 2**15, 2**18, 2**21, 2**24, 2**26)
MIN_CALLS, MAX_CALLS = 3, 30
# A larger size is left out when the smaller one took so long, or when no time is left.
LONG_S = 0.5


def link_samples(group: Group, limit_s: float) -> Iterator[LinkSample]:
    """Yield each kind of collective's median time on each size, of the slowest rank. A collective.

    limit_s: for all of them together; every kind has two sizes at least.
    """
    for kind in KINDS:
        deadline = time.perf_counter() + limit_s / len(KINDS)
        for index, size in enumerate(SIZES_BYTES):
            num_bytes = -(-size // (4 * group.world_size)) * 4 * group.world_size
            call = _call(kind, num_bytes, group)
            first_s = _timed(call, 2, group)[-1]
            left_s = deadline - time.perf_counter()
            fair_s = left_s / (len(SIZES_BYTES) - index)
            num_calls = group.agree(min(MAX_CALLS, max(MIN_CALLS, int(fair_s / max(first_s, 1e-6)))))
            seconds = statistics.median(group.slowest(_timed(call, num_calls, group)))
            yield LinkSample(kind, num_bytes, seconds)
            is_over = seconds > LONG_S or time.perf_counter() > deadline
            if group.agree(is_over and index > 0):
                break


def _call(kind: CollectiveKind, num_bytes: int, group: Group) -> Callable[[], object]:
    """Return a call of the collective on a buffer of so many bytes, all ranks' together."""

    def buffer(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=group.device)

    if kind == "all-reduce":
        summed = buffer(num_bytes // 4, dtype=torch.float32)
        return lambda: dist.all_reduce(summed)
    shape = group.world_size, num_bytes // group.world_size
    received = buffer(*shape)
    exchange, sent = (all_to_all, buffer(*shape)) if kind == "all-to-all" else (all_gather, buffer(shape[1]))
    world = resolve_group("python -m gradcomp bench", None)

    def call() -> None:
        pending = exchange(received, sent, world)
        if pending is not None:
            pending.wait()

    return call


def _timed(call: Callable[[], object], num_calls: int, group: Group) -> list[float]:
    """Time calls one by one, all ranks starting together."""
    samples = []
    dist.barrier()
    synchronize(group.device)
    for _ in range(num_calls):
        start = time.perf_counter()
        call()
        synchronize(group.device)
        samples.append(time.perf_counter() - start)
    return samples
