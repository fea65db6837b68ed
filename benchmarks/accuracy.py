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
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from benchmarks.pictures import COLORS, label_decades, picture, write_picture
from benchmarks.records import Row, read
from benchmarks.training.averaging import split_rate
from benchmarks.training.runs import exit_on_signals, recorded, run_ranks, runs, simulated, work
from benchmarks.training.runs import parse as parse_training
from benchmarks.training.tasks import OPTIMIZERS, TASKS
from gradcomp.command_line import positive, positive_int


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
    found: dict[str, list[Summary]] = {}
    for task, hooks in by_task.items():
        base = {seed: run["validation_loss"] for seed, run in next(iter(hooks.values())).items()}
        for hook, by_seed in hooks.items():
            first, losses = next(iter(by_seed.values())), [run["validation_loss"] for run in by_seed.values()]
            differences = [loss - base[seed] for seed, loss in zip(by_seed, losses, strict=True)]
            each = Summary(hook, first["bytes_per_step"], first["sent_bytes"], losses, differences)
            found.setdefault(task, []).append(each)
    return found


def tables(rows: Sequence[Row]) -> str:
    """Format a table per task. ± is the standard deviation over the seeds.

    rate: how many times fewer bytes than the first hook sends in fp32.
    """
    lines: list[str] = []
    for task, (baseline, *others) in summaries(rows).items():
        first = next(row for row in rows if row["task"] == task)
        lines += [
            *([""] if lines else []),
            f"{task}: {first['num_parameters']:,} parameters, {first['steps']:,} steps, "
            f"{first['ranks']} ranks, seeds: {len(baseline.losses)}; "
            f"compression after {first['start_powerSGD_iter']} steps",
            f"{'hook':17}{'bytes/step':>11}{'rate':>9}{'MB sent':>9}"
            f"{'validation loss':>18}{'minus ' + baseline.hook:>18}",
        ]
        for hook in (baseline, *others):
            num_bytes = hook.bytes_per_step
            rate = f"{baseline.bytes_per_step / num_bytes:.1f}×" if num_bytes else "∞"
            difference = "" if hook is baseline else mean_and_spread(hook.differences, 3, sign="+")
            lines.append(
                f"{hook.hook:17}{num_bytes:>11,}{rate:>9}{hook.sent_bytes / 1e6:>9.1f}"
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
        for color, (name, points) in zip(cycle([*COLORS[1:-2], COLORS[-1]]), lines.items(), strict=False):
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=name)
        axes.set(xscale="log", xlabel="parameters", ylabel="loss added, nats per byte")
        label_decades(axes.xaxis)
        axes.legend(frameon=False, fontsize="small")


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
    print("\n" + tables(rows))
    print(f"\nEvery run: {options.results}")
    rows = [row for row in read(options.results) if row["options"]["optimizer"] == options.optimizer]
    write_picture(draw, rows, options.out / "accuracy.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
