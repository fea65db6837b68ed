"""Trainings with every hook from every seed: their options and processes, a rank's runs, their histories."""

import argparse
import gc
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from benchmarks.environment import describe
from benchmarks.records import Row, append, read
from benchmarks.training.averaging import ALONE, SHARDED, Averaged, check_name, split_rate
from benchmarks.training.tasks import MIN_STEPS, TASKS, loss_of
from benchmarks.training.wire import SimulatedWire, Wire
from gradcomp.comm.exchange import GIVEN
from gradcomp.command_line import positive_int

SHOW_EVERY_S = 2.0


class Recorder:
    """The history of one run.

    num_validations: after as many parts of the steps, about.
    is_alone: the ranks don't communicate.
    """

    def __init__(self, steps: int, num_validations: int, is_alone: bool, device: Any) -> None:
        self.steps, self.is_alone = steps, is_alone
        self.every = max(2, steps // num_validations)
        # Not a list: small tensors that stay keep the memory freed between them from being used again.
        self.losses = torch.zeros(steps, device=device)
        self.step_bytes: list[int] = []
        self.step_s: list[float] = []
        self.validation_losses: list[tuple[int, float]] = []
        self._shown_at = -math.inf

    def show(self, label: str) -> None:
        """Print rank 0's progress: after the last step, and at most every two seconds before."""
        step, now = len(self.step_bytes), time.monotonic()
        if dist.get_rank() != 0 or (now < self._shown_at + SHOW_EVERY_S and step < self.steps):
            return
        self._shown_at = now
        print(
            f"{label:12} step {step:>{len(str(self.steps))}}/{self.steps}   loss {self.losses[step - 1]:.3f}"
            f"   validation {self.validation_losses[-1][1]:.3f}   {self.step_bytes[-1]:,} B/step",
            flush=True,
        )

    def result(self) -> dict:
        """Return summary and history, with losses averaged over the ranks. Every rank must call it."""
        if not (self.step_bytes[-1] or self.is_alone):
            raise RuntimeError(
                "a step handed 0 bytes to collectives: the hook does not communicate, or bypasses torch's "
                "dispatcher"
            )
        return {
            "bytes_per_step": self.step_bytes[-1],
            # In the first half DDP rebuilds its buckets, and caches fill.
            "ms_per_step": statistics.mean(self.step_s[self.steps // 2 :]) * 1e3,
            "validation_loss": self.validation_losses[-1][1],
            "losses": mean_over_ranks(self.losses).tolist(),
            "validation_losses": self.validation_losses,
            "step_bytes": self.step_bytes,
            "step_s": self.step_s,
        }


def mean_over_ranks(values: Tensor) -> Tensor:
    """Average ``values`` over the ranks; a collective."""
    values = values.clone()
    dist.all_reduce(values)
    return values / dist.get_world_size()


def check_replicas(parameters: list[Tensor]) -> None:
    """Raise RuntimeError unless every rank holds the same fp32 parameters, bit for bit."""
    bits = torch.cat([parameter.detach().flatten() for parameter in parameters]).view(torch.int32)
    lowest, highest = bits.clone(), bits.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    if differing := int((lowest != highest).sum()):
        raise RuntimeError(
            f"{differing} of {bits.numel()} parameters differ between the ranks after training: the hook has "
            "given the ranks different gradients, or they run on unlike CPUs (docs/powersgd.md)"
        )


TIMEOUT = timedelta(minutes=5)  # the time after which a rank stops waiting for another
BUCKET_CAP_MB = 1  # so that there are several buckets
# The options, beside the task, the hook and the seed, on which a run's result depends.
OPTIONS = ("ranks", "steps", "tokens_per_parameter", "width", "layers", "heads", "batch", "sequence")
OPTIONS += ("optimizer",)
PROBE_STEPS, USED_PART = 20, 0.9  # of options.minutes
PER_STEP = ("losses", "step_bytes", "step_s")  # lists in a row


def runs(options: argparse.Namespace) -> Iterator[tuple[int, str, str]]:
    """Yield (seed, task, hook) of every run, seed by seed, so that stopping early leaves finished seeds."""
    return product(range(options.seed, options.seed + options.seeds), options.tasks, options.hooks)


def recorded(options: argparse.Namespace) -> dict[tuple[int, str, str], Row]:
    """Return the rows in ``options.results`` of runs with these options, by seed, task and hook."""
    rows = read(options.results) if options.results.exists() else []
    known = [row for row in rows if row["options"] == options_of(options)]
    return {(row["seed"], row["task"], row["hook"]): row for row in known}


def options_of(options: argparse.Namespace) -> dict[str, object]:
    return {name: getattr(options, name) for name in OPTIONS}


def train(
    label: str, task_name: str, hook: str, seed: int, options: argparse.Namespace, device: torch.device,
    wire: Wire | SimulatedWire,
) -> Row:  # fmt: skip
    """Train once, and return the row to record. Every rank must call it.

    The learning rate rises for the task's warm-up, and falls to 0.
    """
    task = TASKS[task_name](options, seed, dist.get_rank(), dist.get_world_size())
    name, learning_rate = split_rate(hook)
    task.net.to(device)
    validation = [each.to(device) for each in task.validation]
    on_cuda = device.type == "cuda"
    if on_cuda:
        task.net.compile()
    recorder = Recorder(task.steps, options.validations, name == ALONE, device)
    start_iter = recorder.every
    averaged = Averaged(task.net, name, start_iter, BUCKET_CAP_MB)
    optimizers = task.optimizers(task.net, task.learning_rate if learning_rate is None else learning_rate)

    def rate(step: int) -> float:
        return min((step + 1) / task.warmup_steps, 1) * (1 - step / task.steps)

    schedules = [torch.optim.lr_scheduler.LambdaLR(each, rate) for each in optimizers]
    half = partial(torch.autocast, device.type, torch.bfloat16, enabled=on_cuda)
    computed = half()(lambda inputs, classes: loss_of(averaged.model(inputs), classes))
    if averaged.auto is not None:  # a trial may take more steps than this training has
        draw = TASKS[task_name](options, seed, dist.get_rank(), dist.get_world_size()).draw
        while averaged.auto.choice is None:
            computed(*(each.to(device) for each in draw())).backward()
            task.net.zero_grad()

    def validate() -> None:
        with torch.no_grad(), half():
            logits = task.net(validation[0])
        mean = mean_over_ranks(loss_of(logits, validation[1])).item()
        recorder.validation_losses.append((len(recorder.step_bytes), mean))
        if name.startswith(SHARDED):
            task.net.reshard()  # as at the end of backward, so that every step gathers it

    validate()
    for step in range(task.steps):
        inputs, classes = (each.to(device) for each in task.draw())
        before, started = wire.num_bytes, time.perf_counter()
        loss = computed(inputs, classes)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()  # the hook runs in here, once per bucket
        for optimizer in optimizers:
            optimizer.step()
        averaged.end_step(step + 1, task.steps)
        recorder.step_s.append(time.perf_counter() - started)
        recorder.step_bytes.append(round(wire.num_bytes - before))
        for schedule in schedules:
            schedule.step()
        recorder.losses[step] = loss.detach()
        if (step + 1) % recorder.every == 0 or step + 1 == task.steps:
            validate()
        recorder.show(label)
    if name != ALONE:
        check_replicas(averaged.weights())
    result = recorder.result()
    sent_bytes = sum(result["step_bytes"])
    if averaged.local is not None:
        result["bytes_per_step"] = sent_bytes // task.steps
    return {
        "task": task_name,
        "hook": hook,
        "seed": seed,
        "steps": task.steps,
        "start_powerSGD_iter": start_iter,
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "link": options.link and str(options.link),
        "num_parameters": sum(parameter.numel() for parameter in task.net.parameters()),
        "sent_bytes": sent_bytes,
        **result,
        "choice": averaged.auto and averaged.auto.choice,
        "options": options_of(options),
    }


def work(rank: int, store: str, options: argparse.Namespace) -> None:
    """Join the gloo group as rank ``rank`` through the file ``store``, and train every run."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.ranks))
    if options.link is None:
        # A busy machine looks like links with a delay, on which hooks send more bytes at once.
        os.environ.setdefault(GIVEN, "0")
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.ranks, timeout=TIMEOUT)
    with Wire(options.link) as wire:
        train_all(rank, options, torch.device("cpu"), wire)
    dist.destroy_process_group()


def simulated(rank: int, _: dist.ProcessGroup, options: argparse.Namespace) -> None:
    """Train every run as a simulated rank of gradcomp.testing.run_ranks, on options.device."""
    # On CUDA, too, backward and its hooks run on this thread, which is the rank.
    with torch.autograd.set_multithreading_enabled(False):
        train_all(rank, options, torch.device(options.device), SimulatedWire())


def train_all(
    rank: int, options: argparse.Namespace, device: torch.device, wire: Wire | SimulatedWire
) -> None:
    """Train every run in the default group. Rank 0 appends each to ``options.results`` as a JSON line."""
    environment = describe(device)
    done = recorded(options)
    todo = [run for run in runs(options) if run not in done]
    dist.barrier()  # no rank reads the file once rank 0 writes
    ends = time.monotonic() + 60 * (options.minutes or math.inf)
    if options.minutes:
        plan(todo, options, device, wire)
    for number, (seed, task, hook) in enumerate(todo, 1):
        label = f"[{number}/{len(todo)}] {task} {hook} seed {seed}"
        row = train(label, task, hook, seed, options, device, wire)
        dropped = () if options.keep_steps else PER_STEP
        if rank == 0:
            kept = {name: value for name, value in row.items() if name not in dropped}
            append(options.results, [{**environment, **kept}])
        gc.collect()  # DDP models are in reference cycles, and keep the group's threads alive
        run_s = row["ms_per_step"] / 1e3 * options.steps
        if options.minutes and mean_over_ranks(torch.tensor(time.monotonic() + run_s - ends)) > 0:
            if rank == 0:
                print(f"The time is up: {len(todo) - number} runs are left out.")
            break


def plan(
    todo: list[tuple[int, str, str]], options: argparse.Namespace, device: torch.device, wire: Any
) -> None:
    """Set options.steps, so that all runs together fill options.minutes. A collective of simulated ranks.

    Each way to average is tried for PROBE_STEPS steps.
    """
    started = time.monotonic()
    probe = {"steps": PROBE_STEPS, "tokens_per_parameter": 0, "validations": 5}
    tried = [
        train(f"probe {hook}", task, hook, seed, argparse.Namespace(**vars(options) | probe), device, wire)
        for seed, task, hook in todo
    ]
    own = [sum(row["ms_per_step"] for row in tried) / 1e3, time.monotonic() - started]
    step_s, used_s = mean_over_ranks(torch.tensor(own, dtype=torch.float64)).tolist()
    # A run validates twice as often as a trial.
    left_s = options.minutes * 60 * USED_PART - used_s - 2 * max(0.0, used_s - PROBE_STEPS * step_s)
    options.steps = max(MIN_STEPS, int(left_s / step_s))
    options.tokens_per_parameter = 0


def run_ranks(work: Callable[..., None], num_ranks: int, *arguments: Any) -> None:
    """Call work(rank, store, *arguments) in a process for each rank; whatever ends this process ends them.

    store: the URL of a file through which the ranks can join a process group.

    Raises torch.multiprocessing's ProcessException when a rank fails, after ending the other ones.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        torch.multiprocessing.spawn(work, (store, *arguments), nprocs=num_ranks, daemon=True)


def exit_on_signals() -> None:
    """Exit on SIGINT, SIGTERM and SIGHUP as Python does by itself at the end of a program."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, **defaults: Any
) -> argparse.Namespace:
    """Parse the arguments of a program, with other defaults; end it with a clear message if they don't fit.

    parser: has the program's own options.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    text = "comma-separated; the others are compared with the first (default: %(default)s)"
    parser.add_argument("--hook", help=text)
    for name, text in (
        ("steps", f"optimizer steps per hook, at least {MIN_STEPS}"),
        ("width", "width of the GPT, a multiple of --heads"),
        ("layers", "its transformer blocks"),
        ("heads", "its attention heads"),
        ("batch", "sequences per rank and step"),
        ("sequence", "bytes per sequence"),
        ("ranks", "processes"),
    ):
        help_text = f"{text} (default: %(default)s)"
        parser.add_argument(f"--{name}", type=positive_int, metavar="N", help=help_text)
    text = "of weights and data (default: %(default)s)"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=text)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: %(default)s)")
    parser.set_defaults(heads=4, sequence=64, **defaults)
    options = parser.parse_args(arguments)
    if options.steps < MIN_STEPS:
        parser.error(f"--steps must be at least {MIN_STEPS} to time any of them: got {options.steps}")
    if options.width % options.heads:
        parser.error(f"--width must be a multiple of --heads: got {options.width} and {options.heads}")
    if options.seed < 0:
        parser.error(f"--seed must not be negative: got {options.seed}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    options.hooks = options.hook.split(",")
    for hook in options.hooks:
        try:
            check_name(split_rate(hook)[0])
        except ValueError as error:
            parser.error(f"--hook: {error}")
    return options
