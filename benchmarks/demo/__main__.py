"""Train the same small GPT with each hook on several ranks; compare the time to a loss, and bytes sent.

    python -m benchmarks.demo --hook none,int4,powersgd:4 --link 100,25

The ranks are processes on this machine's CPU. The link between them is emulated: a collective ends when its
bytes would have arrived. Every hook trains the same weights on the same data in the same order: the source of
Python's own standard library. It writes demo.jsonl, a line per hook, and a picture to --out.
"""

import argparse
import math
import os
import sys
from functools import partial
from pathlib import Path

from torch.multiprocessing.spawn import ProcessException

from benchmarks.demo import chart
from benchmarks.pictures import write_picture
from benchmarks.ranks import exit_on_signals, run_ranks
from benchmarks.records import read
from benchmarks.training.averaging import ALONE
from benchmarks.training.options import parse as parse_training
from benchmarks.training.runs import work
from benchmarks.training.wire import Link

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
    options.out.mkdir(parents=True, exist_ok=True)
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
        why = why or chart.too_noisy(records[0])
    print("\n" + chart.table(records, why))
    write_picture(partial(chart.draw, over=over), records, options.out / "demo.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
