"""Steps of PowerSGD on simulated ranks, and the same step in float64, for the kernels' tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradcomp.kernels.powersgd.bucket import wire_factor
from gradcomp.kernels.powersgd.plan import PowerSGDPlan
from gradcomp.kernels.powersgd.tile import SHRINK
from gradcomp.kernels.powersgd.work import wire_stride
from gradcomp.layout import PowerSGDLayout
from tests.hooks.powersgd_oracle import relative
from tests.oracle import powersgd_average
from tests.tolerances import POWERSGD_STAGE as STAGE
from tests.tolerances import POWERSGD_STEP as STEP

COMPRESS_ALL = 1e-9  # a min_compression_rate that every matrix passes
# Matrices of several blocks in both directions, with edges. The second one is aligned to 16 bytes, the first
# one is not.
MIXED = [(1,), (33, 67), (4,), (40, 72), (0,), (9, 20)]


def plans_of(
    shapes: Sequence[Sequence[int]] | PowerSGDLayout,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    world_size: int = 1,
    **options: Any,
) -> list[PowerSGDPlan]:
    """Return one plan per simulated rank, with NaN in all scratch that a step must write before it reads."""
    layout = shapes if isinstance(shapes, PowerSGDLayout) else PowerSGDLayout(shapes, rank, COMPRESS_ALL)
    chosen = {"error_feedback": True, "warm_start": True, "epsilon": 0.0, "seed": 0} | options
    plans = [PowerSGDPlan(layout, dtype, device, **chosen) for _ in range(world_size)]
    for plan in plans:
        plan.take_scratch()
        for scratch in (plan._bucket.partial, plan.p_wire, plan.q_wire):
            scratch.fill_(torch.nan)
    return plans


def random_grads(
    layout: PowerSGDLayout, dtype: torch.dtype, device: torch.device, seed: int, world_size: int = 1
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(layout.numel, generator=generator, dtype=torch.float64).to(device, dtype)
        for _ in range(world_size)
    ]


def step(plans: Sequence[PowerSGDPlan], grads: Sequence[torch.Tensor], seed: int = 0) -> None:
    """Take one PowerSGD step of several simulated ranks. The all-reduces are sums in rank order."""
    scale = 1 / len(plans)
    for plan, grad in zip(plans, grads, strict=True):
        plan.project(grad, scale)
    _all_reduce([plan.p_wire for plan in plans])
    for plan, grad in zip(plans, grads, strict=True):
        plan.back_project(grad, scale)
    _all_reduce([plan.q_wire for plan in plans])
    for plan, grad in zip(plans, grads, strict=True):
        plan.reconstruct(grad, seed)


def _all_reduce(wires: Sequence[torch.Tensor]) -> None:
    total = wires[0].clone()
    for wire in wires[1:]:
        total += wire
    for wire in wires:
        wire.copy_(total)


def matrices_of(layout: PowerSGDLayout, flat: torch.Tensor) -> list[torch.Tensor]:
    """Return a flat buffer's matrices, n×m in float64 on the CPU. Elements that don't exist are zeros."""
    result = []
    for matrix in layout.matrices:
        whole = torch.zeros(matrix.rows * matrix.cols, dtype=torch.float64)
        whole[: matrix.numel] = flat[matrix.offset : matrix.offset + matrix.numel]
        result.append(whole.view(matrix.rows, matrix.cols))
    return result


def sums_of(plan: PowerSGDPlan, grad: torch.Tensor) -> list[torch.Tensor]:
    """Return the M that the plan's next step forms: gradient + error, in float64 on the CPU."""
    gradients, errors = matrices_of(plan.layout, grad), matrices_of(plan.layout, plan.error())
    return [gradient + error for gradient, error in zip(gradients, errors, strict=True)]


def directions_of(plan: PowerSGDPlan) -> list[torch.Tensor]:
    """Return the Q that the plan's next step projects on, with columns of length 1, in float64 on the CPU."""
    return [q / q.norm(dim=0) for q in (direction.double().cpu() for direction in plan.directions())]


def on_wire(plan: PowerSGDPlan, index: int, factor: str) -> torch.Tensor:
    """Return a matrix's P or Q from the wire, without the wire's scale factor, in float64 on the CPU."""
    matrix, start = plan.layout.matrices[index], plan._work.fields(index)[f"{factor}_wire"]
    length, wire = (matrix.rows, plan.p_wire) if factor == "p" else (matrix.cols, plan.q_wire)
    stride = wire_stride(length, wire.itemsize)
    columns = wire[start : start + matrix.rank * stride].double().cpu().view(matrix.rank, stride)
    assert not columns[:, length:].any(), "the padding of a column on the wire isn't zero"
    return columns.T[:length] / wire_factor(wire.dtype)


def panel_of(plan: PowerSGDPlan, index: int, factor: str) -> torch.Tensor:
    """Return P, Q or the random Q that the plan keeps of a matrix, in float64 on the CPU."""
    panel = plan._panel(index, factor).double().cpu()
    return panel / SHRINK.value if factor == "q" else panel


def assert_padding_is_zero(plan: PowerSGDPlan) -> None:
    """Check that the memory and the panels are zero outside matrices and factors, and that no count is left.

    The kernels rely on it.
    """
    assert not plan._bucket.arrived.any()
    indices, feedback = range(len(plan.layout.matrices)), plan._bucket.error_feedback
    held = {
        "memory": (plan._bucket.memory, [plan._matrix(i) for i in indices] if feedback else []),
        "P": (plan._bucket.p, [plan._panel(i, "p") for i in indices]),
        "Q": (plan._bucket.q, [plan._panel(i, name) for i in indices for name in ("q", "random")]),
    }
    for name, (whole, parts) in held.items():
        assert whole.count_nonzero() == sum(int(part.count_nonzero()) for part in parts), name


def orthonormal(p: torch.Tensor, tolerance: float = 1e-13) -> torch.Tensor:
    """Orthonormalize twice by Gram–Schmidt in float64. Zero and dependent columns become zeros."""
    result = torch.zeros_like(p)
    for j in range(p.shape[1]):
        column = p[:, j].clone()
        for _ in range(2):
            column -= result[:, :j] @ (result[:, :j].T @ column)
        if column.square().sum() > tolerance * p[:, j].square().sum():
            result[:, j] = column / column.norm()
    return result


def condition(p: torch.Tensor) -> float:
    """Return the condition number of P with columns scaled to length 1; at most 100."""
    return min(float(torch.linalg.cond(p / p.norm(dim=0))), 100.0) if p.norm(dim=0).all() else 100.0


def check_step(plans, grads, seed: int = 0) -> None:
    """Take one step, and compare its outputs and memory with float64."""
    layout, dtype, feedback = plans[0].layout, grads[0].dtype, plans[0]._bucket.error_feedback
    sums = [sums_of(plan, grad) for plan, grad in zip(plans, grads, strict=True)]
    directions = directions_of(plans[0])
    means = [sum(grad[o : o + n].double() for grad in grads) / len(grads) for o, n in layout.uncompressed]

    step(plans, grads, seed)

    for i, output in enumerate(matrices_of(layout, grads[0])):
        of_ranks = [each[i] for each in sums]
        bound = STEP[dtype] * condition(sum(of_ranks) @ directions[i])
        assert relative(output, powersgd_average(of_ranks, directions[i])[0]) <= bound, layout.matrices[i]
        if feedback:
            for plan, total in zip(plans, of_ranks, strict=True):
                assert relative(plan._matrix(i).double().cpu(), total) <= STAGE[dtype]
    for (offset, numel), mean in zip(layout.uncompressed, means, strict=True):
        average = grads[0][offset : offset + numel].double()
        assert relative(average, mean) <= STAGE[dtype] or not numel
    for plan, grad in zip(plans, grads, strict=True):
        assert torch.equal(grad, grads[0]), "replicas differ"
        assert_padding_is_zero(plan)
