"""quantization_hook beside the 16-bit hooks, on one bucket: int8 and int4 against fp16, ours and torch's.

With one rank nothing crosses a wire: the times are of a hook's own work. With two ranks (on CPU, gloo on
loopback) the other rank is a process with the same hook and gradients, so both compute at once, as in
training. A call begins when both ranks are there. On CPU every provider has processes of its own: see
isolated.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks

from benchmarks.harness import Case, Setup, frobenius_error
from benchmarks.hooks import SHAPES, FakeBucket, Hook, call, join_group_of_one
from gradcomp.hooks import default_hooks
from gradcomp.hooks.quantization_hooks import (
    QuantizationState,
    quantization_hook,
    quantization_pertensor_hook,
)

NUM_ELEMENTS = 25 * 2**20 // 4
# The norm of the error, over that of normal gradients, that two roundings to 4 bits leave.
MAX_ERROR = 0.2
TIMEOUT = timedelta(seconds=60)
# By provider: the hook, and what makes its state.
HOOKS: dict[str, tuple[Hook, Callable[[], Any]]] = {
    "int8": (quantization_hook, partial(QuantizationState, bits=8)),
    "int4": (quantization_hook, partial(QuantizationState, bits=4)),
    "pertensor": (quantization_pertensor_hook, lambda: None),
    "fp16": (default_hooks.fp16_compress_hook, lambda: None),
    "torch_fp16": (torch_hooks.fp16_compress_hook, lambda: None),
}


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    on_cpu = device.type == "cpu"
    for world_size in (1, 2) if on_cpu else (1,):
        yield Case(
            "quantization_hook",
            label=f"25 MiB bucket, W={world_size}",
            dtype="float32",
            num_bytes=NUM_ELEMENTS * (4 + 4),
            max_error=MAX_ERROR,
            baseline="torch_fp16",
            build=partial(_build, device, world_size),
            error_of=frobenius_error,
            num_elements=NUM_ELEMENTS,
            isolated=tuple(HOOKS) if on_cpu else (),
            comes_first=world_size == 1,
        )


def _build(device: torch.device, world_size: int) -> Setup:
    if world_size == 1:
        join_group_of_one(device)
    bucket = FakeBucket(SHAPES, device)
    buffer = bucket.buffer()
    gradient = buffer.clone()
    steps = {name: _step_of(name, bucket) for name in HOOKS}
    if world_size > 1:
        steps = {name: _WithPeer(name, step) for name, step in steps.items()}
    return Setup(
        providers=steps, reference=lambda: [gradient.double()], restore=lambda: buffer.copy_(gradient)
    )


def _step_of(name: str, bucket: FakeBucket) -> Callable[[], list[torch.Tensor]]:
    hook, make_state = HOOKS[name]
    state: list[object] = []  # made in the first call, when the process group is there

    def step() -> list[torch.Tensor]:
        if not state:
            state.append(make_state())
        return call(hook, bucket, state[0])

    return step


class _WithPeer:
    """A provider on two ranks. The first call starts the other rank, which ends with this process."""

    def __init__(self, name: str, step: Callable[[], list[torch.Tensor]]):
        self._name, self._step = name, step

    def __call__(self) -> list[torch.Tensor]:
        if not dist.is_initialized():
            self._folder = tempfile.TemporaryDirectory(prefix="gradcomp-")
            store = Path(self._folder.name, "store")
            command = [sys.executable, "-m", "benchmarks.quantized_hooks", self._name, str(store)]
            subprocess.Popen(command, cwd=Path(__file__).parents[1], stderr=subprocess.DEVNULL)
            _join(store, rank=0)
        _meet()
        return self._step()


def _join(store: Path, rank: int) -> None:
    # The ranks share the cores, as under torchrun.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), 2), rank=rank, timeout=TIMEOUT, world_size=2
    )


def _meet() -> None:
    dist.all_reduce(torch.zeros(1))


def _be_peer(name: str, store: str) -> None:
    """Run a provider's steps as the second rank. Raises RuntimeError when the first rank is gone."""
    torch.manual_seed(0)  # as in isolated.py: the same gradients
    _join(Path(store), rank=1)
    step = _step_of(name, FakeBucket(SHAPES, torch.device("cpu")))
    while True:
        _meet()
        step()


if __name__ == "__main__":
    _be_peer(*sys.argv[1:])
