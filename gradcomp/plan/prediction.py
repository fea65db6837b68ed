"""Predict the time of a training step with a hook, from constants: nothing here measures anything.

The timeline of a step: when buckets are ready, and what backward hides of averaging them.

On a GPU, with a side stream:

    backward      ───bucket 0───│───bucket 1───│──────bucket 2──────│
    side stream                 └ compress, communicate │ └ … │     └ compress, communicate │

On a CPU, where hooks compress on backward's thread:

    backward      ───bucket 0───│ compress │───bucket 1───│ compress │──────bucket 2──────│ compress │
    network                                └ communicate ──────────│ └ communicate │                 └ …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from .candidates import Candidate, Payload
from .hardware import Device, Link, sent_bytes
from .models import Bucket


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


@dataclass(frozen=True)
class Compute:
    """The times of a step's parts without any communication, in seconds."""

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True)
class StepPrediction:
    """What is predicted of a step with a hook.

    handed_bytes: what a rank hands to collectives, counted as those of all-reduces that send as much (the
    count of docs/accuracy.md). sent_bytes: what it sends, in a ring or to every other rank. local_s: the
    hook's own work. communication_s: its collectives. hidden_s: how much of these two runs beside backward
    without making the step longer. step_s: the whole step.
    """

    hook: str
    world_size: int
    handed_bytes: float
    sent_bytes: float
    local_s: float
    communication_s: float
    hidden_s: float
    step_s: float


@dataclass(frozen=True)
class StepWork:
    """What a hook does in a step, bucket by bucket, whatever the link.

    ready_at: as the buckets'. local_s: its own work. is_inline: as the device's.
    """

    hook: str
    world_size: int
    ready_at: tuple[float, ...]
    payloads: tuple[Payload, ...]
    local_s: tuple[float, ...]
    is_inline: bool

    @cached_property
    def handed_bytes(self) -> float:
        return sum(payload.handed_bytes for payload in self.payloads)

    @cached_property
    def sent_bytes(self) -> float:
        collectives = (each for payload in self.payloads for each in payload.collectives)
        return sum(sent_bytes(each, self.world_size) for each in collectives)

    @cached_property
    def _distinct(self) -> tuple[list[Payload], list[int]]:
        """The different payloads, few as models repeat their layers, and the index of each bucket's."""
        order = {payload: index for index, payload in enumerate(dict.fromkeys(self.payloads))}
        return list(order), [order[payload] for payload in self.payloads]

    def on(self, link: Link, compute: Compute) -> StepPrediction:
        """Return the prediction for a link."""
        distinct, indices = self._distinct
        seconds = [
            sum(link.seconds(each, self.world_size) for each in payload.collectives) for payload in distinct
        ]
        communication = [seconds[index] for index in indices]
        times = [
            BucketTimes(ready_at * compute.backward_s, local_s, communication_s)
            for ready_at, local_s, communication_s in zip(
                self.ready_at, self.local_s, communication, strict=True
            )
        ]
        end = end_of_backward(times, compute.backward_s, is_inline=self.is_inline)
        added_s = sum(self.local_s) + sum(communication)
        return StepPrediction(
            self.hook,
            self.world_size,
            handed_bytes=self.handed_bytes,
            sent_bytes=self.sent_bytes,
            local_s=sum(self.local_s),
            communication_s=sum(communication),
            hidden_s=max(0.0, added_s - (end - compute.backward_s)),
            step_s=compute.forward_s + end + compute.optimizer_s,
        )


def step_work(
    buckets: Sequence[Bucket],
    hook: Candidate,
    world_size: int,
    device: Device,
    dtype: torch.dtype,
) -> StepWork:
    """Return what a hook does in a step. Arguments and errors: see predict_step."""
    if world_size < 1:
        raise ValueError(f"a step of {world_size} ranks can't be predicted: there has to be one at least")
    payloads = tuple(hook.payload(bucket.shapes, dtype, world_size) for bucket in buckets)
    pairs = zip(payloads, buckets, strict=True)
    return StepWork(
        hook.name,
        world_size,
        tuple(bucket.ready_at for bucket in buckets),
        payloads,
        tuple(device.local_s(hook, payload, bucket.numel) for payload, bucket in pairs),
        device.is_inline,
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
    """Predict a step of DDP with a hook, once it compresses, on world_size ranks. buckets: from buckets_of.

    Raises ValueError for fewer than one rank, and for a hook that hasn't been timed on a measured device.
    """
    return step_work(buckets, hook, world_size, device, dtype).on(link, compute)
