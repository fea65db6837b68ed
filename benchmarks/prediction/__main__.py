"""Predict PowerSGD's time per step on GPUs from bytes and the compiled kernels' instructions.

python -m benchmarks.prediction [--gpu H200] [--model bert-large] [--ranks 1,4,32] [--stages] [--fp64]
                                [--dtype bfloat16] [--record]

Every launch of one step is compiled for the GPU, and threads of some of its programs are followed through the
PTX (see trace.py). A launch is then predicted to take the longest of these, and LAUNCH_US more:

    memory      bytes / bandwidth; a tensor's bytes are counted once for each pass that misses the L2 cache
    issue       instructions / (4 per clock and multiprocessor)
    fp32, fp64  arithmetic / lanes, and matrix products / the tensor cores' rate
    longest     the same for the program that executes most, alone on a multiprocessor

--record puts every stage's time into benchmarks/results/predicted.jsonl, in place of what that file says of
the same step. Benchmarks on a GPU show those times beside their own.

It is an estimate without a GPU, with no cache but L2, no bank conflicts, and no waiting for memory. A run on
a GPU is what counts.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from benchmarks import models
from benchmarks.prediction import fp64, predicted
from benchmarks.prediction.gpus import GPUS, SLOW_FP64, Gpu
from benchmarks.prediction.launches import Prediction, launches_of, predict
from gradcomp.layout import LowRankLayout

RANKS = (1, 4, 8, 16, 32)
FLOOR_PASSES = 5  # gradient and M read, M written; M read; gradient written: 20 B per fp32 element


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
    parser.add_argument("--gpu", choices=[gpu.name for gpu in (*GPUS, *SLOW_FP64)], help="default: each")
    parser.add_argument("--model", choices=list(models.MODELS), help="default: each")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the gradients"
    )
    parser.add_argument("--record", action="store_true", help="put the times into benchmarks/results/")
    parser.add_argument("--stages", action="store_true", help="every launch, with what limits it")
    parser.add_argument("--fp64", action="store_true", help="what a bucket's launches execute in fp64")
    options = parser.parse_args()
    if options.fp64:
        gpus = [gpu for gpu in (*GPUS, *SLOW_FP64) if options.gpu in (None, gpu.name)]
        for line in fp64.rows(options.model or "bert-large", list(map(int, options.ranks.split(","))), gpus):
            print(line, flush=True)
        return
    gpus = [gpu for gpu in GPUS if options.gpu in (None, gpu.name)]
    print(
        f"*predicted* milliseconds of a step, {options.dtype} with error feedback, and times the byte floor"
    )
    for model in [options.model] if options.model else models.MODELS:
        for rank in map(int, options.ranks.split(",")):
            for gpu in gpus:
                stages = step(model, rank, getattr(torch, options.dtype), gpu)
                show(model, rank, gpu, stages, options)
                if options.record:
                    predicted.record(gpu.name, model, rank, options.dtype, microseconds(stages))
                sys.stdout.flush()


def microseconds(launches: dict[str, list[tuple[Prediction, int]]]) -> dict[str, float]:
    """Return the time of each of the plan's stages, which are one or two launches, and of all together."""
    found: dict[str, float] = defaultdict(float)
    for name, predictions in launches.items():
        stage = predicted.STAGES[int(name.split()[0]) - 1]
        found[stage] += sum(each.seconds * count * 1e6 for each, count in predictions)
    found["back_project"] += found["orthonormalize"]  # which that stage begins with
    found["hook"] = sum(found[stage] for stage in ("project", "back_project", "reconstruct"))
    return dict(found)


def show(
    model: str,
    rank: int,
    gpu: Gpu,
    stages: dict[str, list[tuple[Prediction, int]]],
    options: argparse.Namespace,
) -> None:
    total = sum(each.seconds * count for found in stages.values() for each, count in found)
    floor = floor_seconds(model, getattr(torch, options.dtype), gpu)
    print(f"{model:12} r={rank:<3} {gpu.name:10} {total * 1e3:8.2f} ms  {total / floor:5.2f}×")
    if options.stages:
        for name, found in stages.items():
            seconds = sum(each.seconds * count for each, count in found)
            limits = defaultdict(float)
            for each, count in found:
                limits[each.limit] += each.seconds * count
            print(f"    {name:24} {seconds * 1e3:8.2f} ms  by {max(limits, key=lambda name: limits[name])}")


if __name__ == "__main__":
    main()
