"""The local stages of gradcomp's PowerSGD, each by itself, on all buckets of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice

import torch

from benchmarks.harness import Case, Setup
from benchmarks.powersgd_problem import NUM_BY_STAGE, PASSES, Problem, problems
from gradcomp import ops
from gradcomp.layout import PowerSGDLayout

# The Frobenius norm of the error over the norm of the result. The wire is bf16, the arithmetic fp32.
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SEED = 1


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for label, problem in islice(problems(device, quick), NUM_BY_STAGE):
        for stage in PASSES:
            yield problem.case(
                f"powerSGD {stage}",
                label,
                (stage,),
                partial(_stage, stage=stage),
                max_error=MAX_ERROR[problem.dtype],
                baseline="gradcomp",
            )


def _stage(problem: Problem, stage: str) -> Setup:
    """Make a plan per bucket. A stage is checked by the bucket's contents after all later stages."""
    work = _plans(problem)
    order = list(PASSES)
    earlier, later = order[: order.index(stage)], order[order.index(stage) + 1 :]

    def run(name: str) -> None:
        for plan, _, buffer, _ in work:
            if name == "orthonormalize":
                plan.orthonormalize()
            else:
                getattr(plan, name)(buffer, SEED if name == "reconstruct" else 1.0)

    def restore(_: str = "") -> None:
        """Run a whole step, so that no factor is zero, and the next step up to this stage."""
        for plan, gradient, buffer, directions in work:
            plan.load(torch.zeros_like(gradient), directions)
            buffer.copy_(gradient)
        for name in PASSES:
            run(name)
        for plan, *_ in work:
            plan.error()  # else plain torch subtracts P Qᵀ from M in project, after the check has cleared P
        for name in earlier:
            run(name)

    def provider() -> Iterator[torch.Tensor]:
        run(stage)
        return finish()

    def finish() -> Iterator[torch.Tensor]:  # runs when the check asks for results, not when timed
        for name in later:
            run(name)
        for _, _, buffer, _ in work:
            yield buffer
        restore()  # else the timed calls find the error of a whole step in M, next to zero

    written = {
        "project": [plan.p_wire for plan, *_ in work],
        "orthonormalize": [],
        "back_project": [plan.q_wire for plan, *_ in work],
        "reconstruct": [buffer for _, _, buffer, _ in work],
    }
    reference = partial(_after_two_steps, problem)
    return Setup({"gradcomp": provider}, reference, outputs=written[stage], restore=restore)


def two_float64_steps(
    layout: PowerSGDLayout, gradient: torch.Tensor, directions: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Compute in float64 the bucket after two steps of PowerSGD, both with the gradient as M.

    directions: each matrix's Q [cols, rank], in any basis.
    """
    result = gradient.double()
    for matrix, direction in zip(layout.matrices, directions, strict=True):
        part = slice(matrix.offset, matrix.offset + matrix.numel)
        m = result[part].view(matrix.rows, matrix.cols)
        q = direction.double()
        for _ in range(2):
            p = torch.linalg.qr(m @ q).Q
            q = m.mT @ p
        result[part] = (p @ q.mT).view(-1)
    return result


# Cached for the stages of one problem, which are timed one after another.
@lru_cache(maxsize=1)
def _after_two_steps(problem: Problem) -> list[torch.Tensor]:
    return [
        two_float64_steps(layout, gradient, directions)
        for layout, (_, gradient, _, directions) in zip(problem.layouts, _plans(problem), strict=True)
    ]


@lru_cache(maxsize=1)
def _plans(problem: Problem) -> list[tuple[ops.PowerSGDPlan, torch.Tensor, torch.Tensor, list[torch.Tensor]]]:
    """Make for every bucket its plan, gradient, buffer and the first step's directions."""
    work = []
    for layout, gradient in zip(problem.layouts, problem.gradients(), strict=True):
        options = {"error_feedback": True, "warm_start": True, "epsilon": 0.0, "seed": SEED}
        plan = ops.powersgd_plan(layout, problem.dtype, problem.device, **options)
        work.append((plan, gradient, gradient.clone(), plan.directions()))
    return work
