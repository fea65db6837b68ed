"""One rank: does the jobs that come on stdin, a JSON object a line; rank 0 answers on stdout.

A job is {"job": "steps", ...}, timing steps, {"job": "loss", ...}, training to a validation loss, or
{"job": "link"}, timing all-reduces and the smallest exchange; see the functions of these names.
"""

import gc
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from benchmarks import sharding
from benchmarks.accuracy.local_steps import LocalOptions, local_steps_of
from benchmarks.demo.measure import check_replicas
from benchmarks.demo.wire import Wire
from benchmarks.network.hosts import SENT_BYTES, eth0_counter
from benchmarks.network.report import FLAT
from benchmarks.network.workloads import WORKLOADS, Workload
from gradcomp.comm.nodes import AUTO as TORCHRUNS
from gradcomp.hooks.auto_hook import AutoState, auto_hook
from gradcomp.hooks.named_hooks import NamedHook
from gradcomp.local_steps import LocalSteps

TIMEOUT = timedelta(seconds=60)
WARM_UP_STEPS = 5  # torch's DDP rearranges its buckets after the first; compression starts after the third
START_ITER = 3
MIN_STEPS, MAX_STEPS = 5, 40
MAX_TRIAL_STEPS = 400  # of auto_hook
VALIDATE_EVERY = 5
LINK_BYTES = (1_000, 100_000, 1_000_000, 4_000_000)


TORCHS = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "int8": quantization_hooks.quantization_pertensor_hook,
}


def register_torchs(hook: str, model: Any, start_iter: int) -> None:
    """Register one of torch's own hooks: of TORCHS, or powersgd:RANK."""
    name, _, rank = hook.partition(":")
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, int(rank), start_powerSGD_iter=start_iter)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        model.register_comm_hook(dist.group.WORLD, TORCHS[name])


def register_ours(hook: str, model: Any, start_iter: int) -> None:
    """Register a hook of gradcomp's. With ":flat" at the end of its name, it averages flat."""
    if hook == "noop":
        model.register_comm_hook(None, gradcomp.hooks.debugging_hooks.noop_hook)
    else:
        per_node = 1 if hook.endswith(FLAT) else TORCHRUNS
        NamedHook.named(hook.removesuffix(FLAT)).register(model, start_iter, per_node)


REGISTER = {"gradcomp": register_ours, "torch": register_torchs}
AUTO = "auto"  # the hook that chooses one
LOCAL = "local steps"  # a hook's name is then one of LocalOptions
FSDP2 = "fsdp2"  # a hook's name is then one of benchmarks/sharding.py
WRAPPERS: dict[str, Any] = {"torch": DistributedDataParallel, "gradcomp": gradcomp.DistributedDataParallel}


class Trainer:
    """A workload under a wrapper with a hook."""

    def __init__(self, job: dict[str, Any], start_iter: int) -> None:
        workload, seed = WORKLOADS[job["model"]], job.get("seed", 0)
        self.workload: Workload = workload(dist.get_rank(), dist.get_world_size(), seed)
        self.model: Any = self.workload.net
        self.local: LocalSteps | None = None
        self.auto: AutoState | None = None
        if job["wrapper"] == LOCAL:
            self.local = local_steps_of(self.workload.net, LocalOptions.named(job["hook"]))
        elif job["wrapper"] == FSDP2:
            self.model = sharding.shard(self.workload.net, job["hook"])
            self.workload.make_optimizer()
        else:
            cap_mb = self.workload.bucket_cap_mb
            self.model = WRAPPERS[job["wrapper"]](self.workload.net, bucket_cap_mb=cap_mb)
            if job["hook"] == AUTO:
                self.auto = AutoState(random_seed=job.get("run", job.get("seed", 0)))
                self.model.register_comm_hook(self.auto, auto_hook)
            else:
                REGISTER[job["hooks"]](job["hook"], self.model, start_iter)

    def step(self) -> float:
        """Train one step; return the ms that it took, without drawing the batch."""
        batch = self.workload.draw()
        started = time.perf_counter()
        loss = self.workload.loss(self.model, batch)
        self.workload.optimizer.zero_grad()
        loss.backward()
        self.workload.optimizer.step()
        if self.local is not None:
            self.local.step()
        self.workload.schedule.step()
        return (time.perf_counter() - started) * 1e3


class _Said(logging.Handler):
    """What gradcomp logs last from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""
        logger = logging.getLogger("gradcomp")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


def steps(job: dict[str, Any]) -> dict[str, Any]:
    """Time steps for about job["seconds"]: means in ms, and the bytes that this rank sent per step.

    Not medians: two ranks may be ahead of one another by turns, so that every second step takes longer, and
    of local steps few exchange anything. auto_hook's steps are timed after its choice.
    """
    trainer = Trainer(job, START_ITER)
    every = trainer.local.every if trainer.local is not None else 0
    for _ in range(every or WARM_UP_STEPS):
        trainer.step()
    chosen = {}
    if trainer.auto is not None:
        said = _Said()
        while trainer.auto.choice is None and trainer.auto.iter < MAX_TRIAL_STEPS:
            trainer.step()
        chosen = {"choice": trainer.auto.choice, "said": said.last}
    with Wire() as wire:
        started = time.perf_counter()
        trainer.step()
    # All ranks take as many steps as rank 0 has time for.
    once = time.perf_counter() - started
    num_steps = decided(min(MAX_STEPS, max(MIN_STEPS, round(job["seconds"] / once))))
    if every:
        for _ in range(every - 1):  # to the end of a period
            trainer.step()
        num_steps = 2 * every
    # A rank ends a step when it has received all messages. Its own may still wait to be sent, until all ranks
    # have come to a barrier. noop's ranks wait for one another there only.
    dist.barrier()
    sent = eth0_counter(SENT_BYTES)  # with TCP's and Ethernet's headers
    times_ms = sorted(trainer.step() for _ in range(num_steps))
    dist.barrier()
    sent = eth0_counter(SENT_BYTES) - sent
    return {
        "num_steps": num_steps,
        "step_ms": statistics.mean(times_ms),
        "p20_ms": times_ms[num_steps // 5],
        "p80_ms": times_ms[-1 - num_steps // 5],
        "all_reduce_bytes": wire.num_bytes,
        "sent_bytes_per_step": sent / num_steps,
        **chosen,
    }


def loss(job: dict[str, Any]) -> dict[str, Any]:
    """Train until the mean of the last three validation losses reaches the workload's target.

    Time doesn't count validation. Training ends after job["seconds"] or job["max_steps"] at the latest.
    """
    trainer = Trainer(job, job["start_iter"])
    workload = trainer.workload
    seconds, history, is_done, reached = 0.0, [], False, False
    while not is_done:
        started = time.perf_counter()
        for _ in range(VALIDATE_EVERY):
            trainer.step()
        seconds += time.perf_counter() - started
        history.append((len(history) * VALIDATE_EVERY + VALIDATE_EVERY, seconds, workload.validate()))
        recent = [each for _, _, each in history[-3:]]
        reached = len(recent) == 3 and statistics.mean(recent) <= workload.target_loss
        is_late = seconds >= job["seconds"] or history[-1][0] >= job["max_steps"]
        is_done = bool(decided(reached or is_late))
    check_replicas(list(workload.net.parameters()))
    return {
        "target_loss": workload.target_loss,
        "reached": reached,
        "num_steps": history[-1][0],
        "seconds": seconds,
        "history": history,
    }


def link(job: dict[str, Any]) -> dict[str, Any]:
    """Time the smallest exchange of all ranks, and all-reduces: (bytes, median seconds)."""
    all_reduces = [
        (size, median_seconds(partial(dist.all_reduce, torch.zeros(size // 4)), 3 if size > 10**6 else 11))
        for size in LINK_BYTES
    ]
    return {"exchange_seconds": exchange_seconds(), "all_reduce_seconds": all_reduces}


def exchange_seconds() -> float:
    """Time a message of 8 bytes from every rank to every other one, all at once: the median of nine."""
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    received, sent = torch.zeros(len(others), 8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)

    def exchange() -> None:
        works = [dist.irecv(row, rank) for row, rank in zip(received, others, strict=True)]
        works += [dist.isend(sent, rank) for rank in others]
        for work in works:
            assert work is not None
            work.wait()

    return median_seconds(exchange, 9)


def median_seconds(call: Callable[[], object], num_calls: int) -> float:
    """Time calls after a first one, before which ranks wait for one another."""
    times = []
    for _ in range(1 + num_calls):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


JOBS = {"steps": steps, "loss": loss, "link": link}


def decided(number: int) -> int:
    """Return rank 0's number on every rank."""
    tensor = torch.tensor(number)
    dist.broadcast(tensor, 0)
    return int(tensor)


def take_a_core(rank: int) -> None:
    """Stay on one core, with the threads that start later; more hosts than cores share them."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def hold_gloo_back() -> None:
    """Make gloo's TCP thread wait for the core, so that it doesn't interrupt another thread of this process.

    On a single core it often interrupts the thread that holds a lock. It then tries to take that lock again
    and again, until the kernel's next tick, up to 4 ms later, lets the other thread go on. Where torch gives
    the thread another name, this does nothing.
    """
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "gloo_tcp_loop":
            os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def main() -> None:
    rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    take_a_core(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    hold_gloo_back()
    if rank == 0:
        print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        result = JOBS[job["job"]](job)
        gc.collect()  # DDP models are in reference cycles
        if rank == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
