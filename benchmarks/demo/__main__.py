"""Train the same small GPT with each hook on several ranks; compare the time to a loss, and bytes sent.

    python -m benchmarks.demo --hook none,int4,powersgd:4 --link 100,25

The ranks are processes on this machine. On a CPU the link between them is emulated: a collective ends when
its bytes would have arrived. Every hook trains the same weights on the same data in the same order: the
source of Python's own standard library. It writes a JSON record per hook and a picture to --out.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path

import torch
from torch.multiprocessing.spawn import ProcessException

from benchmarks.demo import chart, train
from benchmarks.demo.train import AUTO, GPT, add_training_options, parse_training_options
from benchmarks.demo.wire import Link
from benchmarks.pictures import write_picture
from benchmarks.ranks import exit_on_signals, run_ranks
from gradcomp.hooks.named_hooks import NamedHook

FIRST_HOOKS = "none,bf16,int8,int4,powersgd:8:int8,auto"
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
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    text = "hooks by their names in docs/accuracy.md, and auto, in this order (default %(default)s)"
    parser.add_argument("--hook", default=FIRST_HOOKS, help=text)
    text = "a rank's Mbit/s and the delay each way in ms; none: not emulated (default %(default)s)"
    parser.add_argument("--link", type=link, default="200,10", help=text)
    add_training_options(parser)
    parser.set_defaults(ranks=2, out=Path("build/demo"), steps=100)
    options = parse_training_options(parser, arguments)
    if options.ranks < 2:
        parser.error("--ranks: one rank alone sends nothing; at least 2")
    options.hooks = options.hook.split(",")
    for hook in options.hooks:
        try:
            hook == AUTO or NamedHook.named(hook)
        except ValueError as error:
            parser.error(f"--hook: {error}")
    return options


def headline(options: argparse.Namespace) -> str:
    """Say what is trained, over which link."""
    with torch.device("meta"):
        net = GPT(options.width, options.layers, options.heads, options.sequence)
    num_parameters = sum(parameter.numel() for parameter in net.parameters())
    if torch.cuda.is_available():
        over = "GPUs' links, which aren't emulated"
    elif options.link is None:
        over = "the loopback"
    else:
        over = f"an emulated link of {options.link} (--link none: without)"
    return f"Training a GPT of {num_parameters:,} parameters on {options.ranks} ranks, over {over}"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    exit_on_signals()
    print(headline(options), flush=True)
    load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    try:
        run_ranks(train.work, options.ranks, options)
    except ProcessException as error:
        print(f"demo: training failed: {error}", file=sys.stderr)
        return 1
    records = [json.loads((options.out / f"{hook}.json").read_text()) for hook in options.hooks]
    why = f"the load was {load:.1f} per core before it began" if load > MAX_LOAD else ""
    if options.hooks[0] == "none":  # other hooks' steps may differ: a rank is ahead by turns
        why = why or chart.too_noisy(records[0])
    print("\n" + chart.table(records, why))
    write_picture(chart.draw, records, options.out / "demo.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
