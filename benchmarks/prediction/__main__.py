"""Predict PowerSGD's time per step on GPUs from bytes and the compiled kernels' instructions.

python -m benchmarks.prediction [--gpu H200] [--model bert-large] [--ranks 1,4,32] [--stages]

Every launch of one step is compiled for the GPU, and threads of some of its programs are followed through the
PTX (see trace.py). A launch is then predicted to take the longest of these, and LAUNCH_US more:

    memory      bytes / bandwidth; a tensor's bytes are counted once for each pass that misses the L2 cache
    issue       instructions / (4 per clock and multiprocessor)
    fp32, fp64  arithmetic / lanes, and matrix products / the tensor cores' rate
    longest     the same for the program that executes most, alone on a multiprocessor

It is an estimate without a GPU, with no cache but L2, no bank conflicts, and no waiting for memory. A run on
a GPU is what counts.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks import models
from benchmarks.prediction.gpus import GPUS, Gpu
from benchmarks.prediction.trace import Counts, Thread
from gradcomp.kernels import powersgd_plan
from gradcomp.kernels.device import FAST_FP64
from gradcomp.layout import LowRankLayout
from tests.kernels.compiled import Variant, is_kernel, kernel_modules

RANKS = (1, 4, 8, 16, 32)
SAMPLES = 6  # programs of a launch that are followed
LAUNCH_US = 2.0  # from the end of one launch on a stream to the work of the next
FLOOR_PASSES = 5  # gradient and M read, M written; M read; gradient written: 20 B per fp32 element
PASSES_OF_CACHED = 2  # of a tensor that stays in L2, at most these reach memory
WARP = 32


@dataclass(frozen=True)
class Launch:
    """One launch as the launcher asks for it."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[int, ...]


@dataclass(frozen=True)
class Prediction:
    """Seconds that a launch takes by what limits it."""

    memory: float
    issue: float
    fp32: float
    fp64: float
    tensor: float
    longest: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.issue, self.fp32, self.fp64, self.tensor, self.longest) + LAUNCH_US / 1e6

    @property
    def limit(self) -> str:
        """What takes the longest."""
        return max(vars(self), key=lambda name: vars(self)[name])


class Recorder:
    """Stands in for a kernel, and notes its launches."""

    def __init__(self, kernel: Any, launches: list[Launch]):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*positional: Any, **keywords: Any) -> None:
            names = [parameter.name for parameter in self.kernel.params]
            arguments = dict(zip(names, positional, strict=False))
            arguments |= {name: keywords.pop(name) for name in list(keywords) if name in names}
            self.launches.append(Launch(self.kernel, arguments, keywords, grid))

        return launch


def launches_of(layout: LowRankLayout, dtype: torch.dtype, architecture: int = 80) -> list[Launch]:
    """Return the launches of one step of PowerSGD on a bucket, on a GPU of this compute capability."""
    found: list[Launch] = []
    replaced = []
    for module in kernel_modules():
        for name, kernel in vars(module).copy().items():
            if is_kernel(name):
                replaced.append((module, name, kernel))
                setattr(module, name, Recorder(kernel, found))
    is_slow = divmod(architecture, 10) not in FAST_FP64
    try:
        options = {"error_feedback": True, "warm_start": True, "epsilon": 0.0, "seed": 0}
        with mock.patch.object(powersgd_plan, "is_fp64_slow", return_value=is_slow):
            plan = powersgd_plan.LowRankPlan(layout, dtype, torch.device("cpu"), **options)
        buffer = torch.zeros(layout.numel, dtype=dtype)
        found.clear()  # of what is launched once
        plan.project(buffer, 1.0)
        plan.back_project(buffer, 1.0)
        plan.reconstruct(buffer, 0)
    finally:
        for module, name, kernel in replaced:
            setattr(module, name, kernel)
    return found


@cache
def _compiled(key: str, architecture: int) -> Any:
    variant = _variants[key]
    return triton.compile(
        variant.source, target=GPUTarget("cuda", architecture, WARP), options=variant.options
    )


_variants: dict[str, Variant] = {}


def compiled_for(launch: Launch, architecture: int) -> Any:
    """Return the launch's kernel compiled for an architecture."""
    constants = [f"{p.name}={launch.arguments[p.name]}" for p in launch.kernel.params if p.is_constexpr]
    dtypes = [str(value.dtype) for value in launch.arguments.values() if torch.is_tensor(value)]
    key = f"{launch.kernel.__name__} {constants} {dtypes} {launch.options}"
    _variants.setdefault(key, Variant(key, launch.kernel, launch.arguments, launch.options))
    return _compiled(key, architecture)


def counts_of(launch: Launch, compiled: Any, num_samples: int = SAMPLES) -> list[Counts]:
    """Return what thread 0 executes in this many programs of a launch, evenly chosen."""
    values, memory = [], []
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        if torch.is_tensor(value):
            is_table = value.dtype == torch.int64
            memory.append((parameter.name, value.data_ptr(), value.nbytes, is_table))
            values.append(value.data_ptr())
        elif not parameter.is_constexpr:
            values.append(value if isinstance(value, int) else None)
    num_programs = launch.grid[0]
    chosen = sorted({i * (num_programs - 1) // max(num_samples - 1, 1) for i in range(num_samples)})
    return [Thread(compiled.asm["ptx"], values, program, memory).run() for program in chosen]


def predict(launch: Launch, gpu: Gpu) -> Prediction:
    """Predict what one launch takes."""
    compiled = compiled_for(launch, gpu.architecture)
    counts = counts_of(launch, compiled)
    num_warps, num_programs = compiled.metadata.num_warps, launch.grid[0]
    threads = num_warps * WARP
    sizes = {
        p.name: launch.arguments[p.name].nbytes
        for p in launch.kernel.params
        if torch.is_tensor(launch.arguments[p.name])
    }

    def of_programs(each: Counts) -> dict[str, float]:
        """Return the seconds that one program keeps a multiprocessor busy, by unit."""
        instructions = each.instructions
        per_multiprocessor = gpu.num_multiprocessors / gpu.clocks
        tensor = each.matrix_flops["tf32"] / (gpu.tf32_tflops * 1e12) + each.matrix_flops["f64"] / (
            gpu.fp64_tflops * 1e12
        )
        return {
            "issue": instructions["issued"] * num_warps / 4 / gpu.clocks,
            "fp32": instructions["f32"] * threads / gpu.fp32_lanes / gpu.clocks,
            "fp64": instructions["f64"] * threads / gpu.fp64_lanes / gpu.clocks,
            "tensor": tensor * num_warps * per_multiprocessor * gpu.clocks,
        }

    busy = [of_programs(each) for each in counts]
    mean = {name: sum(each[name] for each in busy) / len(busy) for name in busy[0]}
    waves = num_programs / gpu.num_multiprocessors
    num_bytes = 0.0
    for name, size in sizes.items():
        traced = sum(each.global_bytes[name] for each in counts) / len(counts) * threads * num_programs
        num_bytes += min(traced, PASSES_OF_CACHED * size)
    return Prediction(
        memory=num_bytes / (gpu.bandwidth_gbs * 1e9),
        longest=max(max(each.values()) for each in busy),
        **{name: value * waves for name, value in mean.items()},
    )


def step(model: str, rank: int, dtype: torch.dtype, gpu: Gpu) -> dict[str, list[tuple[Prediction, int]]]:
    """Predict every launch of a step on a model's buckets: by kernel, (prediction, number of such
    buckets)."""
    stages: dict[str, list[tuple[Prediction, int]]] = defaultdict(list)
    for shapes, count in distinct(models.buckets(model, dtype)):
        layout = LowRankLayout(shapes, rank, min_compression_rate=2)
        for position, launch in enumerate(launches_of(layout, dtype, gpu.architecture)):
            if launch.grid[0]:
                stages[f"{position + 1} {launch.kernel.__name__.strip('_').removesuffix('_kernel')}"].append(
                    (predict(launch, gpu), count)
                )
    return stages


def distinct(buckets: Sequence[Sequence[models.Shape]]) -> Iterator[tuple[Sequence[models.Shape], int]]:
    """Yield every different bucket, and how often it occurs."""
    counts: dict[tuple[models.Shape, ...], int] = defaultdict(int)
    for shapes in buckets:
        counts[tuple(shapes)] += 1
    yield from counts.items()


def floor_seconds(model: str, dtype: torch.dtype, gpu: Gpu) -> float:
    """Return the time that the gradients' bytes alone take."""
    numel = sum(models.num_elements(shapes) for shapes in models.buckets(model, dtype))
    return numel * dtype.itemsize * FLOOR_PASSES / (gpu.bandwidth_gbs * 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction")
    parser.add_argument("--gpu", choices=[gpu.name for gpu in GPUS], help="default: each")
    parser.add_argument("--model", choices=list(models.MODELS), help="default: each")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--stages", action="store_true", help="every launch, with what limits it")
    options = parser.parse_args()
    gpus = [gpu for gpu in GPUS if options.gpu in (None, gpu.name)]
    print("*predicted* milliseconds of a step, fp32 with error feedback, and times the byte floor")
    for model in [options.model] if options.model else models.MODELS:
        for rank in map(int, options.ranks.split(",")):
            for gpu in gpus:
                show(model, rank, gpu, options.stages)
                sys.stdout.flush()


def show(model: str, rank: int, gpu: Gpu, with_stages: bool) -> None:
    stages = step(model, rank, torch.float32, gpu)
    total = sum(each.seconds * count for found in stages.values() for each, count in found)
    floor = floor_seconds(model, torch.float32, gpu)
    print(f"{model:12} r={rank:<3} {gpu.name:10} {total * 1e3:8.2f} ms  {total / floor:5.2f}×")
    if with_stages:
        for name, found in stages.items():
            seconds = sum(each.seconds * count for each, count in found)
            limits = defaultdict(float)
            for each, count in found:
                limits[each.limit] += each.seconds * count
            print(f"    {name:24} {seconds * 1e3:8.2f} ms  by {max(limits, key=lambda name: limits[name])}")


if __name__ == "__main__":
    main()
