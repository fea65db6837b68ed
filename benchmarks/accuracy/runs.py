"""One rank's runs: train every task with every hook from every seed."""

import argparse
import gc
import os
from collections.abc import Iterator
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from benchmarks.accuracy.local_steps import LocalOptions, LocalTraining
from benchmarks.accuracy.tasks import TASKS, loss_and_accuracy
from benchmarks.demo import train as demo
from benchmarks.demo.measure import Recorder, check_replicas, mean_over_ranks
from benchmarks.environment import describe
from benchmarks.records import append
from gradcomp.hooks.named_hooks import NamedHook

ALONE = "alone"  # every rank trains by itself
LOCAL = "local"  # every rank trains by itself, but for an average every few dozen steps
TIMEOUT = timedelta(minutes=5)  # the time after which a rank stops waiting for another


def check_run_name(name: str) -> None:
    """Raise ValueError unless a run has this name: "alone", "local:STEPS...", or a hook's name."""
    kind, _, rest = name.partition(":")
    if kind == LOCAL:
        try:
            LocalOptions.named(rest)
        except ValueError as error:
            raise ValueError(f"{LOCAL}: {error}") from error
    elif name != ALONE:
        NamedHook.named(name)


def runs(options: argparse.Namespace) -> Iterator[tuple[int, str, str]]:
    """Yield (seed, task, hook) of every run, seed by seed, so that stopping early leaves finished seeds."""
    seeds = range(options.seed, options.seed + options.seeds)
    return product(seeds, options.tasks, options.hooks)


def train(label: str, task_name: str, hook: str, seed: int, options: argparse.Namespace) -> dict[str, object]:
    """Train once, and return the row to record. Every rank must call it."""
    task = TASKS[task_name](options, seed, dist.get_rank(), dist.get_world_size())
    kind, *given = hook.split(":")
    is_alone = kind in (ALONE, LOCAL)
    local = None
    if kind == LOCAL:
        local = LocalTraining(task.net, LocalOptions.named(":".join(given)))
    recorder = Recorder(options.steps, torch.device("cpu"), is_alone=is_alone)
    start_iter = recorder.every  # a tenth of the run, and a step whose bytes are counted
    model = task.net
    if not is_alone:
        model, averager = demo.with_reducer(task.net, options.reducer)
        NamedHook.named(hook).register(averager, start_iter)
    accuracies: list[float] = []

    def validate() -> torch.Tensor:
        loss, accuracy = loss_and_accuracy(task.net, task.validation)
        accuracies.append(mean_over_ranks(accuracy).item())
        return loss

    def after_step() -> None:
        if local is not None:
            local.step(is_last=len(recorder.step_bytes) == options.steps)

    demo.train_steps(
        label,
        recorder,
        task.optimizer,
        lambda: loss_and_accuracy(model, task.draw())[0],
        validate,
        after_step,
    )
    if kind != ALONE:
        check_replicas(list(task.net.parameters()))
    result = recorder.result()
    sent_bytes = sum(result["step_bytes"]) if local is None else local.sent_bytes
    return {
        "task": task_name,
        "hook": hook,
        "seed": seed,
        "steps": options.steps,
        "start_powerSGD_iter": start_iter,
        "ranks": dist.get_world_size(),
        "reducer": options.reducer,
        "num_parameters": sum(parameter.numel() for parameter in task.net.parameters()),
        "bytes_per_step": result["bytes_per_step"] if local is None else sent_bytes // options.steps,
        "sent_bytes": sent_bytes,
        "loss": result["loss"],
        "validation_loss": result["validation_loss"],
        "validation_accuracy": accuracies[-1],
        "validation_losses": result["validation_losses"],
    }


def work(rank: int, store: str, options: argparse.Namespace) -> None:
    """Join the gloo group as rank ``rank`` through the file ``store``, and train every run.

    Rank 0 appends each run to ``options.results`` as a JSON line.
    """
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.ranks))
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.ranks, timeout=TIMEOUT)
    environment = describe(torch.device("cpu"))
    todo = list(runs(options))
    for number, (seed, task, hook) in enumerate(todo, 1):
        label = f"[{number}/{len(todo)}] {task} {hook} seed {seed}"
        row = train(label, task, hook, seed, options)
        if rank == 0:
            append(options.results, [{**environment, **row}])
        gc.collect()  # DDP models are in reference cycles
    dist.destroy_process_group()
