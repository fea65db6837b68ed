"""Compare the errors of 16-bit averages against float64: python -m benchmarks.sixteen_bits.

A ring all-reduce in bf16, which NCCL and gloo run for bf16_compress_hook, adds one rank's values after
another, and rounds each partial sum to bf16. quantization_hook with bits=16 rounds each rank's values, sums
them in fp32, and rounds the mean. Here both run in one process. The gradients are normal: a common part, and
noise of its size. The error is ‖average − mean‖ / ‖mean‖, with the mean in float64.
"""

from __future__ import annotations

import argparse

import torch

from gradcomp import testing
from gradcomp.comm.bucket import GradBucket
from gradcomp.compress.announcement import silenced
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook

WORLD_SIZES = (2, 4, 8, 16, 32)
NUMEL = 4096


def gradients_of(world_size: int, seed: int) -> torch.Tensor:
    """Return the ranks' gradients [world size, NUMEL]: a common part, and noise of its size."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(NUMEL, generator=generator)
    return common + torch.randn(world_size, NUMEL, generator=generator)


def ring_average(gradients: torch.Tensor) -> torch.Tensor:
    """Average as bf16_compress_hook does over a ring: divide, round, and round every partial sum."""
    parts = (gradients / len(gradients)).to(torch.bfloat16)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.float()


def _average(rank: int, group: torch.distributed.ProcessGroup, gradients: torch.Tensor) -> torch.Tensor:
    bucket = GradBucket(0, gradients[rank].clone(), [torch.empty(NUMEL)], True)
    return quantization_hook(QuantizationState(group, bits=16), bucket).wait()


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.sixteen_bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    print("| ranks | all-reduce in bf16 | `bits=16` | ratio |\n|---|---|---|---|")
    for world_size in WORLD_SIZES:
        gradients = gradients_of(world_size, seed=0)
        mean = gradients.double().mean(0)
        with silenced():
            ours = testing.run_ranks(_average, world_size, gradients)[0]
        theirs, own = (
            float((average.double() - mean).norm() / mean.norm())
            for average in (ring_average(gradients), ours)
        )
        print(f"| {world_size} | {theirs:.2e} | {own:.2e} | {theirs / own:.1f} |", flush=True)


if __name__ == "__main__":
    main()
