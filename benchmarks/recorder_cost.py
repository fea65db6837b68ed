"""Time a Recorder's part of a training step on a CPU: python -m benchmarks.recorder_cost.

One process trains a multilayer perceptron on gradcomp's wrapper: one model per hook and way to record, in
turns, so that disturbances hit all of them. The world size is 1: nothing crosses a wire, so the recorder's
part of a step is as large as it can be. The times are one thread's CPU time, which other programs disturb
little. Prints medians, p20 and p80 in ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradcomp import DistributedDataParallel
from gradcomp.compress import Recorder
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook

START = 2
HOOKS: dict[str, tuple[Callable[[], Any], Any]] = {
    "PowerSGD, rank 4": (lambda: PowerSGDState(None, 4, START), powerSGD_hook),
    "4 bits": (lambda: QuantizationState(bits=4, start_iter=START), quantization_hook),
}
WAYS: dict[str, int | None] = {"without": None, "every=1": 1, "every=10": 10}
BATCH, WIDTH, HIDDEN = 64, 256, 1024


def step_of(name: str, every: int | None) -> Callable[[], None]:
    """Return a function that trains one step with a hook."""
    torch.manual_seed(0)
    make_state, hook = HOOKS[name]
    layers = [
        nn.Linear(WIDTH, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, WIDTH),
    ]
    model = DistributedDataParallel(nn.Sequential(*layers))
    state = make_state()
    model.register_comm_hook(state, hook)
    if every is not None:
        Recorder(state, every=every)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()

    return step


def times_ms(name: str, num_steps: int) -> dict[str, list[float]]:
    """Return the times of the steps of each way to record; the ways take turns of ten steps."""
    steps = {way: step_of(name, every) for way, every in WAYS.items()}
    for step in steps.values():
        for _ in range(START + 8):  # the recorders' steps 0 to 9
            step()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(-(-num_steps // 10)):
        for way, step in steps.items():
            start = time.process_time()
            for _ in range(10):
                step()
            found[way].append((time.process_time() - start) * 100)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recorder_cost", description=__doc__)
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="per hook and way (default: 300)")
    options = parser.parse_args(arguments)
    os.environ["GRADCOMP_QUIET"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("ms of processor time per step, one thread; of means of ten steps, the median (p20 to p80)")
    for name in HOOKS:
        for way, samples in times_ms(name, options.steps).items():
            p20, *_, p80 = statistics.quantiles(samples, n=5) if len(samples) > 1 else samples * 2
            print(f"{name:<18}{way:<10}{statistics.median(samples):8.2f} ({p20:.2f} to {p80:.2f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
