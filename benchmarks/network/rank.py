"""One rank: does the jobs that come on stdin, a JSON object a line; rank 0 answers on stdout.

A job is {"job": "steps", ...}, timing steps, or {"job": "link"}, timing all-reduces and the smallest
exchange; see the functions of these names.
"""

import gc
import json
import logging
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.network.hosts import SENT_BYTES, eth0_counter
from benchmarks.network.report import name_of
from benchmarks.training.averaging import Averaged
from benchmarks.training.tasks import Batch, Task, adamw, loss_of
from benchmarks.training.tasks import gpt as gpt_task
from benchmarks.training.wire import Wire

MLP_BATCH = 64  # per rank
MAX_SHIFT = 3  # pixels
GPT = Namespace(width=128, layers=4, heads=4, sequence=64, batch=8, steps=0, learning_rate=1e-3)


def mlp(rank: int, ranks: int) -> Task:
    """Make 784-1024-1024-10 for images of 28×28: 1,863,690 parameters, in two of DDP's buckets.

    The images are enlarged, and moved by up to three pixels each time. Raises ImportError without
    scikit-learn.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    small = torch.from_numpy(data.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(data.target).long()
    images = functional.interpolate(small, size=28, mode="bilinear").squeeze(1)
    num_training = len(images) - 359  # the last ones are held out
    padded = functional.pad(images[:num_training], (MAX_SHIFT,) * 4)
    generator = torch.Generator().manual_seed(rank)
    pixels = torch.arange(28)

    def draw() -> Batch:
        chosen = torch.randint(num_training, (MLP_BATCH,), generator=generator)
        top, left = torch.randint(2 * MAX_SHIFT + 1, (2, MLP_BATCH, 1), generator=generator)
        rows, columns = (top + pixels).unsqueeze(2), (left + pixels).unsqueeze(1)
        return padded[chosen[:, None, None], rows, columns].flatten(1), labels[chosen]

    torch.manual_seed(0)
    hidden = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    net = nn.Sequential(*hidden, nn.Linear(1024, 10))
    validation = images[num_training:].flatten(1), labels[num_training:]
    return Task(net, adamw, 1e-3, draw, validation, steps=0)


def gpt(rank: int, ranks: int) -> Task:
    """Make the demo's GPT: 867,072 parameters, next bytes of Python's standard library."""
    return gpt_task(GPT, 0, rank, ranks)


WORKLOADS: dict[str, Callable[[int, int], Task]] = {"mlp": mlp, "gpt": gpt}


TIMEOUT = timedelta(seconds=60)
WARM_UP_STEPS = 5  # torch's DDP rearranges its buckets after the first; compression starts after the third
START_ITER = 3
MIN_STEPS, MAX_STEPS = 5, 40
MAX_TRIAL_STEPS = 500  # of auto_hook, with four times its rounds
LINK_BYTES = (1_000, 100_000, 1_000_000, 4_000_000)


def train_step(task: Task, averaged: Averaged, optimizer: torch.optim.Optimizer) -> float:
    """Train one step; return the ms that it took, without drawing the batch."""
    inputs, classes = task.draw()
    started = time.perf_counter()
    loss = loss_of(averaged.model(inputs), classes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if averaged.local is not None:
        averaged.local.step()
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
    task = WORKLOADS[job["model"]](dist.get_rank(), dist.get_world_size())
    averaged = Averaged(task.net, name_of(job), START_ITER, auto_options={"random_seed": job["run"]})
    # One pass, where the default takes eleven, longer than forward and backward of the MLP.
    optimizer = torch.optim.AdamW(task.net.parameters(), lr=1e-3, fused=True)
    step = partial(train_step, task, averaged, optimizer)
    every = averaged.local.every if averaged.local is not None else 0
    for _ in range(every or WARM_UP_STEPS):
        step()
    chosen = {}
    if averaged.auto is not None:
        said = _Said()
        while averaged.auto.choice is None and averaged.auto.iter < MAX_TRIAL_STEPS:
            step()
        chosen = {"choice": averaged.auto.choice, "said": said.last}
    with Wire() as wire:
        started = time.perf_counter()
        step()
    # All ranks take as many steps as rank 0 has time for.
    once = time.perf_counter() - started
    num_steps = decided(min(MAX_STEPS, max(MIN_STEPS, round(job["seconds"] / once))))
    if every:
        for _ in range(every - 1):  # to the end of a period
            step()
        num_steps = 2 * every
    # A rank ends a step when it has received all messages. Its own may still wait to be sent, until all ranks
    # have come to a barrier. noop's ranks wait for one another there only.
    dist.barrier()
    sent = eth0_counter(SENT_BYTES)  # with TCP's and Ethernet's headers
    times_ms = sorted(step() for _ in range(num_steps))
    dist.barrier()
    sent = eth0_counter(SENT_BYTES) - sent
    return {
        "num_steps": num_steps,
        "step_ms": statistics.mean(times_ms),
        "p20_ms": times_ms[num_steps // 5],
        "p80_ms": times_ms[-1 - num_steps // 5],
        "all_reduce_bytes": round(wire.num_bytes),
        "sent_bytes_per_step": sent / num_steps,
        **chosen,
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
        result = {"steps": steps, "link": link}[job["job"]](job)
        gc.collect()  # DDP models are in reference cycles
        if rank == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
