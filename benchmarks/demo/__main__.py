"""Train the same small GPT with each hook on several ranks; compare loss, time and bytes sent.

    python -m benchmarks.demo --hook all --steps 400

Every hook trains the same weights on the same data in the same order. The text is the source of Python's own
standard library. It writes a JSON record per hook and a picture to --out.
"""

import argparse
import json
import sys
from pathlib import Path

from torch.multiprocessing.spawn import ProcessException

from benchmarks.demo import chart, train
from benchmarks.demo.options import add_training_options, check_training_options
from benchmarks.demo.train import HOOKS
from benchmarks.pictures import write_picture
from benchmarks.ranks import exit_on_signals, run_ranks
from gradcomp.command_line import positive_int

FIRST_HOOKS = "none,bf16,int4,powersgd_int8"  # one of each kind, so that a first run takes two minutes


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    known = ",".join(HOOKS)
    parser.add_argument(
        "--hook", default=FIRST_HOOKS, help=f"some of {known}, in this order, or all (default %(default)s)"
    )
    parser.add_argument("--ranks", type=positive_int, default=2, help="processes (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder (default %(default)s)")
    add_training_options(parser)
    options = parser.parse_args(arguments)
    check_training_options(parser, options)
    options.hooks = list(HOOKS) if options.hook == "all" else options.hook.split(",")
    for hook in options.hooks:
        if hook not in HOOKS:
            parser.error(f"--hook: there is no {hook!r}; known are {known}, and all")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    exit_on_signals()
    records = []
    for hook in options.hooks:
        print(f"\n== {hook}: {options.ranks} ranks, {options.steps} steps", flush=True)
        options.hook, options.record = hook, options.out / f"{hook}.json"
        try:
            run_ranks(train.work, options.ranks, options)
        except ProcessException as error:
            print(f"demo: training with {hook!r} failed: {error}", file=sys.stderr)
            return 1
        records.append(json.loads(options.record.read_text()))
    print("\n" + chart.table(records))
    write_picture(chart.draw, records, options.out / "loss_vs_bytes.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
