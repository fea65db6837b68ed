"""gradcomp's powerSGD_hook beside torch's, at world size 1.

A call handles all buckets of a model, one after another, as a training step does; on CPU, one of the buckets
of powersgd_problem.py. The backend is NCCL on CUDA and gloo on CPU; nothing crosses a wire. Providers:

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

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

from benchmarks.harness import Case, Setup
from benchmarks.hooks import FakeBucket, call, join_group_of_one
from benchmarks.powersgd_problem import HOOK_STAGES, Problem, problems
from gradcomp.hooks import powerSGD_hook as power_sgd
from gradcomp.layout import PowerSGDLayout

# The Frobenius norm of the error over the norm of the gradient. bf16's bound is wide: torch's hook
# orthonormalizes in bf16.
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-1}
MAX_INT8_ERROR = 5e-2  # P and Q are each rounded to 8 bits; measured 1.9e-2
START = 2  # plain steps, torch's minimum
NUM_COMPRESSED = 2  # steps before the one that is checked
PROVIDERS = ("gradcomp", "torch", "torch_batched")
# For a bucket with int8 factors: each of the two is quantized, averaged and dequantized.
INT8_LAUNCHES = 11


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for number, (label, problem) in enumerate(problems(device, quick)):
        case = problem.case(
            "powerSGD_hook", label, HOOK_STAGES, _hooks, max_error=MAX_ERROR[problem.dtype], baseline="torch"
        )
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
