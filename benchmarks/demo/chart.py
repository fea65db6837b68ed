"""The demo's results: a table, and a picture of loss against bytes sent."""

from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.pictures import COLORS, picture

Record = dict[str, Any]  # what train.py writes with --record


def table(records: list[Record]) -> str:
    """Format one line per hook, under the reducer's name. Rates refer to the first record's bytes."""
    lines = [
        f"reducer: {records[0]['reducer']}",
        f"{'hook':14}{'bytes/step':>12}{'rate':>8}{'ms/step':>9}{'loss':>8}{'validation loss':>17}",
    ]
    for record in records:
        rate = records[0]["bytes_per_step"] / record["bytes_per_step"]
        lines.append(
            f"{record['hook']:14}{record['bytes_per_step']:>12,}{rate:>7.1f}×{record['ms_per_step']:>9.0f}"
            f"{record['loss']:>8.3f}{record['validation_loss']:>17.3f}"
        )
    return "\n".join(lines)


def draw(records: list[Record], path: Path) -> None:
    """Write a PNG of each hook's training loss (thin, smoothed) and validation loss (thick) by MB sent.

    Raises ImportError without matplotlib.
    """
    with picture(path, panel_size=(8, 4.5)) as [axes]:
        for index, record in enumerate(records):
            color = COLORS[index % len(COLORS)]
            style = "-" if index % 2 == 0 else (0, (2, 2))  # dashes show a line of the same course
            sent_mb = [0.0, *(total / 1e6 for total in accumulate(record["step_bytes"]))]
            axes.plot(sent_mb[1:], smoothed(record["losses"]), color=color, linewidth=0.8, alpha=0.5)
            steps, losses = zip(*record["validation_losses"], strict=True)
            axes.plot(
                [sent_mb[step] for step in steps],
                losses,
                color=color,
                linestyle=style,
                linewidth=2,
                label=record["hook"],
            )
            axes.plot(sent_mb[steps[-1]], losses[-1], "o", color=color)
        ranks = f"{records[0]['options']['steps']} steps, seed {records[0]['options']['seed']}"
        axes.set_title(f"A small GPT, {ranks}: loss against bytes", loc="left")
        axes.set_xlabel("MB that each rank has handed to collectives")
        axes.set_ylabel("loss, nats per byte")
        axes.legend(title="validation loss (thin: training)", frameon=False)


def smoothed(values: list[float], window: int = 9) -> list[float]:
    """Return each value's mean with those before it, over at most `window` values."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means
