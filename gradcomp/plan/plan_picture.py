"""The picture of a plan: which hook to use by bandwidth and number of ranks. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .link import Link
from .recommendation import LEAST_HEADROOM, Recommendation
from .scenario import Scenario

NUM_POINTS = 32  # of each axis
BITS_PER_S = (5e7, 4e11)
WORLD_SIZES = (2, 10_000)
SPEEDUPS = (1.5, 3, 10, 30, 100)
# Okabe and Ito's palette, which colour-blind readers can distinguish too; grey is no compression.
COLOURS = ("#56B4E9", "#0072B2", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#000000")
NO_COMPRESSION = "#DDDDDD"


def draw_map(scenario: Scenario, link: Link, path: Path) -> None:
    """Write the picture to a file whose format its suffix tells.

    Raises ImportError without matplotlib, ValueError for a suffix that it doesn't know, OSError for a file
    that can't be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import Patch

    bits_per_s, world_sizes = _axis(*BITS_PER_S), sorted({round(each) for each in _axis(*WORLD_SIZES)})
    found = scenario.sweep(link, [each / 8 for each in bits_per_s], world_sizes)
    names = _names(scenario, found)
    colours = [NO_COMPRESSION, *(COLOURS[index % len(COLOURS)] for index in range(len(names) - 1))]
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 5), layout="constrained", sharey=True)
    for axes, hook, speedup, title in (
        (panels[0], "hook", "speedup", "cost in accuracy known for as many bytes saved"),
        (panels[1], "untested", "untested_speedup", "if it costs no more when it saves more (not tested)"),
    ):
        axes.pcolormesh(
            bits_per_s,
            world_sizes,
            [[names.index(getattr(each, hook)) for each in row] for row in found],
            cmap=ListedColormap(colours),
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
        axes.set_xlabel("bandwidth of each rank's link, bit/s")
        axes.set_title(title, fontsize=9)
    panels[0].set_ylabel("ranks")
    figure.suptitle(
        f"PREDICTED, not measured: {scenario.model} on {scenario.device.name}, {scenario.backend}, "
        f"{link.latency_s * 1e6:g} µs per message; the hook to use, and times as fast as with none (lines).\n"
        f"Of hooks that cost up to {scenario.max_loss:g} nats on one small GPT (docs/accuracy.md). "
        f"Don't compress: less than {LEAST_HEADROOM:.0%} to gain, or no such hook is faster.",
        fontsize=9,
    )
    patches = [Patch(color=colour, label=_label(name)) for colour, name in zip(colours, names, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _axis(first: float, last: float) -> list[float]:
    return [first * (last / first) ** (index / (NUM_POINTS - 1)) for index in range(NUM_POINTS)]


def _names(scenario: Scenario, found: Sequence[Sequence[Recommendation]]) -> list[str]:
    """Return the hooks on the map, no compression first, in the scenario's order."""
    on_map = {hook for row in found for each in row for hook in (each.hook, each.untested)}
    return ["none", *(hook.name for hook in scenario.hooks if hook.name in on_map and hook.name != "none")]


def _label(name: str) -> str:
    return "don't compress" if name == "none" else name
