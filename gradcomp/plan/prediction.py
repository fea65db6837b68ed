"""Predict the time of a training step with a hook, from constants. Nothing is measured.

A step's timeline says when buckets are ready, and how much of their averaging runs beside backward.

On a GPU, with a side stream:

    backward      ───bucket 0───│───bucket 1───│──────bucket 2──────│
    side stream                 └ compress, communicate │ └ … │     └ compress, communicate │

On a CPU, where hooks compress on backward's thread:

    backward      ───bucket 0───│ compress │───bucket 1───│ compress │──────bucket 2──────│ compress │
    network                                └ first collective ────│ └ first collective │           └ …, others
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from .candidates import Candidate, Payload
from .hardware import Device, Link, sent_bytes
from .models import Bucket

# gloo's own collectives that run at the same time.
GLOO_THREADS = 2


class BucketTimes(NamedTuple):
    """The times of one bucket.

    ready_s: the time after backward's start at which the bucket is ready, if backward alone runs.
    local_s: the hook's own work.
    collectives_s: of each of the hook's collectives, Link.parts_s.
    is_ring: whether the collectives are the back end's own all-reduces.
    """

    ready_s: float
    local_s: float
    collectives_s: tuple[tuple[float, float], ...]
    is_ring: bool = False

    @property
    def communication_s(self) -> float:
        return sum(map(sum, self.collectives_s))


def end_of_backward(buckets: Sequence[BucketTimes], backward_s: float, *, is_inline: bool) -> float:
    """Return the time from backward's start until every bucket is averaged.

    is_inline: whether hooks compress on backward's thread. Then only a bucket's first collective runs beside
        backward. All others begin after backward, the oldest bucket first. Bytes of different collectives
        follow one another on the link, but latencies pass at the same time. Only gloo's own all-reduces wait
        for one another, on GLOO_THREADS threads.

    Otherwise buckets are compressed and sent beside backward, one after another. Compressing takes the device
    from backward, so buckets that aren't ready yet become ready later by as much time.
    """
    if is_inline:
        compressed_at = accumulate(each.local_s for each in buckets)
        # When each bucket's next collective may begin.
        ready = [each.ready_s + local_s for each, local_s in zip(buckets, compressed_at, strict=True)]
        end_s = backward_s + sum(each.local_s for each in buckets)
        sent_at = 0.0
        for stage in range(max((len(each.collectives_s) for each in buckets), default=0)):
            for index, each in enumerate(buckets):
                for latency_s, transfer_s in each.collectives_s[stage : stage + 1]:
                    start = max(ready[index], end_s if stage else 0.0)
                    if each.is_ring and index >= GLOO_THREADS:
                        start = max(start, ready[index - GLOO_THREADS])
                    sent_at = max(start, sent_at) + transfer_s
                    ready[index] = sent_at + latency_s
        return max([end_s, *ready])
    taken = idle_at = 0.0
    starts: list[float] = []
    num_taken = 0

    def delayed(time: float) -> float:
        """Return when backward, slowed by hooks, gets as far as backward alone gets at this time."""
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


@dataclass(frozen=True)
class Compute:
    """The times of a step's parts, in seconds, without communication."""

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True)
class StepPrediction:
    """The prediction for a step with a hook.

    collective_bytes: bytes that a rank hands to collectives, counted as in docs/accuracy.md; see Payload.
    sent_bytes: bytes that a rank sends, in a ring or to every other rank.
    local_s: the hook's own work.
    communication_s: the hook's collectives.
    hidden_s: the part of local_s and communication_s that doesn't make the step longer.
    step_s: the whole step.
    leaving_bytes: bytes that leave a node. If every rank is a node of its own: sent_bytes.
    """

    hook: str
    world_size: int
    collective_bytes: float
    sent_bytes: float
    local_s: float
    communication_s: float
    hidden_s: float
    step_s: float
    leaving_bytes: float = 0.0


@dataclass(frozen=True)
class StepWork:
    """A hook's work in a step. Of the link it depends on the nodes, and on whether there is a delay.

    ready_at, payloads, local_s: one value per bucket. local_s is the hook's own work.
    is_inline: whether the device compresses on backward's thread.
    ranks_per_node: must be the link's.
    """

    hook: str
    world_size: int
    ready_at: tuple[float, ...]
    payloads: tuple[Payload, ...]
    local_s: tuple[float, ...]
    is_inline: bool
    ranks_per_node: int = 1

    @cached_property
    def collective_bytes(self) -> float:
        return sum(payload.collective_bytes for payload in self.payloads)

    @cached_property
    def sent_bytes(self) -> float:
        collectives = (each for payload in self.payloads for each in payload.collectives)
        return sum(sent_bytes(each, self.world_size, self.ranks_per_node) for each in collectives)

    @cached_property
    def _distinct(self) -> tuple[list[Payload], list[int]]:
        """The different payloads, and each bucket's index into them. Models repeat layers, so few differ."""
        order = {payload: index for index, payload in enumerate(dict.fromkeys(self.payloads))}
        return list(order), [order[payload] for payload in self.payloads]

    def on(self, link: Link, compute: Compute) -> StepPrediction:
        """Predict the step on a link."""
        assert link.nodes.ranks == self.ranks_per_node
        distinct, indices = self._distinct
        parts = [
            tuple(link.parts_s(each, self.world_size) for each in payload.collectives) for payload in distinct
        ]
        leaving = [
            sum(link.leaving_bytes(each, self.world_size) for each in payload.collectives)
            for payload in distinct
        ]
        is_ring = [all(each.kind == "all-reduce" for each in payload.collectives) for payload in distinct]
        times = [
            BucketTimes(ready_at * compute.backward_s, local_s, parts[index], is_ring[index])
            for ready_at, local_s, index in zip(self.ready_at, self.local_s, indices, strict=True)
        ]
        end = end_of_backward(times, compute.backward_s, is_inline=self.is_inline)
        communication_s = sum(each.communication_s for each in times)
        added_s = sum(self.local_s) + communication_s
        return StepPrediction(
            self.hook,
            self.world_size,
            collective_bytes=self.collective_bytes,
            sent_bytes=self.sent_bytes,
            local_s=sum(self.local_s),
            communication_s=communication_s,
            hidden_s=max(0.0, added_s - (end - compute.backward_s)),
            step_s=compute.forward_s + end + compute.optimizer_s,
            leaving_bytes=sum(leaving[index] for index in indices),
        )


def step_work(
    buckets: Sequence[Bucket],
    hook: Candidate,
    link: Link,
    world_size: int,
    device: Device,
    dtype: torch.dtype,
) -> StepWork:
    """Return a hook's work in a step. Arguments and errors: see predict_step."""
    if world_size < 1:
        raise ValueError(f"a step of {world_size} ranks can't be predicted: at least one is needed")
    link.num_nodes(world_size)  # raises for ranks that aren't whole nodes
    per_node = link.nodes.ranks
    on_link = {"by_messages": link.gathers_by_messages, "has_delay": link.has_delay}
    payloads = tuple(
        hook.payload(bucket.shapes, dtype, world_size, per_node, **on_link) for bucket in buckets
    )
    pairs = zip(payloads, buckets, strict=True)
    return StepWork(
        hook.name,
        world_size,
        tuple(bucket.ready_at for bucket in buckets),
        payloads,
        tuple(device.local_s(hook, payload, bucket.numel) for payload, bucket in pairs),
        device.is_inline,
        per_node,
    )


def predict_step(
    buckets: Sequence[Bucket],
    hook: Candidate,
    link: Link,
    world_size: int,
    compute: Compute,
    device: Device,
    *,
    dtype: torch.dtype = torch.float32,
) -> StepPrediction:
    """Predict a step of DDP on world_size ranks, with a hook that compresses already.

    buckets: from buckets_of.
    link: with its nodes, if several ranks share a network card.
    dtype: the gradients' dtype.

    Raises ValueError for fewer than one rank, for ranks that aren't whole nodes, and for a hook without a
    measured time on a measured device.
    """
    return step_work(buckets, hook, link, world_size, device, dtype).on(link, compute)
