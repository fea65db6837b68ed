"""Print what PowerSGD keeps on a CUDA device for real models, beside torch's.

python -m benchmarks.powersgd_memory. Counted from shapes, in MB of 10⁶ bytes, for fp32 gradients in DDP's
default buckets, with error feedback and warm start. Nothing is allocated on a device. Ours: the error's
memory, the factors with tables and lengths, and three scratches. torch's: errors and factors, and during a
step a clone of a bucket's gradients and a new error, counted here for the largest bucket.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from benchmarks import models
from gradcomp.kernels.powersgd.bucket import PowerSGDBucket
from gradcomp.kernels.powersgd.work import PowerSGDWork
from gradcomp.layout import PowerSGDLayout

RANKS = (1, 4, 16, 32)
MIN_COMPRESSION_RATE = 2
NUM_SCRATCHES = 3  # as many buckets are under way at once


@dataclass(frozen=True)
class Memory:
    """Bytes by purpose. scratches: every bucket's; the buckets take NUM_SCRATCHES in turns."""

    error: int
    factors: int
    scratches: tuple[int, ...]
    torch_error: int
    torch_factors: int
    torch_passing: int


def memory_of(buckets: Iterable[Sequence[models.Shape]], rank: int, dtype: torch.dtype) -> Memory:
    """Return the memory of these buckets at a rank."""
    error = factors = torch_factors = 0
    scratches, bucket_bytes = [], []
    for shapes in buckets:
        layout = PowerSGDLayout(shapes, rank, MIN_COMPRESSION_RATE)
        work = PowerSGDWork.of(layout, dtype.itemsize)
        bucket = PowerSGDBucket(
            work, dtype, dtype, torch.device("meta"), error_feedback=True, warm_start=True, epsilon=0.0
        )
        error += bucket.memory.nbytes
        kept = (bucket.p, bucket.q, bucket.norms, bucket.arrived, bucket.matrices, *bucket.tables.values())
        factors += sum(tensor.nbytes for tensor in kept)
        scratches.append(bucket.scratch_bytes)
        bucket_bytes.append(sum(map(math.prod, shapes)) * dtype.itemsize)
        torch_factors += (layout.p_numel + layout.q_numel) * dtype.itemsize
    passing = 2 * max(bucket_bytes)
    return Memory(error, factors, tuple(scratches), sum(bucket_bytes), torch_factors, passing)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.powersgd_memory", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.parse_args(argv)
    columns = ("rank", "error", "factors", "scratches", "sum", "a scratch per bucket", "torch", "in passing")
    print(f"| {'model':12} | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for model in models.MODELS:
        buckets = models.buckets(model)
        for rank in RANKS:
            memory = memory_of(buckets, rank, torch.float32)
            scratch = sum(max(memory.scratches[i::NUM_SCRATCHES], default=0) for i in range(NUM_SCRATCHES))
            sizes = (
                memory.error,
                memory.factors,
                scratch,
                memory.error + memory.factors + scratch,
                sum(memory.scratches),
                memory.torch_error + memory.torch_factors,
                memory.torch_passing,
            )
            print(f"| {model:12} | {rank} | {' | '.join(f'{size / 1e6:.1f}' for size in sizes)} |")


if __name__ == "__main__":
    main()
