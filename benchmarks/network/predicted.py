"""Predict the measured steps with gradcomp.plan, from steps of one rank and steps without communication.

A hook's own work is the time of one rank's step with the hook, minus the step with noop_hook. It grows with
the bytes that the hook moves: one rank quantizes the whole mean, each of two ranks a half. The other parts of
a step are measured with noop_hook, on as many ranks. The link is fitted to all-reduces that were timed on it:
of all ranks, and within a host. No predicted step is used.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from benchmarks.network.report import Row, in_order, link_title, of
from benchmarks.network.workloads import WORKLOADS
from gradcomp.plan import (
    CANDIDATES,
    Bucket,
    Compute,
    Link,
    MeasuredDevice,
    Nodes,
    Rate,
    buckets_of,
    fitted_rate,
    predict_step,
)
from gradcomp.plan.candidates import Collective, Group

FLAT = ":flat"  # the end of a hook's name


@dataclass(frozen=True)
class Compared:
    """One row's step, in ms."""

    hosts: int
    ranks_per_host: int
    mbit_per_s: int
    model: str
    hook: str
    predicted_ms: float
    measured_ms: float
    delay_ms: float | None = None

    @property
    def error(self) -> float:
        """How much longer the prediction is, as a part of the measured time."""
        return self.predicted_ms / self.measured_ms - 1


def compare(rows: Sequence[Row]) -> list[Compared]:
    """Predict the steps of gradcomp's hooks on torch's DDP that rows allow for."""
    sound = [{"ranks_per_host": 1, "delay_ms": None, **row} for row in rows if "failed" not in row]
    stepped = _medians(of(sound, job="steps", hooks="gradcomp", wrapper="torch"))
    found = []
    for row in stepped:
        hosts, per_host, link = row["hosts"], row["ranks_per_host"], row["mbit_per_s"]
        model, name = row["model"], row["hook"]
        flat_name = name.removesuffix(FLAT)
        alone = of(stepped, hosts=1, ranks_per_host=1, model=model)
        without, with_hook = (of(alone, hook=each) for each in ("noop", flat_name))
        idle = of(stepped, hosts=hosts, ranks_per_host=per_host, model=model, hook="noop")
        delay_ms = row["delay_ms"]
        place = {"hosts": hosts, "ranks_per_host": per_host, "mbit_per_s": link, "delay_ms": delay_ms}
        timed = of(sound, job="link", **place)
        is_known = flat_name in CANDIDATES and name != "noop"
        if hosts == 1 or not (is_known and without and with_hook and idle and timed):
            continue
        compute = Compute(
            *(statistics.median(each[part] for each in idle) / 1e3 for part in ("forward_ms", "backward_ms")),
            statistics.median(each["optimizer_ms"] for each in idle) / 1e3,
        )
        buckets, hook, world_size = _buckets(model), CANDIDATES[flat_name], hosts * per_host
        # Ranks that share cores compute as much more slowly as they do without communication.
        slower = compute.step_s * 1e3 / without[0]["step_ms"]
        local_s = max(0.0, with_hook[0]["step_ms"] - without[0]["step_ms"]) / 1e3 * slower
        moved_alone, moved = (
            sum(hook.payload(each.shapes, torch.float32, ranks).moved_bytes for each in buckets)
            for ranks in (1, world_size)
        )
        if moved_alone:
            local_s *= moved / moved_alone
        device = MeasuredDevice("cpu", {flat_name: local_s * 1e9 / sum(bucket.numel for bucket in buckets)})
        has_form = per_host > 1 and hook.has_form_by_nodes(is_gloo=True)
        is_by_nodes = has_form and not name.endswith(FLAT)
        prediction = predict_step(
            buckets,
            hook.by_nodes() if is_by_nodes else hook,
            _fitted_link(timed[0], hosts, per_host),
            world_size,
            compute,
            device,
        )
        predicted_ms = prediction.step_s * 1e3
        found.append(Compared(hosts, per_host, link, model, name, predicted_ms, row["step_ms"], delay_ms))
    return found


def _medians(stepped: Sequence[Row]) -> list[Row]:
    """Return one row for the runs of a hook, with medians of its times."""
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for row in stepped:
        key = ("hosts", "ranks_per_host", "mbit_per_s", "delay_ms", "model", "hook")
        runs.setdefault(tuple(row[each] for each in key), []).append(row)
    parts = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")
    return [
        {**rows[0], **{part: statistics.median(row[part] for row in rows) for part in parts}}
        for rows in runs.values()
    ]


def _fitted_link(timed: Row, hosts: int, per_host: int) -> Link:
    """Fit the network of hosts to a row of the job "link"."""
    unknown = Link(math.inf, 0.0, nodes=Nodes(per_host, math.inf))

    def rate(column: str, group: Group) -> Rate:
        samples = [(Collective("all-reduce", size, group), seconds) for size, seconds in timed[column]]
        return fitted_rate(samples, unknown, hosts * per_host)

    within = rate("within_seconds", "within").bytes_per_s if per_host > 1 else math.inf
    between = rate("all_reduce_seconds", "all")
    nodes = Nodes(per_host, within)
    return Link(between.bytes_per_s, between.latency_s, nodes=nodes, gathers_by_messages=True)


@cache
def _buckets(model: str) -> list[Bucket]:
    workload = WORKLOADS[model](0, 1)
    shapes = [tuple(parameter.shape) for parameter in workload.net.parameters()]
    if workload.bucket_cap_mb is None:
        return buckets_of(shapes)
    return buckets_of(shapes, cap_bytes=workload.bucket_cap_mb * 2**20)


def table(compared: Sequence[Compared]) -> str:
    """Format predicted beside measured times, a line per model, hosts and hook, as Markdown."""
    links = in_order((each.mbit_per_s, each.delay_ms) for each in compared)
    lines = ["| predicted / measured, ms | " + " | ".join(map(link_title, links)) + " |"]
    lines.append("|" + "---|" * (len(links) + 1))
    for key in dict.fromkeys((each.model, each.hosts, each.ranks_per_host, each.hook) for each in compared):
        model, hosts, per_host, hook = key
        cells = [
            "".join(
                f"{each.predicted_ms:.1f} / {each.measured_ms:.1f}"
                for each in compared
                if (each.model, each.hosts, each.ranks_per_host, each.hook) == key
                and (each.mbit_per_s, each.delay_ms) == link
            )
            for link in links
        ]
        ranks = "" if per_host == 1 else f" of {per_host} ranks"
        lines.append(f"| {model}, {hosts} hosts{ranks}, {hook} | " + " | ".join(cells) + " |")
    errors = sorted(abs(each.error) for each in compared)
    median, within = statistics.median(errors), errors[round(0.9 * (len(errors) - 1))]
    lines += [
        "",
        f"{len(errors)} steps: the prediction is off by {median:.0%} (median), by at most {within:.0%} for "
        f"nine of ten, by {errors[-1]:.0%} at worst.",
    ]
    return "\n".join(lines)
