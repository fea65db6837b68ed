"""Problems for timing PowerSGD: a model's buckets in a dtype at a rank, and the right results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import models
from benchmarks.harness import Case, Setup, frobenius_error
from gradcomp.layout import PowerSGDLayout

CPU_BUCKETS = {
    "4×1024×1024, 512×512×3×3": [(1024, 1024)] * 4 + [(1024,)] * 2 + [(512, 512, 3, 3)],
    "60×256×256": [(256, 256)] * 60,
}
CPU_RANKS = (1, 4, 16)
# By importance, as there may be no time for the last ones.
CUDA_PROBLEMS = [
    *(("bert-large", torch.float32, rank) for rank in (4, 32, 1, 8)),
    ("bert-large", torch.float32, 16),
    ("resnet50", torch.float32, 4),
    ("gpt2-medium", torch.float32, 4),
    ("bert-large", torch.bfloat16, 4),
    *((model, torch.float32, rank) for model in ("resnet50", "gpt2-medium") for rank in (32, 1)),
    ("bert-large", torch.bfloat16, 32),
]
NUM_BY_STAGE = 8  # of these are timed stage by stage, too

# Passes over an element of a compressed matrix, by stage; M is kept, and the error rebuilt from it. project
# reads the gradient and M and writes M; back_project, which orthonormalizes, reads M; reconstruct writes the
# gradient.
PASSES = {"project": 3, "orthonormalize": 0, "back_project": 1, "reconstruct": 1}
# Passes over an element that isn't compressed: to the wire and back.
UNCOMPRESSED_PASSES = {"project": 2, "orthonormalize": 0, "back_project": 0, "reconstruct": 2}
# Launches for a bucket. back_project orthonormalizes first.
LAUNCHES = {"project": 1, "orthonormalize": 2, "back_project": 3, "reconstruct": 1}
HOOK_STAGES = ("project", "back_project", "reconstruct")

# The time limit of a case: there are many, and torch's slowest call takes half a second.
CUDA_SECONDS = 0.15


@dataclass(frozen=True)
class Problem:
    """The buckets of a model, in a dtype, at a rank."""

    model: str
    buckets: tuple[tuple[models.Shape, ...], ...]
    dtype: torch.dtype
    rank: int
    device: torch.device

    @property
    def layouts(self) -> list[PowerSGDLayout]:
        return [PowerSGDLayout(shapes, self.rank, min_compression_rate=2) for shapes in self.buckets]

    @property
    def num_elements(self) -> int:
        return sum(layout.numel for layout in self.layouts)

    def num_bytes(self, *stages: str) -> int:
        compressed = sum(matrix.numel for layout in self.layouts for matrix in layout.matrices)
        uncompressed = self.num_elements - compressed
        passes = sum(
            PASSES[stage] * compressed + UNCOMPRESSED_PASSES[stage] * uncompressed for stage in stages
        )
        return passes * self.dtype.itemsize

    def gradients(self) -> list[torch.Tensor]:
        numels = [layout.numel for layout in self.layouts]
        return [torch.randn(numel, device=self.device).to(self.dtype) for numel in numels]

    def case(
        self, name: str, label: str, stages: Sequence[str], build: Callable[[Problem], Setup], **options: Any
    ) -> Case:
        """Describe an operation on this problem that moves the bytes of these stages."""
        dtype = str(self.dtype).removeprefix("torch.")
        return Case(
            name,
            label=label,
            dtype=dtype,
            num_bytes=self.num_bytes(*stages),
            build=partial(build, self),
            error_of=frobenius_error,
            seconds=CUDA_SECONDS if self.device.type == "cuda" else None,
            num_buckets=len(self.buckets),
            num_elements=self.num_elements,
            min_launches=len(self.buckets) * sum(LAUNCHES[stage] for stage in stages),
            **options,
        )


def problems(device: torch.device, quick: bool) -> Iterator[tuple[str, Problem]]:
    """Yield (label, problem). quick: only the first ones."""
    if device.type == "cuda":
        found = [(model, models.buckets(model, dtype), dtype, rank) for model, dtype, rank in CUDA_PROBLEMS]
    else:
        ranks = (4,) if quick else CPU_RANKS
        found = [
            (name, [shapes], torch.float32, rank) for name, shapes in CPU_BUCKETS.items() for rank in ranks
        ]
    for name, buckets, dtype, rank in found[:2] if quick else found:
        count = f"{len(buckets)} bucket{'s' * (len(buckets) > 1)}"
        problem = Problem(name, tuple(map(tuple, buckets)), dtype, rank, device)
        yield f"{name}, {count}, r={rank}", problem
