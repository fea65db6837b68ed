"""One rank's runs: train every task with every hook from every seed."""

import argparse
import gc
import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.environment import describe
from benchmarks.records import Row, append, read
from benchmarks.training.averaging import ALONE, SHARDED, Averaged
from benchmarks.training.history import Recorder, check_replicas, mean_over_ranks
from benchmarks.training.options import MIN_STEPS, split_rate
from benchmarks.training.tasks import TASKS, loss_of
from benchmarks.training.wire import SimulatedWire, Wire
from gradcomp.comm.exchange import GIVEN

TIMEOUT = timedelta(minutes=5)  # the time after which a rank stops waiting for another
BUCKET_CAP_MB = 1  # so that there are several buckets
# The options, beside the task, the hook and the seed, on which a run's result depends.
OPTIONS = ("ranks", "steps", "tokens_per_parameter", "width", "layers", "heads", "batch", "sequence")
OPTIONS += ("optimizer",)
PROBE_STEPS, USED_PART = 20, 0.9  # of options.minutes
PER_STEP = ("losses", "step_bytes", "step_s")  # lists in a row


def runs(options: argparse.Namespace) -> Iterator[tuple[int, str, str]]:
    """Yield (seed, task, hook) of every run, seed by seed, so that stopping early leaves finished seeds."""
    seeds = range(options.seed, options.seed + options.seeds)
    return product(seeds, options.tasks, options.hooks)


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
    recorder = Recorder(task.steps, wire, options.validations, is_alone=name == ALONE)
    start_iter = recorder.every
    auto_options = {"start_iter": start_iter, "rounds": 1}  # a short trial, for a short run
    averaged = Averaged(task.net, name, start_iter, BUCKET_CAP_MB, auto_options)
    optimizers = task.optimizers(task.net, task.learning_rate if learning_rate is None else learning_rate)

    def rate(step: int) -> float:
        return min((step + 1) / task.warmup_steps, 1) * (1 - step / task.steps)

    schedules = [torch.optim.lr_scheduler.LambdaLR(each, rate) for each in optimizers]
    half = partial(torch.autocast, device.type, torch.bfloat16, enabled=on_cuda)

    def validate() -> None:
        with torch.no_grad(), half():
            logits = task.net(validation[0])
        recorder.add_validation(loss_of(logits, validation[1]))
        if name.startswith(SHARDED):
            task.net.reshard()  # as at the end of backward, so that every step gathers it

    validate()
    for step in range(task.steps):
        inputs, classes = (each.to(device) for each in task.draw())
        with recorder.step():
            with half():
                loss = loss_of(averaged.model(inputs), classes)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()  # the hook runs in here, once per bucket
            for optimizer in optimizers:
                optimizer.step()
            averaged.end_step(step + 1, task.steps)
        for schedule in schedules:
            schedule.step()
        recorder.losses.append(loss.detach())
        if recorder.is_time_to_validate():
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
