"""The comparison of hooks over the seeds: tables, and a picture of validation loss against bytes sent."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.demo.chart import COLOURS

Row = dict[str, Any]  # the result of runs.train()
FAILED = 2  # a hook whose loss exceeds the first hook's by this factor is off the picture's scale


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
    """Summarise the rows: by task, a summary per hook, in the order of the rows."""
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
    """Format a table per task. ± is the standard deviation over the seeds."""
    return "\n\n".join(
        _table([row for row in rows if row["task"] == task], hooks) for task, hooks in summaries(rows).items()
    )


def _table(rows: Sequence[Row], hooks: Sequence[Summary]) -> str:
    first, baseline = rows[0], hooks[0]
    lines = [
        f"{first['task']}: {first['num_parameters']:,} parameters, {first['steps']:,} steps, "
        f"{first['ranks']} ranks, seeds: {len(baseline.losses)}; "
        f"PowerSGD after {first['start_powerSGD_iter']} steps",
        f"{'hook':12}{'bytes/step':>11}{'rate':>9}{'MB sent':>9}"
        f"{'validation loss':>18}{'minus ' + baseline.hook:>18}{'accuracy':>15}",
    ]
    for hook in hooks:
        rate = baseline.bytes_per_step / hook.bytes_per_step
        difference = "" if hook is baseline else mean_and_spread(hook.differences, 3, sign="+")
        accuracy = mean_and_spread([100 * accuracy for accuracy in hook.accuracies], 1) + " %"
        lines.append(
            f"{hook.hook:12}{hook.bytes_per_step:>11,}{rate:>8.1f}×{hook.sent_bytes / 1e6:>9.1f}"
            f"{mean_and_spread(hook.losses, 3):>18}{difference:>18}{accuracy:>15}"
        )
    return "\n".join(lines)


def mean_and_spread(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Format the mean ± the sample standard deviation, or the mean alone if there is one value."""
    mean = format(round(statistics.mean(values), digits) + 0.0, f"{sign}.{digits}f")  # + 0.0: no minus zero
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG with a panel per task: each hook's mean validation loss by MB sent.

    Error bars are standard deviations. Raises ImportError without matplotlib.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    tasks = summaries(rows)
    size = (5.5 * len(tasks), 4.5)
    figure, panels = pyplot.subplots(1, len(tasks), figsize=size, layout="constrained", squeeze=False)
    for axes, (task, hooks) in zip(panels[0], tasks.items(), strict=True):
        _draw_panel(axes, hooks)
        axes.set_title(f"{task}, seeds: {len(hooks[0].losses)}", loc="left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_panel(axes: Any, hooks: Sequence[Summary]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    baseline = statistics.mean(hooks[0].losses)
    axes.axhline(baseline, color=COLOURS[0], linewidth=0.8, linestyle=":")
    families = list(dict.fromkeys(hook.hook.partition(":")[0] for hook in hooks))
    for index, hook in enumerate(hooks):
        colour = COLOURS[families.index(hook.hook.partition(":")[0]) % len(COLOURS)]
        sent_mb, loss = hook.sent_bytes / 1e6, statistics.mean(hook.losses)
        # Labels alternate between below and above, as fp16 and bf16 have the same coordinates.
        label = {"textcoords": "offset points", "xytext": (6, -12 if index % 2 else 5), "color": colour}
        if loss > FAILED * baseline:
            # To scale it would squeeze the others into a line, so it is drawn at the upper edge, with its
            # value.
            edge = axes.get_xaxis_transform()
            axes.plot(sent_mb, 0.97, "^", color=colour, transform=edge)
            axes.annotate(f"{hook.hook}: {loss:.2f}", (sent_mb, 0.97), xycoords=edge, **label)
            continue
        spread = statistics.stdev(hook.losses) if len(hook.losses) > 1 else 0
        axes.errorbar(sent_mb, loss, yerr=spread, fmt="o", color=colour, capsize=4)
        axes.annotate(hook.hook, (sent_mb, loss), **label)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda megabytes, _: f"{megabytes:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.12, y=0.12)
    axes.set_xlabel("MB that each rank has handed to collectives")
    axes.set_ylabel("validation loss at the end, nats")
    axes.spines[["top", "right"]].set_visible(False)
