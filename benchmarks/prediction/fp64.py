"""How much fp64 each launch of a step executes, beside the memory that it moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks import models
from benchmarks.prediction.gpus import Gpu
from benchmarks.prediction.launches import WARP, Launch, compiled_for, counts_of, launches_of, num_bytes_of
from gradcomp.layout import LowRankLayout

HEADER = (
    f"{'GPU':10}{'sm':>4}{'r':>4}  {'launch':17}{'programs':>9}{'fp64 / program':>15}"
    f"{'/ factor elem.':>15}{'MB':>8}{'fp64 us':>9}{'memory us':>10}"
)


@dataclass(frozen=True)
class Fp64:
    """What a launch executes in fp64, with divisions and roots as several, and its predicted microseconds.

    of_program: instructions of all threads of a program, on average, and the FMAs of tensor cores.
    fp64_us: of all programs together, or of the one that executes most, alone on a multiprocessor.
    """

    name: str
    num_programs: int
    of_program: float
    num_bytes: float
    fp64_us: float
    memory_us: float


def bucket_of(model: str) -> Sequence[models.Shape]:
    """Return the model's bucket of the most frequent layout, the largest of these."""
    buckets = [tuple(shapes) for shapes in models.buckets(model, torch.float32)]
    return max(buckets, key=lambda shapes: (buckets.count(shapes), models.num_elements(shapes)))


def fp64_of(launch: Launch, gpu: Gpu) -> Fp64:
    """Count one launch."""
    compiled = compiled_for(launch, gpu.architecture)
    counts = counts_of(launch, compiled)
    num_warps = compiled.metadata.num_warps
    lanes = [each.instructions["f64"] * num_warps * WARP for each in counts]
    tensor = [each.matrix_flops["f64"] * num_warps for each in counts]
    on_lanes = gpu.fp64_lanes * gpu.clocks  # per second and multiprocessor
    on_tensor = gpu.fp64_tflops * 1e12 / gpu.num_multiprocessors
    seconds = [a / on_lanes + b / on_tensor for a, b in zip(lanes, tensor, strict=True)]
    num_bytes = num_bytes_of(launch, counts, num_warps * WARP)
    waves = launch.grid[0] / gpu.num_multiprocessors
    return Fp64(
        launch.kernel.__name__.strip("_").removesuffix("_kernel"),
        launch.grid[0],
        (sum(lanes) + sum(tensor) / 2) / len(counts),
        num_bytes,
        max(sum(seconds) / len(seconds) * waves, *seconds) * 1e6,
        num_bytes / gpu.bandwidth_gbs / 1e3,
    )


def rows(model: str, ranks: Sequence[int], gpus: Sequence[Gpu]) -> Iterator[str]:
    """Yield the lines of a table for the bucket of a model that bucket_of chooses, in fp32."""
    shapes = bucket_of(model)
    yield HEADER
    for gpu in gpus:
        for rank in ranks:
            layout = LowRankLayout(shapes, rank, min_compression_rate=2)
            numel = sum((each.rows + each.cols) * each.rank for each in layout.matrices)
            for launch in launches_of(layout, torch.float32, gpu.architecture):
                each = fp64_of(launch, gpu)
                yield (
                    f"{gpu.name:10}{gpu.architecture:4}{rank:4}  {each.name:17}{each.num_programs:9}"
                    f"{each.of_program:15.0f}{each.of_program * each.num_programs / numel:15.2f}"
                    f"{each.num_bytes / 1e6:8.1f}{each.fp64_us:9.2f}{each.memory_us:10.2f}"
                    f"{'  fp64 takes longer' if each.fp64_us > each.memory_us else ''}"
                )
