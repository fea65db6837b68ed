"""Gram–Schmidt over many panels at once, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# A column of which Gram–Schmidt leaves less than this part of its squared length depends on those before it.
# Rounding to fp32 leaves about 1e-14; a condition number of 1e6, 1e-12.
DEPENDENT = 1e-13
# One pass leaves ‖PᵀP − I‖ of about 1e-16 over the part that is left: a second one where that may pass 1e-7.
AGAIN = 1e-9


def orthonormalise(panels: Sequence[torch.Tensor], epsilon: float, scratch: Sequence[torch.Tensor]) -> None:
    """Turn every panel's columns into an orthonormal basis, by Gram–Schmidt in the Gram matrix's inner product.

    panels: of shapes [k, n, r] with one r, any floating-point dtype. scratch: [2, k, n, r] in fp64 for each.
    With G = PᵀP, an upper triangular T such that TᵀGT = I turns P into P T; again where P is ill-conditioned,
    all in fp64. This holds ‖PᵀP − I‖ ≤ 1e-5 up to a condition number of 1e6. Columns that are zero or depend
    on earlier ones become zero. A panel that isn't finite becomes NaN. epsilon > 0 is added to every column's
    length before dividing by it, as in torch's hook; then there is one pass only.
    """
    given, result = zip(*scratch, strict=True)
    for panel, wide in zip(panels, given, strict=True):
        wide.copy_(panel)
    if not _once(given, epsilon, out=result) > AGAIN and not epsilon:
        given, result = result, given
        _once(given, epsilon, out=result)
    for panel, wide in zip(panels, result, strict=True):
        panel.copy_(wide)


def _once(panels: Sequence[torch.Tensor], epsilon: float, out: Sequence[torch.Tensor]) -> float:
    """One pass. Returns the smallest part of a column's squared length that it left."""
    # The small matrices of all panels at once.
    transform, left = _triangle(torch.cat([panel.mT @ panel for panel in panels]), epsilon)
    transforms = transform.split([len(panel) for panel in panels])
    for panel, of_panel, result in zip(panels, transforms, out, strict=True):
        torch.bmm(panel, of_panel, out=result)
    return left


def _triangle(gram: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, float]:
    """(upper triangular T [k, r, r] with TᵀGT = I but zero columns for dependent ones, the smallest part of a
    column's squared length that was left; 0 where columns are dependent).
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
            inverse = torch.linalg.solve_triangular(lower, identity.expand_as(gram), upper=False)
            return inverse.mT, smallest
    return _gram_schmidt(gram, epsilon), 0.0


def _gram_schmidt(gram: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The same column by column, which can leave columns out."""
    transform = torch.zeros_like(gram)
    for i in range(gram.shape[-1]):
        earlier, column = transform[:, :, :i], transform[:, :, i : i + 1]
        column[:, i] = 1.0
        # Taken away one after another, as in torch: with epsilon they are shorter than 1, so that each leaves
        # something of itself for the next. That is a triangular system.
        overlap, shares = earlier.mT @ gram @ earlier, earlier.mT @ gram[:, :, i : i + 1]
        column -= earlier @ torch.linalg.solve_triangular(overlap, shares, upper=False, unitriangular=True)
        left = column.mT @ gram @ column
        # Written so that NaN stays.
        dependent = left <= DEPENDENT * gram[:, i : i + 1, i : i + 1]
        length = left.clamp(min=0).sqrt() + epsilon
        column.div_(torch.where(dependent, 1.0, length)).masked_fill_(dependent, 0.0)
    finite = gram.isfinite().all(-1).all(-1)
    return torch.where(finite[:, None, None], transform, torch.nan)
