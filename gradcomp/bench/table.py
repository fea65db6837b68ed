"""What was measured, as text: the link, the step and its parts, every hook beside none, and what to use."""

from __future__ import annotations

import textwrap
from dataclasses import replace

from gradcomp.plan.candidates import candidate_named
from gradcomp.plan.measurements import Measurements
from gradcomp.plan.prediction import step_work
from gradcomp.plan.recommendation import LEAST_HEADROOM, SOURCE, accuracy_cost, recommend, sentences
from gradcomp.plan.show import WIDTH, aligned, bandwidth, seconds

from .steps import NOOP


def table(read: Measurements, max_loss: float) -> str:
    """Return everything in lines of text."""
    none_s, noop_s = read.step_s("none"), read.step_s(NOOP)
    assert none_s is not None
    assert noop_s is not None
    rows = [["hook", "step", "p20", "p80", "steps", "× none", "own work", "loss, nats"]]
    for hook in read.hooks:
        cost = None if hook.name == NOOP else accuracy_cost(candidate_named(hook.name))
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
            f"measured {read.date_utc}: {read.world_size} ranks on {read.device}, {read.backend}, "
            f"{read.num_threads} threads each",
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


def _links(read: Measurements) -> list[str]:
    """Return a line for each kind of collective."""
    return [
        f"link     {kind}: {bandwidth(rate.bytes_per_s)} per rank, {rate.latency_s * 1e6:.0f} µs per message"
        for kind, rate in read.fitted_link().measured.items()
    ]


def recommendation(read: Measurements, max_loss: float) -> str:
    """Return which hook to use by the measured steps, in words."""
    noop_s = read.step_s(NOOP)
    assert noop_s is not None
    hooks = [candidate_named(each.name) for each in read.hooks if each.name != NOOP]
    buckets, link = read.buckets(), read.fitted_link()
    device, compute = read.measured_device(), read.compute()
    steps = {}
    for hook in hooks:
        work = step_work(buckets, hook, read.world_size, device, read.torch_dtype)
        measured_s = read.step_s(hook.name)
        assert measured_s is not None
        steps[hook.name] = replace(work.on(link, compute), step_s=measured_s)
    return sentences(recommend(steps, noop_s, hooks, max_loss), steps, hooks, max_loss)
