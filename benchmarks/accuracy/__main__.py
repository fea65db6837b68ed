"""Measure what compression costs in accuracy: train to the end with each hook, from several seeds.

    python -m benchmarks.accuracy --hook none,int4,powersgd:4 --seeds 3

It trains a small GPT on text, on several ranks (gloo, CPU). From one seed every hook trains the same weights
on the same data in the same order.
Compression starts after a tenth of the steps. PowerSGD is powersgd:RANK, powersgd:RANK:int8 with factors in
int8 (or bf16, fp16), or batched:RANK for a bucket as one matrix. "alone" is every rank by itself, without
communication: what a hook must beat.

"local:20" averages the weights once in 20 local steps, "local:20:int4" does so in 4 bits; ":delay=5" is
LocalSteps' argument, ":outer=0.7/0.9" is the outer SGD's learning rate and Nesterov
momentum, and with ":to=50" exchanges become rarer as the square of the learning rate falls, up to 50 steps.
":lr=0.01" at the end of any name is the learning rate of the (inner) optimizer.

--task text judges local steps: the GPT reads text once, the sources of Python and of its packages, of
--tokens-per-parameter; the number of steps follows.
It writes accuracy.jsonl, a line per run, to --out, and a picture if the file has models of several sizes.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.accuracy import comparison
from benchmarks.pictures import write_picture
from benchmarks.ranks import exit_on_signals, run_ranks
from benchmarks.records import read
from benchmarks.training.options import parse as parse_training
from benchmarks.training.runs import recorded, runs, simulated, work
from benchmarks.training.tasks import OPTIMIZERS, TASKS
from gradcomp.command_line import positive, positive_int

HOOKS = (
    "none,alone,fp16,int8,int4,int4:64,powersgd:16,powersgd:8,powersgd:4,powersgd:8:bf16,"
    "powersgd:16:int8,powersgd:8:int8,powersgd:4:int8"
)
DEFAULTS = {"hook": HOOKS, "ranks": 4, "out": Path("build/accuracy"), "steps": 500, "width": 64, "layers": 2}
# The GPT's learning rate and batch, and the number of validations: compression starts with the first one.
DEFAULTS |= {"learning_rate": 3e-3, "batch": 8, "validations": 10, "link": None, "keep_steps": False}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    tasks = ",".join(TASKS)
    text = f"comma-separated, of {tasks} (default %(default)s)"
    parser.add_argument("--task", default="gpt", help=text)
    text = "runs per hook, from --seed on (default %(default)s)"
    parser.add_argument("--seeds", type=positive_int, default=4, help=text)
    parser.add_argument("--resume", action="store_true", help="skip the runs that are in --out already")
    text = "length of a run of the task text, in place of --steps (default %(default)s)"
    parser.add_argument("--tokens-per-parameter", type=positive_int, default=20, metavar="N", help=text)
    text = "ranks that take turns in this process, each with its model on --device, instead of --ranks"
    parser.add_argument("--simulated-ranks", type=positive_int, metavar="N", help=text)
    text = "of simulated ranks; on cuda the model is compiled, and computes in bf16 (default %(default)s)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=text)
    text = "size of the GPT, about, in place of --width and --layers; 20e6, for example"
    parser.add_argument("--parameters", type=positive, metavar="N", help=text)
    text = "train as many steps as fill this time, equally many with each hook"
    parser.add_argument("--minutes", type=positive, metavar="N", help=text)
    text = "of the tasks text and grammar, with momentum (default %(default)s)"
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw", help=text)
    options = parse_training(parser, arguments, **DEFAULTS)
    options.ranks = options.simulated_ranks or options.ranks
    if (options.device == "cuda" or options.minutes) and not options.simulated_ranks:
        parser.error("--device cuda and --minutes are for --simulated-ranks")
    if options.optimizer != "adamw" and not {"text", "grammar"}.issuperset(options.task.split(",")):
        parser.error("--optimizer is for --task text and grammar")
    if options.minutes and (options.resume or "alone" in options.hooks):
        parser.error("--minutes makes its own steps for all runs together: leave out --resume and alone")
    if options.parameters:
        options.heads = 4
        options.width = max(64, 64 * round((options.parameters / 12 * 64) ** (1 / 3) / 64))
        options.layers = max(1, round(options.parameters / (12 * options.width**2)))
    options.tasks = options.task.split(",")
    for task in options.tasks:
        if task not in TASKS:
            parser.error(f"--task: there is no {task!r}; known are {tasks}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    options.results = options.out / "accuracy.jsonl"
    if not options.resume:
        options.results.unlink(missing_ok=True)
    exit_on_signals()
    if options.simulated_ranks:
        from gradcomp.testing import run_ranks as run_simulated  # needs Hypothesis

        run_simulated(simulated, options.ranks, options, timeout_s=1e6)
    else:
        run_ranks(work, options.ranks, options)
    found = recorded(options)
    rows = [found[run] for run in runs(options) if run in found]
    print("\n" + comparison.tables(rows))
    print(f"\nEvery run: {options.results}")
    rows = [row for row in read(options.results) if row["options"]["optimizer"] == options.optimizer]
    write_picture(comparison.draw, rows, options.out / "accuracy.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
