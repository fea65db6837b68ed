"""A model on a device, whose steps can be predicted on any link and number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .candidates import Candidate
from .hardware import Device, Link
from .models import Bucket
from .prediction import Compute, StepPrediction, StepWork, step_work
from .recommendation import Recommendation, eligible, recommend


@dataclass(frozen=True)
class Scenario:
    """What stays the same when the link and the number of ranks change.

    hooks: those compared, "none" among them. compute_source, cost_source: where the times of the model and
    of the hooks' own work come from, in words. max_loss: in nats, what a recommended hook may cost.
    """

    model: str
    buckets: tuple[Bucket, ...]
    dtype: torch.dtype
    device: Device
    backend: str
    compute: Compute
    hooks: tuple[Candidate, ...]
    max_loss: float
    compute_source: str
    cost_source: str

    @property
    def numel(self) -> int:
        return sum(bucket.numel for bucket in self.buckets)

    def predict(self, link: Link, world_size: int) -> dict[str, StepPrediction]:
        """Return the prediction of every hook, by its name."""
        return {work.hook: work.on(link, self.compute) for work in self._work(world_size)}

    def recommend(self, link: Link, world_size: int) -> Recommendation:
        return self._recommend(link, self._work(world_size))

    def sweep(
        self, link: Link, bandwidths: Sequence[float], world_sizes: Sequence[int]
    ) -> list[list[Recommendation]]:
        """Return recommendations by world size, and in each row by bandwidth in bytes/s.

        link: the other properties of the links; what was measured of single collectives doesn't count.
        """
        links = [replace(link, bytes_per_s=bandwidth, measured={}) for bandwidth in bandwidths]
        allowed = eligible(self.hooks, self.max_loss)
        works = (self._work(world_size, allowed) for world_size in world_sizes)
        return [[self._recommend(each, work) for each in links] for work in works]

    def _work(self, world_size: int, hooks: Sequence[Candidate] = ()) -> list[StepWork]:
        """Return what hooks do, by default all of the scenario."""
        compared = hooks or self.hooks
        return [step_work(self.buckets, hook, world_size, self.device, self.dtype) for hook in compared]

    def _recommend(self, link: Link, work: Sequence[StepWork]) -> Recommendation:
        predictions = {each.hook: each.on(link, self.compute) for each in work}
        return recommend(predictions, self.compute.step_s, self.hooks, self.max_loss)
