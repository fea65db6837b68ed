"""Show predictions: as a table of the hooks, as a map in text, as JSON, and as a picture with matplotlib."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradcomp.compress.accuracy_cost import accuracy_cost

from .candidates import Candidate
from .hardware import Link
from .prediction import StepPrediction
from .recommendation import (
    LEAST_HEADROOM,
    SOURCE,
    Recommendation,
    Scenario,
    forms_of,
    has_forms,
    sentences,
    with_16_bits,
)

WIDTH = 120  # of sentences
# The map in text: bits per second, and ranks.
MAP_BANDWIDTHS = (5e7, 1e8, 2e8, 5e8, 1e9, 2.5e9, 1e10, 2.5e10, 5e10, 1e11, 2e11, 4e11)
MAP_WORLD_SIZES = (2, 8, 64, 512, 2048, 10_000)
TESTED = "Hooks whose cost in accuracy was measured at as many bytes saved as here"
UNTESTED = "The same if they cost no more accuracy when they save more bytes than there, which is not tested"


def seconds(value: float) -> str:
    """Format a time with its unit, in three digits."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (10, 1e3, "ms")):
        if value < limit:
            return f"{value * factor:.{1 if value * factor < 99.95 else 0}f} {unit}"
    return f"{value:.1f} s"


def with_prefix(value: float, unit: str) -> str:
    """Format a number of bytes or bits with a decimal prefix."""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def factor(value: float) -> str:
    """Format a factor: 7.1×, 120×."""
    return f"{value:,.{0 if value >= 99.95 else 1}f}×"


def bandwidth(bytes_per_s: float) -> str:
    return with_prefix(8 * bytes_per_s, "bit/s") if math.isfinite(bytes_per_s) else "no limit"


def heading(scenario: Scenario, link: Link, world_size: int) -> list[str]:
    """Return lines on the scenario and the constants of its prediction."""
    compute = scenario.compute
    dtype = str(scenario.dtype).removeprefix("torch.")
    return [
        "Times are PREDICTED from the constants below; nothing is run.",
        f"model    {scenario.model}: {scenario.numel:,} parameters, gradients in {dtype}, "
        f"{len(scenario.buckets)} buckets",
        f"ranks    {world_size} on {scenario.device.name}, {scenario.backend}{_nodes(link, world_size)}",
        *_links(link),
        f"compute  {seconds(compute.step_s)} without communication: forward {seconds(compute.forward_s)}, "
        f"backward {seconds(compute.backward_s)}, optimizer {seconds(compute.optimizer_s)}",
        f"         {scenario.compute_source}",
        f"hooks    {scenario.cost_source}",
    ]


def _nodes(link: Link, world_size: int | None = None) -> str:
    """Return words on the nodes, for behind a backend's name. Nothing if every rank is a node of its own."""
    if link.nodes.ranks == 1:
        return ""
    if world_size is None:
        return f", nodes of {link.nodes.ranks} ranks"
    num_nodes = link.num_nodes(world_size)
    return f", {num_nodes} {_plural(num_nodes, 'node')} of {link.nodes.ranks} ranks"


def _whole_nodes(link: Link, world_sizes: Iterable[int]) -> list[int]:
    """Return numbers of ranks near these that are whole nodes."""
    per_node = link.nodes.ranks
    return sorted({max(1, round(each / per_node)) * per_node for each in world_sizes})


def _links(link: Link) -> list[str]:
    nodes, latency = link.nodes, _latency(link)
    if nodes.ranks == 1:
        return [f"link     {bandwidth(link.bytes_per_s)} per rank, {latency}"]
    cards = f"{nodes.cards} {_plural(nodes.cards, 'network card')}"
    return [
        f"link     {bandwidth(link.bytes_per_s)} per network card, {cards} per node, {latency}",
        f"         {with_prefix(nodes.within_bytes_per_s, 'B/s')} per rank within a node",
    ]


def _latency(link: Link) -> str:
    latency = f"{link.latency_s * 1e6:.3g} µs" if link.latency_s < 1e-3 else seconds(link.latency_s)
    return f"{latency} per {'round trip' if link.gathers_by_messages else 'message'}"


def _plural(number: int, noun: str) -> str:
    return noun if number == 1 else f"{noun}s"


def table(
    scenario: Scenario,
    link: Link,
    world_size: int,
    measured_step_s: Mapping[str, float] | None = None,
) -> str:
    """Format the prediction for every hook, and the recommendation.

    measured_step_s: by hook, measured step times, for a column of their own.
    """
    predictions, hooks = scenario.predict(link, world_size), scenario.forms(link, world_size)
    # What "fewer" compares: a node's bytes, where several ranks share its network cards.
    is_shared = link.nodes.ranks > 1 and link.num_nodes(world_size) > 1

    def counted(prediction: StepPrediction) -> float:
        return prediction.leaving_bytes if is_shared else prediction.collective_bytes

    none, reference = predictions["none"], with_16_bits(predictions)
    rows = [["hook", "node sends" if is_shared else "sent/step", "fewer"]]
    rows[0] += [f"than {reference.hook}"] if reference else []
    rows[0] += ["own work", "collectives", "hidden", "step", "× none"]
    rows[0] += [f"× {reference.hook}"] if reference else []
    rows[0] += [*(["measured"] if measured_step_s else []), "loss, nats"]
    for hook in hooks:
        found, cost = predictions[hook.name], accuracy_cost(hook)
        row = [hook.name, with_prefix(found.leaving_bytes if is_shared else found.sent_bytes, "B")]
        compared = [none, reference] if reference else [none]
        row += [factor(counted(each) / counted(found)) if counted(found) else "" for each in compared]
        row += map(seconds, (found.local_s, found.communication_s, found.hidden_s, found.step_s))
        row += [f"{each.step_s / found.step_s:.2f}" for each in compared]
        if measured_step_s:
            row.append(seconds(measured_step_s[hook.name]) if hook.name in measured_step_s else "")
        rows.append([*row, "not measured" if cost is None else str(cost)])
    recommended = scenario.recommend(link, world_size)
    text = sentences(recommended, predictions, hooks, scenario.max_loss, link.nodes.ranks)
    return "\n".join(
        [
            *heading(scenario, link, world_size),
            "",
            *aligned(rows),
            "",
            *_notes(hooks, is_shared, bool(measured_step_s)),
            textwrap.fill(f"loss: {SOURCE}", WIDTH),
            "",
            textwrap.fill(text, WIDTH),
        ]
    )


def _notes(hooks: Sequence[Candidate], is_shared: bool, has_measured: bool) -> list[str]:
    """Return lines on the table's columns and rows."""
    notes = ["own work: the hook's compression. hidden: what of it and of the collectives backward hides."]
    if is_shared:
        notes.append("node sends: the bytes that leave a node through its network cards in a step.")
    if any(hook.is_by_nodes for hook in hooks):
        notes.append(
            "by nodes: a node's ranks sum exactly, and send the sum on together. Otherwise the hook is flat: "
            "codes go from every rank to every other, factors around a ring of all ranks."
        )
    if has_measured:
        notes.append("measured: the step that bench has timed; all other columns are predicted.")
    return [line for note in notes for line in textwrap.wrap(note, WIDTH)]


def text_map(scenario: Scenario, link: Link) -> str:
    """Format a map: by bandwidth and number of ranks, the hook to use and its speedup."""
    world_sizes = _whole_nodes(link, MAP_WORLD_SIZES)
    found = scenario.sweep(link, [each / 8 for each in MAP_BANDWIDTHS], world_sizes)
    lines = [
        f"PREDICTED: {scenario.model} on {scenario.device.name}, {scenario.backend}{_nodes(link)}. The hook "
        "to use, and how many times as fast a step is as with none;",
        f"–: don't compress. Of hooks that cost up to {scenario.max_loss:g} nats on the small GPT of "
        "docs/accuracy.md.",
    ]
    for title, names in (
        (TESTED, ("hook", "speedup")),
        (UNTESTED, ("untested", "untested_speedup")),
    ):
        rows = [["", *(f"{world_size:,} ranks" for world_size in world_sizes)]]
        for bits_per_s, row in zip(MAP_BANDWIDTHS, zip(*found, strict=True), strict=True):
            pairs = [[getattr(each, name) for name in names] for each in row]
            cells = ["–" if hook == "none" else f"{hook} {factor(gain)}" for hook, gain in pairs]
            rows.append([bandwidth(bits_per_s / 8), *cells])
        lines += ["", title, *aligned(rows)]
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines. The first and last columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *middle, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, last]).rstrip())
    return lines


def as_json(scenario: Scenario, link: Link, world_size: int) -> dict[str, Any]:
    """Return the prediction and the recommendation in plain types, for JSON."""
    predictions, forms = scenario.predict(link, world_size), scenario.forms(link, world_size)
    found, reference = scenario.recommend(link, world_size), with_16_bits(predictions)
    hooks = []
    for hook in forms:
        cost = accuracy_cost(hook)
        fields = asdict(predictions[hook.name])
        fields["times_none"] = predictions["none"].step_s / predictions[hook.name].step_s
        fields["times_16_bits"] = reference and reference.step_s / predictions[hook.name].step_s
        fields["state"] = hook.state(link.nodes.ranks) if has_forms(hook, forms) else None
        fields["accuracy_cost"] = None if cost is None else asdict(cost)
        hooks.append(fields)
    return {
        "predicted": True,
        "model": scenario.model,
        "device": scenario.device.name,
        "backend": scenario.backend,
        "world_size": world_size,
        "bits_per_s": 8 * link.bytes_per_s if math.isfinite(link.bytes_per_s) else None,
        "latency_s": link.latency_s,
        "nodes": None if link.nodes.ranks == 1 else asdict(link.nodes),
        "compute": {**asdict(scenario.compute), "step_s": scenario.compute.step_s},
        "compute_source": scenario.compute_source,
        "cost_source": scenario.cost_source,
        "accuracy_source": SOURCE,
        "max_loss": scenario.max_loss,
        "hooks": hooks,
        "recommendation": {
            **asdict(found),
            "text": sentences(found, predictions, forms, scenario.max_loss, link.nodes.ranks),
        },
    }


NUM_POINTS = 32  # of each axis
BITS_PER_S = (5e7, 4e11)
WORLD_SIZES = (2, 10_000)
SPEEDUPS = (1.5, 3, 10, 30, 100)
# Okabe and Ito's palette, which color-blind readers can distinguish too; grey is no compression.
COLORS = ("#56B4E9", "#0072B2", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#000000")
NO_COMPRESSION = "#DDDDDD"


def draw_map(scenario: Scenario, link: Link, path: Path) -> None:
    """Write the map as a picture. The file's suffix is its format.

    Raises ImportError without matplotlib, ValueError for an unknown suffix, OSError if writing fails.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import Patch

    bits_per_s = _axis(*BITS_PER_S)
    world_sizes = _whole_nodes(link, (round(each) for each in _axis(*WORLD_SIZES)))
    found = scenario.sweep(link, [each / 8 for each in bits_per_s], world_sizes)
    names = _names(scenario, found)
    colors = [NO_COMPRESSION, *(COLORS[index % len(COLORS)] for index in range(len(names) - 1))]
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 5), layout="constrained", sharey=True)
    for axes, hook, speedup, title in (
        (panels[0], "hook", "speedup", "cost in accuracy known for as many bytes saved"),
        (panels[1], "untested", "untested_speedup", "if it costs no more when it saves more (not tested)"),
    ):
        axes.pcolormesh(
            bits_per_s,
            world_sizes,
            [[names.index(getattr(each, hook)) for each in row] for row in found],
            cmap=ListedColormap(colors),
            norm=BoundaryNorm([each - 0.5 for each in range(len(names) + 1)], len(names)),
            shading="nearest",
        )
        gains = [[getattr(each, speedup) for each in row] for row in found]
        levels = [level for level in SPEEDUPS if level < max(map(max, gains))]
        if levels:
            lines = axes.contour(
                bits_per_s, world_sizes, gains, levels=levels, colors="black", linewidths=0.7
            )
            axes.clabel(lines, fmt=lambda value: f"{value:g}×", fontsize=8)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks((1e8, 1e9, 1e10, 1e11), ("100 M", "1 G", "10 G", "100 G"))
        card = "network card" if link.nodes.ranks > 1 else "rank's link"
        axes.set_xlabel(f"bandwidth of each {card}, bit/s")
        axes.set_title(title, fontsize=9)
    panels[0].set_ylabel("ranks")
    figure.suptitle(
        f"PREDICTED, not measured: {scenario.model} on {scenario.device.name}, {scenario.backend}"
        f"{_nodes(link)}, {_latency(link)}; the hook to use, and times as fast as "
        "with none (lines).\n"
        f"Of hooks that cost up to {scenario.max_loss:g} nats on one small GPT (docs/accuracy.md). "
        f"Don't compress: less than {LEAST_HEADROOM:.0%} to gain, or no such hook is faster.",
        fontsize=9,
    )
    patches = [Patch(color=color, label=_label(name)) for color, name in zip(colors, names, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _axis(first: float, last: float) -> list[float]:
    return [first * (last / first) ** (index / (NUM_POINTS - 1)) for index in range(NUM_POINTS)]


def _names(scenario: Scenario, found: Sequence[Sequence[Recommendation]]) -> list[str]:
    """Return the names of the hooks on the map: "none", then the others in the scenario's order."""
    on_map = {hook for row in found for each in row for hook in (each.hook, each.untested)}
    names = [hook.name for hook in forms_of(scenario.hooks, has_nodes=True, is_gloo=True)]
    return ["none", *(name for name in names if name in on_map and name != "none")]


def _label(name: str) -> str:
    return "don't compress" if name == "none" else name
