"""Measure what compression costs in accuracy: train to the end with each hook, from several seeds.

    python -m benchmarks.accuracy --task digits --hook none,int4,powersgd:4 --seeds 3

It trains the demo's GPT, of a smaller size, and a convolutional network on scikit-learn's digits, on several
ranks (gloo, CPU). From one seed every hook trains the same weights on the same data in the same order.
Compression starts after a tenth of the steps. PowerSGD is powersgd:RANK, powersgd:RANK:int8 with factors in
int8 (or bf16, fp16), or batched:RANK for a bucket as one matrix. "alone" is every rank by itself, without
communication: what a hook must beat. "local:20" averages the weights once in 20 local steps, "local:20:int4"
does so in 4 bits.
It writes accuracy.jsonl, a line per run, and a picture to --out.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from benchmarks.accuracy import comparison
from benchmarks.accuracy.runs import check_run_name, work
from benchmarks.accuracy.tasks import TASKS
from benchmarks.demo.options import add_training_options, check_training_options
from benchmarks.pictures import write_picture
from benchmarks.ranks import exit_on_signals, run_ranks
from benchmarks.records import read
from gradcomp.command_line import positive_int

HOOKS = (
    "none,alone,fp16,int8,int4,int4:64,powersgd:16,powersgd:8,powersgd:4,powersgd:8:bf16,"
    "powersgd:16:int8,powersgd:8:int8,powersgd:4:int8"
)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    tasks = ",".join(TASKS)
    parser.add_argument("--task", default=tasks, help="comma-separated (default %(default)s)")
    parser.add_argument(
        "--hook",
        default=HOOKS,
        help="comma-separated; the others are compared with the first (default %(default)s)",
    )
    parser.add_argument(
        "--seeds", type=positive_int, default=4, help="runs per hook, from --seed on (default %(default)s)"
    )
    parser.add_argument("--ranks", type=positive_int, default=4, help="processes (default %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("build/accuracy"), help="folder (default %(default)s)"
    )
    add_training_options(parser)
    parser.set_defaults(steps=500, width=64, layers=2)
    options = parser.parse_args(arguments)
    check_training_options(parser, options)
    options.tasks, options.hooks = options.task.split(","), options.hook.split(",")
    for task in options.tasks:
        if task not in TASKS:
            parser.error(f"--task: there is no {task!r}; known are {tasks}")
    for hook in options.hooks:
        try:
            check_run_name(hook)
        except ValueError as error:
            parser.error(f"--hook: {error}")
    if "digits" in options.tasks and importlib.util.find_spec("sklearn") is None:
        parser.error(
            "the digits come with scikit-learn, which is not installed: pip install 'gradcomp[accuracy]', "
            "or leave them out with --task gpt"
        )
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    options.results = options.out / "accuracy.jsonl"
    options.results.unlink(missing_ok=True)
    exit_on_signals()
    run_ranks(work, options.ranks, options)
    rows = read(options.results)
    print("\n" + comparison.tables(rows))
    print(f"\nEvery run: {options.results}")
    write_picture(comparison.draw, rows, options.out / "accuracy.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
