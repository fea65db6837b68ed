"""The comparison of hooks over the seeds: tables, and a picture of added loss against the model's size."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from benchmarks.pictures import COLORS, label_decades, picture
from benchmarks.records import Row
from benchmarks.training.options import split_rate


@dataclass(frozen=True)
class Summary:
    """The results of one task with one hook. Lists are by seed.

    differences: this hook's validation loss minus the first hook's from the same seed.
    """

    hook: str
    bytes_per_step: int
    sent_bytes: int
    losses: list[float]
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
        differences=[
            run["validation_loss"] - baseline[seed]["validation_loss"] for seed, run in runs.items()
        ],
    )


def tables(rows: Sequence[Row]) -> str:
    """Format a table per task. ± is the standard deviation over the seeds.

    rate: how many times fewer bytes than the first hook sends in fp32.
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
        f"{'hook':17}{'bytes/step':>11}{'rate':>9}{'MB sent':>9}"
        f"{'validation loss':>18}{'minus ' + baseline.hook:>18}",
    ]
    for hook in hooks:
        num_bytes = hook.bytes_per_step
        rate = f"{baseline.bytes_per_step / num_bytes:.1f}×" if num_bytes else "∞"
        difference = "" if hook is baseline else mean_and_spread(hook.differences, 3, sign="+")
        lines.append(
            f"{hook.hook:17}{hook.bytes_per_step:>11,}{rate:>9}{hook.sent_bytes / 1e6:>9.1f}"
            f"{mean_and_spread(hook.losses, 3):>18}{difference:>18}".rstrip()
        )
    return "\n".join(lines)


def costs(rows: Sequence[Row]) -> dict[str, float]:
    """Return each hook's mean loss minus the first one's, of one task, by name without the learning rate."""
    ((_, *hooks),) = summaries(rows).values()
    return {split_rate(each.hook)[0]: statistics.mean(each.differences) for each in hooks}


def mean_and_spread(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Format the mean ± the sample standard deviation, or the mean alone if there is one value."""
    mean = format(round(statistics.mean(values), digits) + 0.0, f"{sign}.{digits}f")  # + 0.0: no minus zero
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG of each hook's loss minus the first's against the model's size, a line per hook.

    Raises ImportError without matplotlib, ValueError for rows of a single size.
    """
    sizes = sorted({row["num_parameters"] for row in rows})
    if len(sizes) < 2:
        raise ValueError("it needs models of two sizes in one file, see --resume")
    lines: dict[str, list[tuple[int, float]]] = {}
    for size in sizes:
        for name, cost in costs([row for row in rows if row["num_parameters"] == size]).items():
            lines.setdefault(name, []).append((size, cost))
    with picture(path, 1, (4.5, 3.9)) as [axes]:
        axes.axhline(0, color="0.6", linewidth=0.8, linestyle=":")
        for color, (name, points) in zip(cycle(COLORS[1:-2]), lines.items(), strict=False):
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=name)
        axes.set(xscale="log", xlabel="parameters", ylabel="loss added, nats per byte")
        label_decades(axes.xaxis)
        axes.legend(frameon=False, fontsize="small")
