"""gradcomp's powerSGD_hook beside torch's, at world size 1, and the local stages of ours, each by itself.

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

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

from benchmarks import models
from benchmarks.harness import Case, Setup, frobenius_error
from benchmarks.hooks import FakeBucket, call, join_group_of_one
from gradcomp import ops
from gradcomp.hooks import powerSGD_hook as power_sgd
from gradcomp.kernels.powersgd import work
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
# What is swept: the model's name and rank, the share of the last programs, and factors of NUM_PROGRAMS.
SWEPT = [(model, rank) for rank in (4, 32, 1) for model in ("bert-large", "resnet50")]
LAST_SHARES = (0.45, 0.6, 0.3)
FACTORS = (1.0, 1.15, 0.75, 1.5, 0.55)

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

# The Frobenius norm of the error over the norm of the gradient. bf16's bound is wide: torch's hook
# orthonormalizes in bf16.
HOOK_MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-1}
MAX_INT8_ERROR = 5e-2  # P and Q are each rounded to 8 bits; measured 1.9e-2
START = 2  # plain steps, torch's minimum
NUM_COMPRESSED = 2  # steps before the one that is checked
PROVIDERS = ("gradcomp", "torch", "torch_batched")
# For a bucket with int8 factors: each of the two is quantized, averaged and dequantized.
INT8_LAUNCHES = 11
# Of a stage: the wire is bf16, the arithmetic fp32.
STAGE_MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SEED = 1


@dataclass(frozen=True)
class Problem:
    """The buckets of a model, in a dtype, at a rank."""

    model: str
    buckets: tuple[tuple[models.Shape, ...], ...]
    dtype: torch.dtype
    rank: int
    device: torch.device
    tuning: tuple[float, float] = (work.LAST_SHARE, 1.0)  # and a factor of NUM_PROGRAMS

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

    def case(
        self,
        name: str,
        label: str,
        stages: Sequence[str],
        build: "Callable[[Problem], Setup]",
        **options: Any,
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


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for number, (label, problem) in enumerate(problems(device, quick)):
        bound = HOOK_MAX_ERROR[problem.dtype]
        case = problem.case("powerSGD_hook", label, HOOK_STAGES, _hooks, max_error=bound, baseline="torch")
        yield case
        if number == 0:
            yield replace(
                case,
                label=f"{label}, int8 factors",
                build=partial(_hooks, problem, factor_dtype=torch.int8),
                max_error=MAX_INT8_ERROR,
                min_launches=INT8_LAUNCHES * len(problem.buckets),
            )
    for label, problem in itertools.islice(problems(device, quick), NUM_BY_STAGE):
        for stage in PASSES:
            yield problem.case(
                f"powerSGD {stage}",
                label,
                (stage,),
                partial(_stage, stage=stage),
                max_error=STAGE_MAX_ERROR[problem.dtype],
                baseline="gradcomp",
            )


def sweep(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield the kernels' stages with other numbers of programs, all stages of one tuning together."""
    for model, rank in SWEPT[:1] if quick else SWEPT:
        shapes = [CPU_BUCKETS["60×256×256"]] if quick else models.buckets(model)
        problem = Problem(model, tuple(map(tuple, shapes)), torch.float32, rank, device)
        for tuning in itertools.product(LAST_SHARES, FACTORS[: 2 if quick else None]):
            tuned, (share, factor) = replace(problem, tuning=tuning), tuning
            for stage, count in work.NUM_PROGRAMS.items():
                yield tuned.case(
                    f"sweep {stage}",
                    f"{model}, r={rank}, {count * factor:.0f} programs, last share {share}",
                    (stage,),
                    partial(_stage, stage=stage),
                    max_error=STAGE_MAX_ERROR[torch.float32],
                    baseline="gradcomp",
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


def _stage(problem: Problem, stage: str) -> Setup:
    """Make a plan per bucket. A stage is checked by the bucket after all later stages of the second step."""
    plans = _plans(problem)
    order = list(PASSES)
    earlier, later = order[: order.index(stage)], order[order.index(stage) + 1 :]

    def run(name: str) -> None:
        for plan, _, buffer, _ in plans:
            if name == "orthonormalize":
                plan.orthonormalize()
            else:
                getattr(plan, name)(buffer, SEED if name == "reconstruct" else 1.0)

    def restore(_: str = "") -> None:
        """Run a whole step, so that no factor is zero, and the next step up to this stage."""
        for plan, gradient, buffer, directions in plans:
            plan.load(torch.zeros_like(gradient), directions)
            buffer.copy_(gradient)
        for name in PASSES:
            run(name)
        for plan, *_ in plans:
            plan.error()  # else plain torch subtracts P Qᵀ from M in project, after the check has cleared P
        for name in earlier:
            run(name)

    def provider() -> Iterator[torch.Tensor]:
        run(stage)
        return finish()

    def finish() -> Iterator[torch.Tensor]:  # runs when the check asks for results, not when timed
        for name in later:
            run(name)
        for _, _, buffer, _ in plans:
            yield buffer
        restore()  # else the timed calls find the error of a whole step in M, next to zero

    restore()  # the plans have their wires from the first step on
    written = {
        "project": [plan.p_wire for plan, *_ in plans],
        "back_project": [plan.q_wire for plan, *_ in plans],
        "reconstruct": [buffer for _, _, buffer, _ in plans],
    }
    return Setup(
        {"gradcomp": provider},
        reference=lambda: (gradient.double() for _, gradient, *_ in plans),
        outputs=written.get(stage, []),
        restore=restore,
    )


# Cached for the stages of one problem, which are timed one after another.
@lru_cache(maxsize=1)
def _plans(problem: Problem) -> list[tuple[ops.PowerSGDPlan, torch.Tensor, torch.Tensor, list[torch.Tensor]]]:
    """Make for every bucket its plan, gradient, buffer and the first step's directions."""
    plans, (share, factor) = [], problem.tuning
    programs = {name: max(1, round(count * factor)) for name, count in work.NUM_PROGRAMS.items()}
    with mock.patch.multiple(work, NUM_PROGRAMS=programs, LAST_SHARE=share):
        for layout in problem.layouts:
            gradient = _of_low_rank(layout, problem)
            options = {"error_feedback": True, "warm_start": True, "epsilon": 0.0, "seed": SEED}
            plan = ops.powersgd_plan(layout, problem.dtype, problem.device, **options)
            plans.append((plan, gradient, gradient.clone(), plan.directions()))
    return plans
