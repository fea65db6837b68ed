"""The launches of a step of PowerSGD, compiled for a GPU, and what each is predicted to take."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.prediction.gpus import Gpu
from benchmarks.prediction.trace import Counts, Thread
from gradcomp.kernels.device import FAST_FP64
from gradcomp.kernels.powersgd import plan as powersgd_plan
from gradcomp.layout import LowRankLayout
from tests.kernels.compiled import Variant, is_kernel, kernel_modules

SAMPLES = 6  # programs of a launch that are followed
LAUNCH_US = 2.0  # from the end of one launch on a stream to the work of the next
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


def num_bytes_of(launch: Launch, counts: Sequence[Counts], threads: int) -> float:
    """Return the bytes that a launch of programs of this many threads moves to and from memory."""
    num_bytes = 0.0
    for name, tensor in launch.arguments.items():
        if torch.is_tensor(tensor):
            traced = sum(each.global_bytes[name] for each in counts) / len(counts) * threads * launch.grid[0]
            num_bytes += min(traced, PASSES_OF_CACHED * tensor.nbytes)
    return num_bytes


def predict(launch: Launch, gpu: Gpu) -> Prediction:
    """Predict what one launch takes."""
    compiled = compiled_for(launch, gpu.architecture)
    counts = counts_of(launch, compiled)
    num_warps, num_programs = compiled.metadata.num_warps, launch.grid[0]
    threads = num_warps * WARP

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
    return Prediction(
        memory=num_bytes_of(launch, counts, threads) / (gpu.bandwidth_gbs * 1e9),
        longest=max(max(each.values()) for each in busy),
        **{name: value * waves for name, value in mean.items()},
    )
