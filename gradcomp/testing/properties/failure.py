"""The exceptions of properties that fail, with expected and actual values, rank, step and tensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradcomp.testing.run import Run
from gradcomp.testing.workload import Workload

__all__ = ["NonFiniteFailure", "PropertyFailure"]


class PropertyFailure(AssertionError):  # noqa: N818
    """The hook claims a property that fails on this workload."""


class NonFiniteFailure(PropertyFailure):
    """The outputs of finite gradients are not finite: no other property can hold then."""


def place(workload: Workload, step: int, rank: int, index: int) -> str:
    """Describe an output's step, rank and tensor, for messages."""
    return f"step {step}, rank {rank}, {workload.where(index)}"


def require_finite(name: str, workload: Workload, run: Run, first_step: int = 0) -> None:
    """Raise NonFiniteFailure if an output from this step on holds inf or NaN."""
    for step, by_rank in enumerate(run.outputs):
        for rank, tensors in enumerate(by_rank):
            for index, tensor in enumerate(tensors):
                if step >= first_step and not tensor.isfinite().all():
                    bad = tensor[~tensor.isfinite()][0] if tensor.ndim else tensor
                    raise NonFiniteFailure(
                        f"{name}: {place(workload, step, rank, index)}: expected finite averages, got "
                        f"{bad.item()} in {int((~tensor.isfinite()).sum())} of {tensor.numel()} elements"
                    )


def require_same(name: str, where: str, expected: Tensor, got: Tensor, whose: str) -> None:
    """Raise PropertyFailure unless all elements are equal; NaN equals NaN."""
    same = (expected == got) | (expected.isnan() & got.isnan())
    if not same.all():
        i = int((~same).flatten().nonzero()[0])
        raise PropertyFailure(
            f"{name}: {where}, element {i}: expected {expected.flatten()[i].item()!r} ({whose}), got "
            f"{got.flatten()[i].item()!r}; {int((~same).sum())} of {got.numel()} elements differ"
        )


def require_close(
    name: str, where: str, expected: Tensor, got: Tensor, allowed: Tensor | float, whose: str
) -> float:
    """Compute the largest |got − expected| / allowed. Raises PropertyFailure if it is above 1."""
    if not got.numel():
        return 0.0
    off = (got.double() - expected.double()).abs().flatten()
    limit = torch.as_tensor(allowed, dtype=torch.float64).expand(expected.shape).flatten()
    ratio = torch.where(off <= limit, off / limit.clamp(min=1e-300), off / limit).nan_to_num(math.inf)
    worst = int(ratio.argmax())
    if ratio[worst] > 1:
        raise PropertyFailure(
            f"{name}: {where}, element {worst}: expected {expected.flatten()[worst].item():.9g} ({whose}), "
            f"got {got.flatten()[worst].item():.9g}; off by {off[worst]:.3g}, allowed {limit[worst]:.3g}"
        )
    return float(ratio[worst])


def require_close_in_norm(
    name: str, where: str, expected: Tensor, got: Tensor, allowed: float, whose: str
) -> float:
    """Compute ‖got − expected‖ / allowed. Raises PropertyFailure if it is above 1."""
    off = float((got.double() - expected.double()).norm())
    if not off <= allowed:
        raise PropertyFailure(
            f"{name}: {where}: expected {whose} of norm {float(expected.double().norm()):.6g}, got norm "
            f"{float(got.double().norm()):.6g}; ‖difference‖ {off:.3g}, allowed {allowed:.3g}"
        )
    return off / allowed if off else 0.0
