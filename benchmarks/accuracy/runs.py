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
from gradcomp.hooks import powerSGD_hook

POWERSGD = {"powersgd": powerSGD_hook.powerSGD_hook, "batched": powerSGD_hook.batched_powerSGD_hook}
# What factors, and whatever is not compressed, are sent in.
FACTORS: dict[str, dict[str, torch.dtype]] = {
    "": {},
    "bf16": {"factor_dtype": torch.bfloat16},
    "fp16": {"factor_dtype": torch.float16},
    "int8": {"factor_dtype": torch.int8, "uncompressed_dtype": torch.bfloat16},
}
ALONE = "alone"  # every rank trains by itself
LOCAL = "local"  # every rank trains by itself, but for an average every few dozen steps
OTHERS = ("none", "allreduce", "fp16", "bf16", "int8", "int4", "int4:64", ALONE)
TIMEOUT = timedelta(minutes=5)  # the time after which a rank stops waiting for another


def check_hook_name(hook: str) -> None:
    """Raise ValueError unless ``hook`` is a name that register() takes."""
    name, *given = hook.split(":")
    if name in POWERSGD:
        rank, factors, start, *more = [*given, "", "", ""][: max(3, len(given))]
        is_known = rank.isdecimal() and int(rank) > 0 and factors in FACTORS and not more
        is_known = is_known and start in ("", "start4", "start8")
    elif name == LOCAL:
        try:
            LocalOptions.named(":".join(given))
        except ValueError as error:
            raise ValueError(f"{LOCAL}: {error}") from error
        is_known = True
    else:
        is_known = hook in OTHERS
    if not is_known:
        powersgd = (f"{name}:RANK[:{'|'.join(filter(None, FACTORS))}[:start4|start8]]" for name in POWERSGD)
        known = [*OTHERS, f"{LOCAL}:STEPS[:HOOK][:lr=0.7][:momentum=0.9]", *powersgd]
        raise ValueError(f"there is no {hook!r}; known are {', '.join(known)}")


def register(hook: str, averager: demo.Averager, start_iter: int) -> None:
    """Register a hook that compresses after ``start_iter`` steps.

    "powersgd:4" is PowerSGD of rank 4, "powersgd:4:int8" the same with factors in int8 and the uncompressed
    tensors in bf16, "powersgd:4:int8:start4" that with the first steps in 4 bits. "int4:64" has blocks of
    64 elements.
    """
    name, *given = hook.split(":")
    if name in POWERSGD:
        rank, factors, start = [*given, "", ""][:3]
        bits = int(start.removeprefix("start")) if start else None
        options = {**FACTORS[factors], "start_bits": bits}
        demo.register_power_sgd(averager, POWERSGD[name], int(rank), start_iter, **options)
    elif hook == "int4:64":
        demo.register_quantization(averager, 4, start_iter, block_size=64)
    else:
        demo.HOOKS[name](averager, 0, start_iter)


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
        register(hook, averager, start_iter)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        task.optimizer, lambda step: min((step + 1) / 10, 1) * (1 - step / options.steps)
    )

    def validate() -> float:
        with torch.no_grad():
            loss, accuracy = loss_and_accuracy(task.net, task.validation)
        recorder.add_validation(loss)
        return mean_over_ranks(accuracy).item()

    accuracy = validate()
    for _ in range(options.steps):
        with recorder.step():
            loss, _ = loss_and_accuracy(model, task.draw())
            task.optimizer.zero_grad()
            loss.backward()
            task.optimizer.step()
        schedule.step()
        if local is not None:
            local.step(is_last=len(recorder.step_bytes) == options.steps)
        recorder.losses.append(loss.detach())
        if recorder.is_time_to_validate():
            accuracy = validate()
        recorder.show(label)

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
        "bytes_per_step": result["bytes_per_step"] if local is None else sent_bytes // local.num_counted,
        "sent_bytes": sent_bytes,
        "loss": result["loss"],
        "validation_loss": result["validation_loss"],
        "validation_accuracy": accuracy,
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
