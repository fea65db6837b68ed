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

The check compares one step with float64. Both hooks start with one error and one Q: those of our hook after a
compressed step.
The timed calls restore nothing: each works on the gradient that the last one left. The numbers don't change:
a step leaves the gradient P Qᵀ and the error M − P Qᵀ, so the next step's M is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

from benchmarks import models
from benchmarks.harness import Case, Setup
from benchmarks.hooks import call, join_group_of_one
from benchmarks.powersgd_problem import HOOK_STAGES, NUM_FIRST, Problem, float64_steps, problems
from gradcomp.comm.bucket import GradBucket
from gradcomp.hooks import powerSGD_hook as power_sgd
from gradcomp.layout.flat import FlatLayout

# The Frobenius norm of the error over the norm of the result. bf16's bound is wide: torch's hook, which
# orthonormalizes in bf16, must pass too.
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-1}
MAX_INT8_ERROR = 5e-2  # P and Q are each rounded to 8 bits; measured 1.1e-2
PROVIDERS = ("gradcomp", "torch", "torch_batched")
# For a bucket with int8 factors: each of the two is quantized, averaged and dequantized.
INT8_LAUNCHES = 11


class Bucket(GradBucket):
    """A bucket on a given buffer. Its parameters are meta tensors."""

    def __init__(self, shapes: Sequence[models.Shape], buffer: torch.Tensor, index: int, is_last: bool):
        parameters = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
        super().__init__(index, buffer, parameters, is_last)


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for number, (label, problem) in enumerate(problems(device, quick)):
        case = problem.case(
            "powerSGD_hook",
            label,
            HOOK_STAGES,
            _hooks,
            max_error=MAX_ERROR[problem.dtype],
            baseline="torch",
            comes_first=number < NUM_FIRST,
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
    gradients = problem.gradients()
    buckets = {name: _buckets(problem, [gradient.clone() for gradient in gradients]) for name in PROVIDERS}
    saved = _started(problem, buckets["gradcomp"], factor_dtype)
    memories = _memories(problem, saved)
    states: dict[str, object] = {}

    def restore() -> None:
        states["torch"] = _torch_state(problem, memories, batched=False)
        states["torch_batched"] = _torch_state(problem, memories, batched=True)
        ours = _our_state(problem, factor_dtype)
        ours.load_state_dict(saved)
        states["gradcomp"] = ours
        for name in PROVIDERS:
            for bucket, gradient in zip(buckets[name], gradients, strict=True):
                bucket.buffer().copy_(gradient)

    def step(name: str, hook: Callable) -> list[torch.Tensor]:
        state = states[name]
        return [result for bucket in buckets[name] for result in call(hook, bucket, state)]

    def reference() -> Iterator[torch.Tensor]:
        for layout, gradient, (error, qs) in zip(problem.layouts, gradients, memories, strict=True):
            yield float64_steps(layout, gradient, gradient + error, qs, num_steps=1)

    restore()
    return Setup(
        {
            "gradcomp": partial(step, "gradcomp", power_sgd.powerSGD_hook),
            "torch": partial(step, "torch", torch_power_sgd.powerSGD_hook),
            "torch_batched": partial(step, "torch_batched", torch_power_sgd.powerSGD_hook),
        },
        reference,
        restore=restore,
    )


def _buckets(problem: Problem, buffers: Sequence[torch.Tensor]) -> list[Bucket]:
    last = len(buffers) - 1
    pairs = zip(problem.buckets, buffers, strict=True)
    return [Bucket(shapes, buffer, index, index == last) for index, (shapes, buffer) in enumerate(pairs)]


def _our_state(problem: Problem, factor_dtype: torch.dtype | None) -> power_sgd.PowerSGDState:
    return power_sgd.PowerSGDState(None, problem.rank, start_powerSGD_iter=2, factor_dtype=factor_dtype)


def _started(problem: Problem, buckets: Sequence[Bucket], factor_dtype: torch.dtype | None) -> dict[str, Any]:
    """Return our state_dict in the middle of training: every matrix has an error, and a Q to project on."""
    state = _our_state(problem, factor_dtype)
    for _ in range(state.start_powerSGD_iter + 1):
        for bucket in buckets:
            bucket.buffer().normal_()
            call(power_sgd.powerSGD_hook, bucket, state)
    return state.state_dict()


def _memories(problem: Problem, saved: dict[str, Any]) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Return each bucket's error [numel], and the Q [cols, rank] of its matrices."""
    found = []
    for index, (layout, shapes) in enumerate(zip(problem.layouts, problem.buckets, strict=True)):
        memory = saved["buckets"][index]
        by_offset = dict(zip(FlatLayout(shapes).offsets, memory["directions"], strict=True))
        qs = [by_offset[matrix.offset].to(problem.dtype) for matrix in layout.matrices]
        found.append((memory["error"].to(problem.dtype), qs))
    return found


def _torch_state(
    problem: Problem, memories: Sequence[tuple[torch.Tensor, list[torch.Tensor]]], batched: bool
) -> torch_power_sgd.PowerSGDState:
    """Make torch's state after its plain steps, with copies of these errors and Q."""
    state = torch_power_sgd.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=problem.rank,
        start_powerSGD_iter=2,
        orthogonalization_epsilon=1e-8,
        batch_tensors_with_same_shape=batched,
    )
    state.iter = state.start_powerSGD_iter
    for index, (layout, (error, qs)) in enumerate(zip(problem.layouts, memories, strict=True)):
        state.error_dict[index] = error  # the hook replaces errors, but updates factors in place
        state.p_memory_dict[index] = error.new_zeros(layout.p_numel)
        state.q_memory_dict[index] = torch.cat([q.flatten() for q in qs])
    return state
