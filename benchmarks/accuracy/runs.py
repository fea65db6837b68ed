"""One rank's runs: train every task with every hook from every seed."""

import argparse
import gc
import os
from collections.abc import Iterator
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import sharding
from benchmarks.accuracy.local_steps import LocalOptions, LocalTraining
from benchmarks.accuracy.tasks import TASKS, loss_and_accuracy
from benchmarks.demo import train as demo
from benchmarks.demo.measure import Recorder, check_replicas, mean_over_ranks
from benchmarks.demo.wire import Wire
from benchmarks.environment import describe
from benchmarks.records import append, read
from gradcomp.comm.exchange import GIVEN
from gradcomp.hooks.named_hooks import NamedHook

ALONE = "alone"  # every rank trains by itself
LOCAL = "local"  # every rank trains by itself, but for an average every few dozen steps
SHARDED = "fsdp2"
TIMEOUT = timedelta(minutes=5)  # the time after which a rank stops waiting for another


# The options, beside the task, the hook and the seed, on which a run's result depends.
OPTIONS = ("ranks", "steps", "tokens_per_parameter", "width", "layers", "heads", "batch", "sequence")


def parse_run_name(name: str) -> tuple[str, LocalOptions | None, float | None]:
    """Parse a run's name: "alone", "local:STEPS...", "fsdp2:WEIGHTS:GRADIENTS" or a hook's name.

    ":lr=..." may follow.

    Returns (the hook's name or "alone", the settings of local steps, the learning rate). Raises ValueError
    for another name.
    """
    name, has_rate, rate = name.partition(":lr=")
    learning_rate = float(rate) if has_rate else None
    kind, _, rest = name.partition(":")
    if kind == LOCAL:
        try:
            local = LocalOptions.named(rest)
        except ValueError as error:
            raise ValueError(f"{LOCAL}: {error}") from error
        return local.hook, local, learning_rate
    if kind == SHARDED:
        sharding.parse(rest)
    elif name != ALONE:
        NamedHook.named(name)
    return name, None, learning_rate


def runs(options: argparse.Namespace) -> Iterator[tuple[int, str, str]]:
    """Yield (seed, task, hook) of every run, seed by seed, so that stopping early leaves finished seeds."""
    seeds = range(options.seed, options.seed + options.seeds)
    return product(seeds, options.tasks, options.hooks)


def recorded(options: argparse.Namespace) -> dict[tuple[int, str, str], dict]:
    """Return the rows in ``options.results`` of runs with these options, by seed, task and hook."""
    if not options.results.exists():
        return {}
    return {
        (row["seed"], row["task"], row["hook"]): row
        for row in read(options.results)
        if row["options"] == options_of(options)
    }


def options_of(options: argparse.Namespace) -> dict[str, object]:
    return {name: getattr(options, name) for name in OPTIONS}


def train(
    label: str, task_name: str, hook: str, seed: int, options: argparse.Namespace, wire: Wire
) -> dict[str, object]:
    """Train once, and return the row to record. Every rank must call it."""
    task = TASKS[task_name](options, seed, dist.get_rank(), dist.get_world_size())
    hook_name, local_options, learning_rate = parse_run_name(hook)
    kind, _, rest = hook_name.partition(":")
    if learning_rate is not None:
        task.optimizer.param_groups[0]["lr"] = learning_rate
    is_alone = hook_name == ALONE or local_options is not None
    local = None if local_options is None else LocalTraining(task.net, local_options, wire)
    recorder = Recorder(task.steps, torch.device("cpu"), wire, is_alone=is_alone)
    start_iter = recorder.every  # a tenth of the run
    model: nn.Module = task.net
    if kind == SHARDED:
        sharding.shard(task.net, rest, start_iter)
        task.optimizer.param_groups[0]["params"] = list(task.net.parameters())
    elif not is_alone:
        model = DistributedDataParallel(task.net, bucket_cap_mb=demo.BUCKET_CAP_MB)
        NamedHook.named(hook_name).register(model, start_iter)
    accuracies: list[float] = []

    def validate() -> Tensor:
        loss, accuracy = loss_and_accuracy(task.net, task.validation)
        accuracies.append(mean_over_ranks(accuracy).item())
        if kind == SHARDED:
            task.net.reshard()  # as at the end of backward, so that every step gathers it
        return loss

    def after_step() -> None:
        if local is not None:
            local.step(len(recorder.step_bytes), task.steps)

    demo.train_steps(
        label,
        recorder,
        task.optimizer,
        lambda: loss_and_accuracy(model, task.draw())[0],
        validate,
        after_step,
        task.warmup_steps,
    )
    if hook_name != ALONE:
        check_replicas(sharding.unsharded(task.net) if kind == SHARDED else list(task.net.parameters()))
    result = recorder.result()
    sent_bytes = sum(result["step_bytes"]) if local is None else local.sent_bytes
    return {
        "task": task_name,
        "hook": hook,
        "seed": seed,
        "steps": task.steps,
        "start_powerSGD_iter": start_iter,
        "ranks": dist.get_world_size(),
        "num_parameters": sum(parameter.numel() for parameter in task.net.parameters()),
        "bytes_per_step": result["bytes_per_step"] if local is None else sent_bytes // task.steps,
        "sent_bytes": sent_bytes,
        "loss": result["loss"],
        "validation_loss": result["validation_loss"],
        "validation_accuracy": accuracies[-1],
        "validation_losses": result["validation_losses"],
        "options": options_of(options),
    }


def work(rank: int, store: str, options: argparse.Namespace) -> None:
    """Join the gloo group as rank ``rank`` through the file ``store``, and train every run.

    Rank 0 appends each run to ``options.results`` as a JSON line.
    """
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.ranks))
    # A busy machine looks like links with a delay, on which hooks send more bytes at once.
    os.environ.setdefault(GIVEN, "0")
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.ranks, timeout=TIMEOUT)
    environment = describe(torch.device("cpu"))
    done = recorded(options)
    todo = [run for run in runs(options) if run not in done]
    dist.barrier()  # no rank reads the file once rank 0 writes
    with Wire() as wire:
        for number, (seed, task, hook) in enumerate(todo, 1):
            label = f"[{number}/{len(todo)}] {task} {hook} seed {seed}"
            row = train(label, task, hook, seed, options, wire)
            if rank == 0:
                append(options.results, [{**environment, **row}])
            gc.collect()  # DDP models are in reference cycles
    dist.destroy_process_group()
