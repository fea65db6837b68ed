"""Gram–Schmidt over many panels at once, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# A column depends on earlier columns if Gram–Schmidt leaves less than this fraction of its squared length.
# Rounding to fp32 leaves about 1e-14 of a dependent column; a condition number of 1e6 leaves 1e-12.
DEPENDENT = 1e-13
# If less is left of any column, a second pass follows. Without one, as much has left ‖PᵀP − I‖ below 4e-6.
SECOND_PASS_BELOW = 1e-7


def orthonormalize(panels: Sequence[torch.Tensor], epsilon: float, scratch: Sequence[torch.Tensor]) -> None:
    """Orthonormalize every panel's columns in place, by Gram–Schmidt on the Gram matrix.

    panels: tensors [k, n, r] with the same r, of any floating-point dtype.
    epsilon: added to every column's length before dividing by it, as in torch's hook. If it is positive,
        there is only one pass.
    scratch: an fp64 tensor [2, k, n, r] per panel.

    With G = PᵀP, P becomes P T for an upper triangular T such that TᵀGT = I. If a panel is ill-conditioned, a
    second pass follows. All arithmetic is in fp64. This keeps ‖PᵀP − I‖ ≤ 1e-5 up to a condition number of
    1e6. A column that is zero or depends on earlier ones becomes zero. A panel that isn't finite becomes NaN.
    """
    given, result = zip(*scratch, strict=True)
    for panel, wide in zip(panels, given, strict=True):
        wide.copy_(panel)
    for is_last in (bool(epsilon), True):
        # The Gram matrices of all panels are factorized at once.
        transform, left = _triangle(torch.cat([panel.mT @ panel for panel in given]), epsilon)
        transforms = transform.split([len(panel) for panel in given])
        for panel, panel_transform, product in zip(given, transforms, result, strict=True):
            torch.bmm(panel, panel_transform, out=product)
        if is_last or left > SECOND_PASS_BELOW:
            break
        given, result = result, given
    for panel, wide in zip(panels, result, strict=True):
        panel.copy_(wide)


def _triangle(gram: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, float]:
    """Return (T, smallest fraction left), with T [k, r, r] upper triangular and TᵀGT = I.

    A dependent column of P has a zero column in T. The smallest fraction is the least share of a column's
    squared length that is left after earlier columns are subtracted; 0 if a column is dependent.
    """
    if gram.shape[-1] == 1:
        transform = torch.where(gram == 0, 0.0, 1 / (gram.sqrt() + epsilon))
        return torch.where(gram.isfinite(), transform, torch.nan), 1.0
    if not epsilon:
        lower, info = torch.linalg.cholesky_ex(gram)
        left = lower.diagonal(dim1=-2, dim2=-1).square() / gram.diagonal(dim1=-2, dim2=-1)
        smallest = float(left.min())
        if not info.any() and smallest > DEPENDENT:
            identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
            return torch.linalg.solve_triangular(lower, identity.expand_as(gram), upper=False).mT, smallest
    return _gram_schmidt(gram, epsilon), 0.0


def _gram_schmidt(gram: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Compute T column by column, so that dependent columns can become zero."""
    transform = torch.zeros_like(gram)
    for i in range(gram.shape[-1]):
        earlier, column = transform[:, :, :i], transform[:, :, i : i + 1]
        column[:, i] = 1.0
        # Earlier columns are subtracted one after another, as in torch. With epsilon, columns are shorter
        # than 1, so each leaves a component for the next: the coefficients solve a triangular system.
        overlap, products = earlier.mT @ gram @ earlier, earlier.mT @ gram[:, :, i : i + 1]
        column -= earlier @ torch.linalg.solve_triangular(overlap, products, upper=False, unitriangular=True)
        left = column.mT @ gram @ column
        # A comparison with NaN is False, so NaN stays NaN.
        dependent = left <= DEPENDENT * gram[:, i : i + 1, i : i + 1]
        length = left.clamp(min=0).sqrt() + epsilon
        column.div_(torch.where(dependent, 1.0, length)).masked_fill_(dependent, 0.0)
    return torch.where(gram.isfinite().all(-1).all(-1)[:, None, None], transform, torch.nan)
