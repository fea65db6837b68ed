"""The demo's results: a table, and a picture of loss against time and against bytes sent."""

import math
import statistics
from itertools import accumulate, pairwise
from pathlib import Path

from benchmarks.pictures import COLORS, label_decades, picture
from benchmarks.records import Row

MAX_SPREAD = 0.2  # of the times of the first record's steps: more is larger than a hook's gain may be


def target_loss(records: list[Row]) -> float:
    """Return a validation loss that every run has reached."""
    return max(min(loss for _, loss in record["validation_losses"]) for record in records)


def seconds_to(target: float, record: Row) -> float:
    """Return the seconds of training until a validation loss, between two validations; NaN if never."""
    ended_at = [0.0, *accumulate(record["step_s"])]
    for (start, before), (end, after) in pairwise(record["validation_losses"]):
        if before > target >= after:
            part = (before - target) / (before - after)
            return ended_at[start] + part * (ended_at[end] - ended_at[start])
    return math.nan


def too_noisy(record: Row) -> str:
    """Return why a run's times can't be compared with others'; "" if they can."""
    fast, *_, slow = statistics.quantiles(record["step_s"][len(record["step_s"]) // 2 :], n=5)
    text = f"of the steps of {record['hook']} a fifth took under {fast * 1e3:.0f} ms, a fifth over"
    return f"{text} {slow * 1e3:.0f}" if slow > (1 + MAX_SPREAD) * fast else ""


def table(records: list[Row], why_busy: str) -> str:
    """Format one line per hook. Rates and gains refer to the first record. why_busy: it has no times then."""
    target, first = target_loss(records), records[0]
    first_s = seconds_to(target, first)
    lines = [
        f"Time to a validation loss of {target:.3f}, which every hook has reached:",
        "hook           bytes/step   fewer  ms/step  seconds to it  times as fast  last loss",
    ]
    for record in records:
        seconds = seconds_to(target, record)
        times = f"{record['ms_per_step']:>9.0f}{seconds:>15.1f}{first_s / seconds:>14.1f}×"
        lines.append(
            f"{record['hook']:15}{record['bytes_per_step']:>10,}"
            f"{first['bytes_per_step'] / record['bytes_per_step']:>7.1f}×{'' if why_busy else times:39}"
            f"{record['validation_loss']:>11.3f}"
            + (f"  chose {record['choice']}" if record["choice"] else "")
        )
    advice = [f"This machine is too busy to time this: {why_busy}. Try again when it isn't."]
    return "\n".join(lines + (advice if why_busy else []))


def draw(records: list[Row], path: Path, over: str) -> None:
    """Write a PNG of each hook's validation loss by seconds, and by MB of all-reduces; legible on a phone.

    over: the link. Raises ImportError without matplotlib.
    """
    with picture(path, 2) as [by_time, by_bytes]:
        for index, record in enumerate(records):
            steps, losses = zip(*record["validation_losses"][1:], strict=True)
            for axes, of_steps, unit in ((by_time, "step_s", 1), (by_bytes, "step_bytes", 1e6)):
                so_far = list(accumulate(record[of_steps]))
                x = [so_far[step - 1] / unit for step in steps]
                axes.plot(x, losses, color=COLORS[index % len(COLORS)], linewidth=2, label=record["hook"])
        by_time.set_title(f"a small GPT over {over}", loc="left", fontsize="medium")
        by_time.set(xlabel="seconds of training", ylabel="validation loss")
        by_time.legend(frameon=False)
        by_bytes.set(xscale="log", xlabel="MB handed to all-reduces", ylabel="validation loss")
        label_decades(by_bytes.xaxis)
