"""gradcomp's powerSGD_hook beside torch's, at world size 1.

A call handles all buckets of a model, one after another, as a training step does; on CPU, one of the buckets
of CPU_BUCKETS. The backend is NCCL on CUDA and gloo on CPU; nothing crosses a wire. Providers:

gradcomp        powerSGD_hook.
torch           torch's powerSGD_hook with its defaults.
torch_batched   torch's, with batch_tensors_with_same_shape.

With "int8 factors" the first one sends its factors in 8 bits; torch's have no such option.

torch's states have orthogonalization_epsilon=1e-8: torch's documentation advises it against division by zero.
Ours doesn't need it. torch's hook synchronizes the host once per bucket, so its first bucket uses up the head
start that hides launch costs, and its time on CUDA is partly the host's.

Every matrix of a gradient has the compressor's rank, so that P Qᵀ is the gradient, whatever Q training starts
with. The check compares the third compressed step with the gradient: a random Q may be ill-conditioned, but
warm start mends it, and error feedback sends what the first steps lost. The timed calls restore nothing: each
works on the gradient that the last one left, which is the same one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

from benchmarks import models
from benchmarks.harness import Case, Setup, frobenius_error
from benchmarks.hooks import FakeBucket, call, join_group_of_one
from gradcomp.hooks import powerSGD_hook as power_sgd
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
# Passes over an element of a compressed matrix; M is kept, and the error rebuilt from it. project reads the
# gradient and M and writes M; back_project, which orthonormalizes, reads M; reconstruct writes the gradient.
PASSES = 3 + 1 + 1
UNCOMPRESSED_PASSES = 2 + 2  # over an element that isn't compressed: to the wire and back
LAUNCHES = 1 + 3 + 1  # for a bucket

# The time limit of a case: there are many, and torch's slowest call takes half a second.
CUDA_SECONDS = 0.15

# The Frobenius norm of the error over the norm of the gradient. bf16's bound is wide: torch's hook
# orthonormalizes in bf16.
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-1}
MAX_INT8_ERROR = 5e-2  # P and Q are each rounded to 8 bits; measured 1.9e-2
START = 2  # plain steps, torch's minimum
NUM_COMPRESSED = 2  # steps before the one that is checked
PROVIDERS = ("gradcomp", "torch", "torch_batched")
# For a bucket with int8 factors: each of the two is quantized, averaged and dequantized.
INT8_LAUNCHES = 11


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

    def case(self, label: str) -> Case:
        layouts = self.layouts
        num_elements = sum(layout.numel for layout in layouts)
        compressed = sum(matrix.numel for layout in layouts for matrix in layout.matrices)
        passes = PASSES * compressed + UNCOMPRESSED_PASSES * (num_elements - compressed)
        return Case(
            "powerSGD_hook",
            label=label,
            dtype=str(self.dtype).removeprefix("torch."),
            num_bytes=passes * self.dtype.itemsize,
            max_error=MAX_ERROR[self.dtype],
            build=partial(_hooks, self),
            baseline="torch",
            error_of=frobenius_error,
            min_launches=LAUNCHES * len(self.buckets),
            seconds=CUDA_SECONDS if self.device.type == "cuda" else None,
            num_buckets=len(self.buckets),
            num_elements=num_elements,
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


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for number, (label, problem) in enumerate(problems(device, quick)):
        case = problem.case(label)
        yield case
        if number == 0:
            yield replace(
                case,
                label=f"{label}, int8 factors",
                build=partial(_hooks, problem, factor_dtype=torch.int8),
                max_error=MAX_INT8_ERROR,
                min_launches=INT8_LAUNCHES * len(problem.buckets),
            )


def _hooks(problem: Problem, factor_dtype: torch.dtype | None = None) -> Setup:
    join_group_of_one(problem.device)
    gradients = [_of_low_rank(layout, problem) for layout in problem.layouts]
    last = len(gradients) - 1
    buckets = {
        name: [
            FakeBucket(shapes, problem.device, index, index == last, problem.dtype)
            for index, shapes in enumerate(problem.buckets)
        ]
        for name in PROVIDERS
    }
    states: dict[str, object] = {}
    hooks: dict[str, Callable] = {
        "gradcomp": power_sgd.powerSGD_hook,
        "torch": torch_power_sgd.powerSGD_hook,
        "torch_batched": torch_power_sgd.powerSGD_hook,
    }

    def step(name: str) -> list[torch.Tensor]:
        return [result for bucket in buckets[name] for result in call(hooks[name], bucket, states[name])]

    def refill(name: str) -> None:
        for bucket, gradient in zip(buckets[name], gradients, strict=True):
            bucket.buffer().copy_(gradient)

    def restore(name: str) -> None:
        """Begin a training: the next step is the third compressed one."""
        options: dict[str, Any] = {"matrix_approximation_rank": problem.rank, "start_powerSGD_iter": START}
        if name == "gradcomp":
            states[name] = power_sgd.PowerSGDState(None, factor_dtype=factor_dtype, **options)
        else:
            options["batch_tensors_with_same_shape"] = name == "torch_batched"
            states[name] = torch_power_sgd.PowerSGDState(None, orthogonalization_epsilon=1e-8, **options)
        for _ in range(START + NUM_COMPRESSED):
            refill(name)
            step(name)
        refill(name)

    return Setup(
        {name: partial(step, name) for name in PROVIDERS},
        reference=lambda: (gradient.double() for gradient in gradients),
        restore=restore,
    )


def _of_low_rank(layout: PowerSGDLayout, problem: Problem) -> torch.Tensor:
    """Return a bucket's gradients [numel]: matrices of the compressor's rank, and random other tensors."""
    gradient = torch.randn(layout.numel, device=problem.device)
    for matrix in layout.matrices:
        left, right = (
            torch.randn(size, matrix.rank, device=problem.device) for size in (matrix.rows, matrix.cols)
        )
        gradient[matrix.offset : matrix.offset + matrix.numel] = (left @ right.mT).view(-1)
    return gradient.to(problem.dtype)
