"""What gradcomp.plan predicts of the measured steps, from those of one host and of no communication.

A hook's own work is what a step of one host takes with it more than with noop_hook, in proportion to the
bytes that it moves on as many hosts (one host quantizes all of the mean, each of two a half). The rest of a
step is that of noop_hook on as many hosts, and the link is fitted to the all-reduces timed on it. Nothing is
fitted to the steps that are predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.network.report import Row, of
from benchmarks.network.workloads import WORKLOADS
from gradcomp.plan import (
    CANDIDATES,
    Bucket,
    Compute,
    Link,
    MeasuredDevice,
    buckets_of,
    fitted_rate,
    predict_step,
)


@dataclass(frozen=True)
class Compared:
    """One row's step, in ms."""

    hosts: int
    mbit_per_s: int
    model: str
    hook: str
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """How much longer the prediction is, as a part of the measured time."""
        return self.predicted_ms / self.measured_ms - 1


def compare(rows: Sequence[Row]) -> list[Compared]:
    """Predict the steps of gradcomp's hooks on torch's DDP, with one rank per host, that rows allow for."""
    sound = [row for row in rows if "failed" not in row and row.get("ranks_per_host", 1) == 1]
    stepped = of(sound, job="steps", hooks="gradcomp", wrapper="torch")
    found = []
    for row in stepped:
        hosts, link, model, hook = row["hosts"], row["mbit_per_s"], row["model"], row["hook"]
        alone = of(stepped, hosts=1, model=model)
        idle = of(stepped, hosts=hosts, model=model, hook="noop")
        timed = of(sound, job="link", hosts=hosts, mbit_per_s=link)
        if (
            hosts == 1
            or hook == "noop"
            or not (of(alone, hook="noop") and of(alone, hook=hook) and idle and timed)
        ):
            continue
        buckets = _buckets(model)
        rate = fitted_rate("all-reduce", hosts, timed[0]["all_reduce_seconds"])
        (without, *_), (with_hook, *_) = of(alone, hook="noop"), of(alone, hook=hook)
        compute = Compute(
            *(statistics.median(each[part] for each in idle) / 1e3 for part in ("forward_ms", "backward_ms")),
            statistics.median(each["optimizer_ms"] for each in idle) / 1e3,
        )
        # Hosts that share cores compute as much more slowly as they do without communication.
        slower = compute.step_s * 1e3 / without["step_ms"]
        local_s = max(0.0, with_hook["step_ms"] - without["step_ms"]) / 1e3 * slower
        moved_alone, moved = (
            sum(CANDIDATES[hook].payload(each.shapes, torch.float32, ranks).moved_bytes for each in buckets)
            for ranks in (1, hosts)
        )
        if moved_alone:
            local_s *= moved / moved_alone
        device = MeasuredDevice("cpu", {hook: local_s * 1e9 / sum(bucket.numel for bucket in buckets)})
        prediction = predict_step(
            buckets, CANDIDATES[hook], Link(rate.bytes_per_s, rate.latency_s), hosts, compute, device
        )
        found.append(Compared(hosts, link, model, hook, prediction.step_s * 1e3, row["step_ms"]))
    return found


@cache
def _buckets(model: str) -> list[Bucket]:
    return buckets_of([tuple(parameter.shape) for parameter in WORKLOADS[model](0, 1).net.parameters()])


def table(compared: Sequence[Compared]) -> str:
    """Format predicted beside measured times, a line per model, hosts and hook, as Markdown."""
    links = sorted({each.mbit_per_s for each in compared})
    lines = ["| predicted / measured, ms | " + " | ".join(f"{link:,} Mbit/s" for link in links) + " |"]
    lines.append("|" + "---|" * (len(links) + 1))
    for key in dict.fromkeys((each.model, each.hosts, each.hook) for each in compared):
        cells = [
            "".join(
                f"{each.predicted_ms:.1f} / {each.measured_ms:.1f}"
                for each in compared
                if (each.model, each.hosts, each.hook, each.mbit_per_s) == (*key, link)
            )
            for link in links
        ]
        lines.append(f"| {key[0]}, {key[1]} hosts, {key[2]} | " + " | ".join(cells) + " |")
    errors = sorted(abs(each.error) for each in compared)
    median, within = statistics.median(errors), errors[round(0.9 * (len(errors) - 1))]
    lines += [
        "",
        f"{len(errors)} steps: the prediction is off by {median:.0%} (median), by at most {within:.0%} for "
        f"nine of ten, by {errors[-1]:.0%} at worst.",
    ]
    return "\n".join(lines)
