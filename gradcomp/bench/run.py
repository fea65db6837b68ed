"""Measure links, a model's step with every hook, and each hook's own work; format the results as a table."""

from __future__ import annotations

import datetime
import platform
import sys
import textwrap
import time
from dataclasses import dataclass, replace

import torch
import triton

from gradcomp import ops
from gradcomp.comm.delay import MIN_DELAY_S
from gradcomp.compress.accuracy_cost import accuracy_cost
from gradcomp.plan.candidates import candidate_named, form_named
from gradcomp.plan.measurements import DTYPES, FORMAT, NOOP, Measurements
from gradcomp.plan.models import Shape, buckets_of
from gradcomp.plan.prediction import step_work
from gradcomp.plan.recommendation import (
    LEAST_HEADROOM,
    SOURCE,
    forms_of,
    recommend,
    sentences,
)
from gradcomp.plan.show import WIDTH, aligned, bandwidth, seconds

from .group import Group, link_samples
from .local_work import median_s
from .steps import NUM_ROUNDS, Trainer, hook_time, hook_times, step_parts
from .workloads import Workload

# The link and each hook's own work are measured for this part of a hook's `seconds`.
LINK_PART, LOCAL_PART = 2.0, 0.3


class Progress:
    """Progress on rank 0's standard error: one line that is rewritten on a terminal, else a line per text."""

    def __init__(self, is_shown: bool):
        self._is_shown, self._is_terminal = is_shown, sys.stderr.isatty()
        self._start = time.monotonic()

    def show(self, text: str) -> None:
        if self._is_shown:
            line = f"[{time.monotonic() - self._start:4.0f} s] {text}"
            print(
                f"\r{line}\x1b[K" if self._is_terminal else line,
                end="" if self._is_terminal else "\n",
                file=sys.stderr,
                flush=True,
            )

    def done(self) -> None:
        if self._is_shown and self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class BenchOptions:
    """Options of a measurement.

    hooks: by name, without NOOP. With nodes, hooks are measured flat and by nodes.
    seconds: the time of steps with each hook.
    bucket_cap_mb: DDP's option.
    """

    hooks: tuple[str, ...]
    seconds: float
    bucket_cap_mb: float


def dtype_name(workload: Workload) -> str:
    """Return the name of the gradients' dtype. Raises ValueError for several, and for one not in DTYPES."""
    dtypes = {each.dtype for each in workload.parameters}
    names = [name for name, dtype in DTYPES.items() if dtype in dtypes]
    if len(dtypes) > 1 or not names:
        found = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(
            f"model {workload.name!r} has parameters in {found}; they must be in one of {', '.join(DTYPES)}"
        )
    return names[0]


def measure(workload: Workload, group: Group, options: BenchOptions) -> Measurements:
    """Measure everything. A collective."""
    progress = Progress(group.rank == 0)
    progress.show(f"{group.world_size} ranks, {group.backend}: links")
    round_trip_s, link = group.round_trip_s(), []
    for sample in link_samples(group, LINK_PART * options.seconds):
        where = WHERE[sample.group] if group.nodes else ""
        progress.show(
            f"links: {sample.kind}{where} of {sample.num_bytes:,} bytes took {sample.seconds * 1e3:.3f} ms"
        )
        link.append(sample)
    trainer = Trainer(workload, group, options.bucket_cap_mb)
    progress.show("forward, backward and optimizer")
    parts = step_parts(trainer, options.seconds / NUM_ROUNDS)
    has_nodes, is_gloo = group.nodes is not None, group.backend == "gloo"
    forms = forms_of(map(candidate_named, options.hooks), has_nodes=has_nodes, is_gloo=is_gloo)
    names = [NOOP, *(form.name for form in forms)]
    samples = hook_times(trainer, names, options.seconds, progress.show)
    dtype = DTYPES[dtype_name(workload)]
    shapes: list[Shape] = [tuple(each.shape) for each in workload.parameters]
    buckets = buckets_of(shapes, dtype.itemsize, options.bucket_cap_mb * 2**20)
    local_s: dict[str, float | None] = dict.fromkeys(names)
    for name in options.hooks:
        if not candidate_named(name).is_compressing:
            continue
        progress.show(f"own work of {name}")
        own_s = median_s(
            candidate_named(name),
            [bucket.shapes for bucket in buckets],
            dtype,
            group.device,
            group.world_size,
            round_trip_s >= MIN_DELAY_S,
            LOCAL_PART * options.seconds,
        )
        (local_s[name],) = group.slowest([own_s])
    progress.done()
    return Measurements(
        format=FORMAT,
        date_utc=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        device=device_name(group.device),
        device_type=group.device.type,
        backend=group.backend,
        world_size=group.world_size,
        num_threads=torch.get_num_threads(),
        versions={
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        model=workload.name,
        dtype=dtype_name(workload),
        shapes=[list(shape) for shape in shapes],
        bucket_cap_mb=options.bucket_cap_mb,
        # Gradients may be ready in another order than plan assumes: then DDP has other buckets.
        ready_at=parts.ready_at if len(parts.ready_at) == len(buckets) else [],
        forward_s=parts.forward_s,
        backward_s=parts.backward_s,
        optimizer_s=parts.optimizer_s,
        round_trip_s=round_trip_s,
        link=link,
        hooks=[hook_time(name, each, local_s[name]) for name, each in samples.items()],
        ranks_per_node=group.ranks_per_node,
    )


def device_name(device: torch.device) -> str:
    """Describe a device."""
    if ops.has_streams(device):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU with {torch.backends.cpu.get_cpu_capability()}"


def table(read: Measurements, max_loss: float) -> str:
    """Format measurements: the link, the step and its parts, every hook beside none, and the hook to use."""
    none_s, noop_s = read.step_s("none"), read.step_s(NOOP)
    assert none_s is not None
    assert noop_s is not None
    rows = [["hook", "step", "p20", "p80", "steps", "× none", "own work", "loss, nats"]]
    for hook in read.hooks:
        cost = None if hook.name == NOOP else accuracy_cost(form_named(hook.name))
        without = "averages nothing: for timing only"
        rows.append(
            [
                hook.name,
                *map(seconds, (hook.step_p50_s, hook.step_p20_s, hook.step_p80_s)),
                str(hook.num_steps),
                f"{none_s / hook.step_p50_s:.2f}",
                "" if hook.local_s is None else seconds(hook.local_s),
                without if hook.name == NOOP else "not measured" if cost is None else str(cost),
            ]
        )
    return "\n".join(
        [
            f"measured {read.date_utc}: {read.world_size} ranks on {read.device}, {read.backend}"
            f"{_nodes(read)}, {read.num_threads} threads each",
            f"model    {read.model}: {read.numel:,} parameters, gradients in {read.dtype}",
            f"step     forward {seconds(read.forward_s)}, backward {seconds(read.backward_s)}, optimizer "
            f"{seconds(read.optimizer_s)}, without communication",
            *_links(read),
            "",
            *aligned(rows),
            "",
            f"step: median, the slowest rank's. own work: the hook's compression by itself. "
            f"Headroom, 1 − noop / none: {1 - noop_s / none_s:.0%}; under {LEAST_HEADROOM:.0%} communication "
            "is not your bottleneck.",
            textwrap.fill(f"loss: {SOURCE}", WIDTH),
            "",
            textwrap.fill(recommendation(read, max_loss), WIDTH),
        ]
    )


def _nodes(read: Measurements) -> str:
    per_node = read.ranks_per_node
    return "" if per_node == 1 else f", {read.world_size // per_node} nodes of {per_node} ranks"


# Where a collective takes place, for behind its name.
WHERE = {"all": " of all ranks", "within": " within a node", "between": " between nodes"}


def _links(read: Measurements) -> list[str]:
    """Return a line on the delay, and one per collective, with its bandwidth and latency."""
    has_nodes, lines, link = read.ranks_per_node > 1, [], read.fitted_link()
    if read.round_trip_s:
        peers = "nodes" if has_nodes else "ranks"
        lines.append(f"delay    a message and its answer take {seconds(read.round_trip_s)} between {peers}")
    each = "round trip" if link.gathers_by_messages else "message"
    for (kind, group), rate in link.measured.items():
        name = kind + WHERE[group] if has_nodes else kind
        whose = "node" if has_nodes and group != "within" else "rank"
        rates = f"{bandwidth(rate.bytes_per_s)} per {whose}, {seconds(rate.latency_s)} per {each}"
        lines.append(f"link     {name}: {rates}")
    return lines


def recommendation(read: Measurements, max_loss: float) -> str:
    """Return the hook to use, by the measured steps, in words."""
    noop_s = read.step_s(NOOP)
    assert noop_s is not None
    hooks = [form_named(each.name) for each in read.hooks if each.name != NOOP]
    buckets, link = read.buckets(), read.fitted_link()
    device, compute = read.measured_device(), read.compute()
    steps = {}
    for hook in hooks:
        work = step_work(buckets, hook, link, read.world_size, device, read.torch_dtype)
        measured_s = read.step_s(hook.name)
        assert measured_s is not None
        steps[hook.name] = replace(work.on(link, compute), step_s=measured_s)
    found = recommend(steps, noop_s, hooks, max_loss)
    return sentences(found, steps, hooks, max_loss, read.ranks_per_node)
