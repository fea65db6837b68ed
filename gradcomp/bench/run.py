"""Measure links and a model's step with every hook; format the results as a table."""

from __future__ import annotations

import datetime
import math
import platform
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton

from gradcomp.command_line import aligned, shown_seconds
from gradcomp.compress.announcement import shown_bytes
from gradcomp.device import has_streams
from gradcomp.hooks.named_hooks import NamedHook, forms_of
from gradcomp.plan.collectives import Network, traffic
from gradcomp.plan.models import Shape, buckets_of

from .group import Group, LinkSample, link_samples
from .recommendation import LEAST_HEADROOM, SOURCE, recommendation
from .steps import NOOP, HookTime, Trainer, hook_times
from .workloads import Workload

WIDTH = 120  # of sentences
# Where an all-reduce takes place, for behind its name.
WHERE = {"all": " of all ranks", "within": " within a node", "between": " between nodes"}


@dataclass(frozen=True)
class Measurements:
    """Measurements of one model on one cluster.

    dtype, shapes: of the parameters with gradients; shapes in registration order.
    round_trip_s: the time from a message to its answer between ranks (nodes), as hooks find it; 0 where ranks
        exchange no messages themselves, such as on NCCL.
    ranks_per_node: the number of ranks on every node, if there were several nodes of several ranks; else 1.
    """

    date_utc: str
    device: str
    backend: str
    world_size: int
    ranks_per_node: int
    num_threads: int
    versions: dict[str, str]
    model: str
    dtype: str
    shapes: list[list[int]]
    bucket_cap_mb: float
    round_trip_s: float
    link: list[LinkSample]
    hooks: list[HookTime]


class Progress:
    """Progress on rank 0's standard error: one line that is rewritten on a terminal, else a line per text."""

    def __init__(self, is_shown: bool):
        self._is_shown, self._is_terminal = is_shown, sys.stderr.isatty()
        self._start = time.monotonic()

    def show(self, text: str) -> None:
        line = f"[{time.monotonic() - self._start:4.0f} s] {text}"
        self._write(f"\r{line}\x1b[K" if self._is_terminal else f"{line}\n")

    def done(self) -> None:
        self._write("\r\x1b[K" if self._is_terminal else "")

    def _write(self, text: str) -> None:
        if self._is_shown:
            print(text, end="", file=sys.stderr, flush=True)


def measure(
    workload: Workload, group: Group, hooks: Sequence[NamedHook], seconds: float, bucket_cap_mb: float
) -> Measurements:
    """Measure everything. A collective.

    hooks: "none" among them, without NOOP. With nodes, hooks are measured flat and hierarchical.
    seconds: the time of steps with each hook.
    """
    progress = Progress(group.rank == 0)
    progress.show(f"{group.world_size} ranks, {group.backend}: links")
    round_trip_s, link = group.round_trip_s(), []
    for sample in link_samples(group):
        progress.show(f"links: {_shown(sample, has_nodes=group.nodes is not None)}")
        link.append(sample)
    is_gloo = group.backend == "gloo"
    forms = list(forms_of(hooks, has_nodes=group.nodes is not None, is_gloo=is_gloo))
    trainer = Trainer(workload, group, bucket_cap_mb)
    samples = hook_times(trainer, [NOOP, *(form.name for form in forms)], seconds, progress.show)
    progress.done()
    shapes: list[Shape] = [tuple(each.shape) for each in workload.parameters]
    dtype = workload.parameters[0].dtype
    buckets = buckets_of(shapes, dtype.itemsize, bucket_cap_mb * 2**20)
    network = Network(
        group.world_size,
        round_trip_s=round_trip_s,
        ranks_per_node=group.ranks_per_node,
        backend="gloo" if is_gloo else "nccl",
    )
    handed = {form.name: traffic(buckets, form, network, dtype).collective_bytes for form in forms}
    cpu = f"{platform.machine()} CPU with {torch.backends.cpu.get_cpu_capability()}"
    return Measurements(
        date_utc=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        device=torch.cuda.get_device_name(group.device) if has_streams(group.device) else cpu,
        backend=group.backend,
        world_size=group.world_size,
        ranks_per_node=group.ranks_per_node,
        num_threads=torch.get_num_threads(),
        versions={
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        model=workload.name,
        dtype=str(dtype).removeprefix("torch."),
        shapes=[list(shape) for shape in shapes],
        bucket_cap_mb=bucket_cap_mb,
        round_trip_s=round_trip_s,
        link=link,
        hooks=[HookTime.of(name, each, handed.get(name, 0.0)) for name, each in samples.items()],
    )


def table(found: Measurements, max_loss: float) -> str:
    """Format measurements: the links, the step with every hook beside none, and the hook to use."""
    steps = {hook.name: hook for hook in found.hooks}
    none_s, noop_s = steps["none"].step_p50_s, steps[NOOP].step_p50_s
    rows = [["hook", "step", "p20", "p80", "steps", "× none", "loss, nats"]]
    for hook in found.hooks:
        cost = None if hook.name == NOOP else NamedHook.form_named(hook.name).cost
        without = "averages nothing: for timing only"
        rows.append(
            [
                hook.name,
                *map(shown_seconds, (hook.step_p50_s, hook.step_p20_s, hook.step_p80_s)),
                str(hook.num_steps),
                f"{none_s / hook.step_p50_s:.2f}",
                without if hook.name == NOOP else "not measured" if cost is None else str(cost),
            ]
        )
    per_node, numel = found.ranks_per_node, sum(map(math.prod, found.shapes))
    nodes = "" if per_node == 1 else f", {found.world_size // per_node} nodes of {per_node} ranks"
    return "\n".join(
        [
            f"measured {found.date_utc}: {found.world_size} ranks on {found.device}, {found.backend}{nodes}, "
            f"{found.num_threads} threads each",
            f"model    {found.model}: {numel:,} parameters, gradients in {found.dtype}",
            *_links(found),
            "",
            *aligned(rows),
            "",
            f"step: median, the slowest rank's. Headroom, 1 − noop / none: {1 - noop_s / none_s:.0%}; under "
            f"{LEAST_HEADROOM:.0%} communication is not your bottleneck.",
            textwrap.fill(f"loss: {SOURCE}", WIDTH),
            "",
            textwrap.fill(recommendation(found.hooks, max_loss), WIDTH),
        ]
    )


def _links(found: Measurements) -> Iterator[str]:
    """Yield a line on the delay, then one per group, with its smallest and its largest all-reduce."""
    has_nodes = found.ranks_per_node > 1
    if found.round_trip_s:
        peers = "nodes" if has_nodes else "ranks"
        yield f"delay    a message and its answer take {shown_seconds(found.round_trip_s)} between {peers}"
    for group in dict.fromkeys(each.group for each in found.link):
        samples = [each for each in found.link if each.group == group]
        smallest, largest = samples[0], samples[-1]
        size = f"{shown_bytes(largest.num_bytes)} in {shown_seconds(largest.seconds)}"
        yield f"link     {_shown(smallest, has_nodes=has_nodes)}, {size}"


def _shown(sample: LinkSample, *, has_nodes: bool) -> str:
    where = WHERE[sample.group] if has_nodes else ""
    return f"all-reduce{where}: {shown_bytes(sample.num_bytes)} in {shown_seconds(sample.seconds)}"
