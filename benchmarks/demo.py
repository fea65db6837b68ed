"""Train the same small GPT with each hook on several ranks; compare the time to a loss, and bytes sent.

    python -m benchmarks.demo --hook none,int4,powersgd:4 --link 100,25

The ranks are processes on this machine's CPU. The link between them is emulated: a collective ends when its
bytes would have arrived. Every hook trains the same weights on the same data in the same order: the source of
Python's own standard library. It writes demo.jsonl, a line per hook, and a picture to --out.
"""

import argparse
import math
import os
import statistics
import sys
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

from torch.multiprocessing.spawn import ProcessException

from benchmarks.pictures import COLORS, label_decades, picture, write_picture
from benchmarks.records import Row, read
from benchmarks.training.averaging import ALONE
from benchmarks.training.runs import exit_on_signals, run_ranks, work
from benchmarks.training.runs import parse as parse_training
from benchmarks.training.wire import Link

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
                x = [sum(record[of_steps][:step]) / unit for step in steps]
                axes.plot(x, losses, color=COLORS[index % len(COLORS)], linewidth=2, label=record["hook"])
        by_time.set(title=f"a small GPT over {over}", xlabel="seconds of training", ylabel="validation loss")
        by_time.legend(frameon=False)
        by_bytes.set(xscale="log", title="by bytes", xlabel="MB for all-reduces", ylabel="validation loss")
        label_decades(by_bytes.xaxis)


HOOKS = "none,bf16,int8,int4,powersgd:8:int8,auto"
DEFAULTS = {"hook": HOOKS, "ranks": 2, "out": Path("build/demo"), "steps": 100, "width": 128, "layers": 4}
DEFAULTS |= {"learning_rate": 1e-3, "batch": 4, "validations": 20, "keep_steps": True}
DEFAULTS |= {"tasks": ["gpt"], "seeds": 1, "tokens_per_parameter": 0, "minutes": None, "optimizer": ""}
MAX_LOAD = 1.5  # per core, before the demo begins


def link(text: str) -> Link | None:
    """Parse an emulated link, or "none"."""
    if text == "none":
        return None
    try:
        mbit_per_s, delay_ms = map(float, text.split(","))
    except ValueError:
        mbit_per_s = delay_ms = math.nan
    if not (0 < mbit_per_s < math.inf and 0 <= delay_ms < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is neither none nor MBIT_PER_S,DELAY_MS, such as 200,10")
    return Link(mbit_per_s, delay_ms)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    text = "a rank's Mbit/s and the delay each way in ms; none: not emulated (default %(default)s)"
    parser.add_argument("--link", type=link, default="200,10", help=text)
    options = parse_training(parser, arguments, **DEFAULTS)
    if options.ranks < 2:
        parser.error("--ranks: one rank alone sends nothing; at least 2")
    if ALONE in options.hooks:
        parser.error(f"--hook: {ALONE} sends nothing to compare")
    options.results = options.out / "demo.jsonl"
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    options.results.unlink(missing_ok=True)
    exit_on_signals()
    over = str(options.link or "the loopback")
    print(f"Training a small GPT on {options.ranks} ranks, over {over}", flush=True)
    load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    try:
        run_ranks(work, options.ranks, options)
    except ProcessException as error:
        print(f"demo: training failed: {error}", file=sys.stderr)
        return 1
    records = read(options.results)
    why = f"the load was {load:.1f} per core before it began" if load > MAX_LOAD else ""
    if options.hooks[0] == "none":  # other hooks' steps may differ: a rank is ahead by turns
        why = why or too_noisy(records[0])
    print("\n" + table(records, why))
    write_picture(partial(draw, over=over), records, options.out / "demo.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
