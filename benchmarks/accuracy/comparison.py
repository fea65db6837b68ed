"""The comparison of hooks over the seeds: tables, and a picture of validation loss against bytes sent."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.pictures import COLORS, label_decades, picture
from benchmarks.records import Row


@dataclass(frozen=True)
class Summary:
    """The results of one task with one hook. Lists are by seed.

    differences: this hook's validation loss minus the first hook's from the same seed.
    """

    hook: str
    bytes_per_step: int
    sent_bytes: int
    losses: list[float]
    accuracies: list[float]
    differences: list[float]


def summaries(rows: Sequence[Row]) -> dict[str, list[Summary]]:
    """Summarize runs.train()'s rows: by task, a summary per hook, in the order of the rows."""
    by_task: dict[str, dict[str, dict[int, Row]]] = {}
    for row in rows:
        by_task.setdefault(row["task"], {}).setdefault(row["hook"], {})[row["seed"]] = row
    return {task: [_summary(hook, hooks) for hook in hooks] for task, hooks in by_task.items()}


def _summary(hook: str, hooks: dict[str, dict[int, Row]]) -> Summary:
    baseline, runs = next(iter(hooks.values())), hooks[hook]
    first = next(iter(runs.values()))
    return Summary(
        hook,
        first["bytes_per_step"],
        first["sent_bytes"],
        losses=[run["validation_loss"] for run in runs.values()],
        accuracies=[run["validation_accuracy"] for run in runs.values()],
        differences=[
            run["validation_loss"] - baseline[seed]["validation_loss"] for seed, run in runs.items()
        ],
    )


def tables(rows: Sequence[Row]) -> str:
    """Format a table per task. ± is the standard deviation over the seeds.

    rate: how many times fewer bytes than the first hook sends in fp32; "of bf16": than 16 bits would be.
    """
    return "\n\n".join(
        _table([row for row in rows if row["task"] == task], hooks) for task, hooks in summaries(rows).items()
    )


def _table(rows: Sequence[Row], hooks: Sequence[Summary]) -> str:
    first, baseline = rows[0], hooks[0]
    lines = [
        f"{first['task']}: {first['num_parameters']:,} parameters, {first['steps']:,} steps, "
        f"{first['ranks']} ranks, seeds: {len(baseline.losses)}; "
        f"compression after {first['start_powerSGD_iter']} steps",
        f"{'hook':17}{'bytes/step':>11}{'rate':>9}{'of bf16':>9}{'MB sent':>9}"
        f"{'validation loss':>18}{'minus ' + baseline.hook:>18}{'accuracy':>15}",
    ]
    for hook in hooks:
        num_bytes = hook.bytes_per_step
        rate, of_bf16 = (
            f"{baseline.bytes_per_step / each / num_bytes:.1f}×" if num_bytes else "∞" for each in (1, 2)
        )
        difference = "" if hook is baseline else mean_and_spread(hook.differences, 3, sign="+")
        accuracy = mean_and_spread([100 * accuracy for accuracy in hook.accuracies], 1) + " %"
        lines.append(
            f"{hook.hook:17}{hook.bytes_per_step:>11,}{rate:>9}{of_bf16:>9}{hook.sent_bytes / 1e6:>9.1f}"
            f"{mean_and_spread(hook.losses, 3):>18}{difference:>18}{accuracy:>15}"
        )
    return "\n".join(lines)


def mean_and_spread(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Format the mean ± the sample standard deviation, or the mean alone if there is one value."""
    mean = format(round(statistics.mean(values), digits) + 0.0, f"{sign}.{digits}f")  # + 0.0: no minus zero
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def family_of(hook: str) -> str:
    """Return the name of a hook's line: hooks that differ in their rank or number of steps share one."""
    return re.sub(r"^(powersgd|batched|local):\d+", r"\1:R", hook)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG with a panel per task: each hook's loss minus the first's, by bytes per step.

    A line per family of hooks. Bars are standard deviations. Raises ImportError without matplotlib.
    """
    tasks = summaries(rows)
    with picture(path, len(tasks), (4.5, 3.9)) as panels:
        for axes, (task, hooks) in zip(panels, tasks.items(), strict=True):
            _draw_panel(axes, hooks)
            axes.set_title(f"{task}, seeds: {len(hooks[0].losses)}", loc="left")


def _draw_panel(axes: Any, hooks: Sequence[Summary]) -> None:
    axes.axhline(0, color="0.6", linewidth=0.8, linestyle=":")
    shown = sorted(hooks[1:], key=lambda hook: hook.bytes_per_step)
    shown = [hook for hook in shown if hook.bytes_per_step]
    families = list(dict.fromkeys(family_of(hook.hook) for hook in shown))
    for color, family in zip(cycle(COLORS[1:-2]), families, strict=False):  # without yellow, for the labels
        drawn = [hook for hook in shown if family_of(hook.hook) == family]
        points = [(hook.bytes_per_step / 1e3, statistics.mean(hook.differences)) for hook in drawn]
        spreads = [statistics.stdev(hook.differences) if len(hook.losses) > 1 else 0 for hook in drawn]
        axes.errorbar(*zip(*points, strict=True), yerr=spreads, fmt="o-", color=color, capsize=3)
        for hook, point in zip(drawn, points, strict=True):
            # Neighbors' labels go up and down in turns.
            up = shown.index(hook) % 2 == 0
            label = {"textcoords": "offset points", "xytext": (4, 6 if up else -6), "color": color}
            label |= {"rotation": 45 if up else -45, "va": "bottom" if up else "top"}
            axes.annotate(hook.hook, point, fontsize=9, rotation_mode="anchor", **label)
    for hook in hooks:
        if hook.bytes_per_step == 0:
            gap = statistics.mean(hook.differences)
            axes.axhline(gap, color="0.3", linestyle="--", label=f"{hook.hook}, no communication")
    axes.set(xscale="log", xlabel="kB per step", ylabel=f"loss minus {hooks[0].hook}'s, nats")
    label_decades(axes.xaxis)
    axes.margins(x=0.15, y=0.45)
    axes.legend(frameon=False)
