"""PowerSGD beside torch's own: the whole hook, and our local stages, at world size 1.

A call handles all buckets of a model, one after another, as a training step does; on CPU, one of the buckets
below. The backend is NCCL on CUDA and gloo on CPU; nothing crosses a wire. Providers:

gradcomp        powerSGD_hook.
torch           torch's powerSGD_hook, as it comes.
torch_batched   the same with batch_tensors_with_same_shape.

torch's states have orthogonalization_epsilon=1e-8, as torch's documentation advises against dividing by zero;
ours doesn't need it. torch's hook synchronises the host once per bucket, so the head start that hides launch
costs is used up by its first bucket, and its time on CUDA is partly the host's.

The check compares one step, from one state, with float64: ours is from_torch() of torch's. The timed calls go
on without restoring anything, each on the gradient that the last one left. That keeps the numbers as they are:
the gradient left is P Qᵀ and the error kept M − P Qᵀ, so the next step's M is this step's again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

from benchmarks import models
from benchmarks.harness import Case, Setup, frobenius_error
from benchmarks.hooks import call, join_group_of_one
from gradcomp import ops
from gradcomp.compress.grad_bucket import GradBucket
from gradcomp.hooks import powerSGD_hook as power_sgd
from gradcomp.layout import LowRankLayout

CPU_BUCKETS = {
    "4×1024×1024, 512×512×3×3": [(1024, 1024)] * 4 + [(1024,)] * 2 + [(512, 512, 3, 3)],
    "60×256×256": [(256, 256)] * 60,
}
CPU_RANKS = (1, 4, 16)
CUDA_RANKS = (1, 2, 4, 8, 16, 32)
QUICK_RANKS = (4,)

# Passes over an element of a compressed matrix, M kept and the error rebuilt from it, by stage: project reads
# gradient and M and writes M; back_project, which orthonormalises, reads M; reconstruct writes the gradient.
PASSES = {"project": 3, "orthonormalise": 0, "back_project": 1, "reconstruct": 1}
# The same over an element that isn't compressed: to the wire and back.
OTHER_PASSES = {"project": 2, "orthonormalise": 0, "back_project": 0, "reconstruct": 2}

# Frobenius norm of the error over that of the result. Ours sends bf16 but computes in fp32; torch also
# orthonormalises in bf16, and its hook has to pass too: hence the wide bound where it takes part.
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
MAX_ERROR_WITH_TORCH = {torch.float32: 1e-5, torch.bfloat16: 1e-1}
# A case's time: there are many, and torch's slowest call takes half a second.
CUDA_SECONDS = 0.15
PROVIDERS = ("gradcomp", "torch", "torch_batched")
SEED = 1


@dataclass(frozen=True)
class Problem:
    """The buckets of a model, in a dtype, at a rank."""

    buckets: tuple[tuple[models.Shape, ...], ...]
    dtype: torch.dtype
    rank: int
    device: torch.device

    @property
    def layouts(self) -> list[LowRankLayout]:
        return [LowRankLayout(shapes, self.rank, min_compression_rate=2) for shapes in self.buckets]

    @property
    def num_elements(self) -> int:
        return sum(layout.numel for layout in self.layouts)

    def num_bytes(self, *stages: str) -> int:
        compressed = sum(matrix.numel for layout in self.layouts for matrix in layout.matrices)
        others = sum(numel for layout in self.layouts for _, numel in layout.uncompressed)
        passes = sum(PASSES[stage] * compressed + OTHER_PASSES[stage] * others for stage in stages)
        return passes * self.dtype.itemsize

    def gradients(self) -> list[torch.Tensor]:
        numels = [layout.numel for layout in self.layouts]
        return [torch.randn(numel, device=self.device).to(self.dtype) for numel in numels]


class Bucket(GradBucket):
    """A bucket that is given its buffer. Its parameters have shapes only."""

    def __init__(self, shapes: Sequence[models.Shape], buffer: torch.Tensor, index: int, is_last: bool):
        parameters = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
        super().__init__(index, buffer, parameters, is_last)


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    described = list(_problems(device, quick))
    for label, problem in described:
        yield Case(
            "powerSGD_hook",
            label=label,
            dtype=str(problem.dtype).removeprefix("torch."),
            num_bytes=problem.num_bytes(*PASSES),
            max_error=MAX_ERROR_WITH_TORCH[problem.dtype],
            build=partial(_hooks, problem),
            baseline="torch",
            error_of=frobenius_error,
            seconds=CUDA_SECONDS if device.type == "cuda" else None,
            num_buckets=len(problem.buckets),
            num_elements=problem.num_elements,
            apart=PROVIDERS if device.type == "cpu" else (),
        )
    for label, problem in described:
        for stage in PASSES:
            yield Case(
                f"powerSGD {stage}",
                label=label,
                dtype=str(problem.dtype).removeprefix("torch."),
                num_bytes=problem.num_bytes(stage),
                max_error=MAX_ERROR[problem.dtype],
                build=partial(_stage, problem, stage),
                baseline="gradcomp",
                error_of=frobenius_error,
                seconds=CUDA_SECONDS if device.type == "cuda" else None,
                num_buckets=len(problem.buckets),
                num_elements=problem.num_elements,
            )


def _problems(device: torch.device, quick: bool) -> Iterator[tuple[str, Problem]]:
    on_cuda = device.type == "cuda"
    ranks = QUICK_RANKS if quick else CUDA_RANKS if on_cuda else CPU_RANKS
    for dtype in (torch.float32, torch.bfloat16) if on_cuda and not quick else (torch.float32,):
        found = {model: models.buckets(model, dtype) for model in models.MODELS} if on_cuda else {}
        for name, buckets in (found or {name: [shapes] for name, shapes in CPU_BUCKETS.items()}).items():
            for rank in ranks:
                count = f"{len(buckets)} bucket{'s' * (len(buckets) > 1)}"
                problem = Problem(tuple(map(tuple, buckets)), dtype, rank, device)
                yield f"{name}, {count}, r={rank}", problem


# --- the whole hook ---


def _hooks(problem: Problem) -> Setup:
    join_group_of_one(problem.device)
    gradients = problem.gradients()
    started = _started(problem, gradients)
    buckets = {name: _buckets(problem, [gradient.clone() for gradient in gradients]) for name in PROVIDERS}
    states: dict[str, object] = {}

    def restore() -> None:
        states["torch"] = _torch_state(problem, started, batched=False)
        states["torch_batched"] = _torch_state(problem, started, batched=True)
        ours = power_sgd.from_torch(_torch_state(problem, started, batched=False), wait_for_buckets=False)
        ours.orthogonalization_epsilon = 0
        states["gradcomp"] = ours
        for name in PROVIDERS:
            for bucket, gradient in zip(buckets[name], gradients, strict=True):
                bucket.buffer().copy_(gradient)

    def step(name: str, hook: Callable) -> list[torch.Tensor]:
        state = states[name]
        return [result for bucket in buckets[name] for result in call(hook, bucket, state)]

    def reference() -> Iterator[torch.Tensor]:
        for index, (layout, gradient) in enumerate(zip(problem.layouts, gradients, strict=True)):
            shapes = [(matrix.cols, matrix.rank) for matrix in layout.matrices]
            parts = started.q_memory_dict[index].split([cols * rank for cols, rank in shapes])
            qs = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
            yield _steps(layout, gradient, gradient + started.error_dict[index], qs, num_steps=1)

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


def _started(problem: Problem, gradients: Sequence[torch.Tensor]) -> torch_power_sgd.PowerSGDState:
    """A state of torch's amid training: every matrix has an error, and a Q to project on."""
    state = _torch_state(problem, None, batched=False)
    for index, (layout, gradient) in enumerate(zip(problem.layouts, gradients, strict=True)):
        error = torch.zeros_like(gradient)
        for matrix in layout.matrices:
            error[matrix.offset : matrix.offset + matrix.numel].normal_()
        state.error_dict[index] = error
        state.p_memory_dict[index] = gradient.new_zeros(layout.p_numel)
        state.q_memory_dict[index] = gradient.new_empty(layout.q_numel).normal_()
    return state


def _torch_state(
    problem: Problem, like: torch_power_sgd.PowerSGDState | None, batched: bool
) -> torch_power_sgd.PowerSGDState:
    """A state of torch's past its plain steps, with a copy of another one's memory."""
    state = torch_power_sgd.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=problem.rank,
        start_powerSGD_iter=2,
        orthogonalization_epsilon=1e-8,
        batch_tensors_with_same_shape=batched,
    )
    state.iter = state.start_powerSGD_iter
    if like is not None:
        state.error_dict = dict(like.error_dict)  # the hook replaces these, but works in the others
        for name in ("p_memory_dict", "q_memory_dict"):
            setattr(state, name, {index: factor.clone() for index, factor in getattr(like, name).items()})
    return state


# --- our stages ---


def _stage(problem: Problem, stage: str) -> Setup:
    """A plan per bucket. A stage is checked by what the bucket holds when the stages after it are done too."""
    work = _plans(problem)
    order = list(PASSES)
    earlier, later = order[: order.index(stage)], order[order.index(stage) + 1 :]

    def run(name: str) -> None:
        for plan, _, buffer, _ in work:
            if name == "orthonormalise":
                plan.orthonormalise()
            else:
                getattr(plan, name)(buffer, SEED if name == "reconstruct" else 1.0)

    def restore() -> None:
        """Make a whole step, so that no factor is zero, and the next one up to this stage."""
        for plan, gradient, buffer, directions in work:
            plan.load(torch.zeros_like(gradient), directions)
            buffer.copy_(gradient)
        for name in (*PASSES, *earlier):
            run(name)

    def provider() -> Iterator[torch.Tensor]:
        run(stage)
        return finish()

    def finish() -> Iterator[torch.Tensor]:  # runs when the check asks for results, not when timed
        for name in later:
            run(name)
        for _, _, buffer, _ in work:
            yield buffer

    written = {
        "project": [plan.p_wire for plan, *_ in work],
        "orthonormalise": [],
        "back_project": [plan.q_wire for plan, *_ in work],
        "reconstruct": [buffer for _, _, buffer, _ in work],
    }
    restore()
    reference = partial(_after_two_steps, problem)
    return Setup({"gradcomp": provider}, reference, outputs=written[stage], restore=restore)


# The stages of a problem follow each other.
@lru_cache(maxsize=1)
def _after_two_steps(problem: Problem) -> list[torch.Tensor]:
    return [
        _steps(layout, gradient, gradient, directions, num_steps=2)
        for layout, (_, gradient, _, directions) in zip(problem.layouts, _plans(problem), strict=True)
    ]


@lru_cache(maxsize=1)
def _plans(
    problem: Problem,
) -> list[tuple[ops.LowRankPlan, torch.Tensor, torch.Tensor, list[torch.Tensor]]]:
    """Make for every bucket its plan, gradient, buffer and the first step's directions."""
    work = []
    for layout, gradient in zip(problem.layouts, problem.gradients(), strict=True):
        options = {"error_feedback": True, "warm_start": True, "epsilon": 0.0, "seed": SEED}
        plan = ops.low_rank_plan(layout, problem.dtype, problem.device, **options)
        work.append((plan, gradient, gradient.clone(), plan.directions()))
    return work


# --- the reference ---


def _steps(
    layout: LowRankLayout,
    gradient: torch.Tensor,
    memory: torch.Tensor,
    directions: Sequence[torch.Tensor],
    num_steps: int,
) -> torch.Tensor:
    """What steps of PowerSGD with the same M make of a bucket, in float64.

    memory: M of every matrix, where it lies in the bucket. directions: their Q [cols, rank], any basis.
    """
    result = gradient.double()
    for matrix, direction in zip(layout.matrices, directions, strict=True):
        part = slice(matrix.offset, matrix.offset + matrix.numel)
        m = memory[part].double().view(matrix.rows, matrix.cols)
        q = direction.double()
        for _ in range(num_steps):
            p = torch.linalg.qr(m @ q).Q
            q = m.mT @ p
        result[part] = (p @ q.mT).view(-1)
    return result
