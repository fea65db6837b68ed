"""PowerSGD's local arithmetic in plain torch: the reference, and what runs on CPU tensors.

Paper letters (Vogels et al. 2019, algorithm 1) for a stack of k matrices of one shape: M [k, rows, cols] is
gradient + error, P [k, rows, r] and Qᵀ [k, r, cols] its factors. Qᵀ rather than Q: with its rows in memory
order, the products run several times faster on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from .copy import cast

if TYPE_CHECKING:
    from gradcomp.layout import LowRankLayout, Matrix

# A column of which Gram–Schmidt leaves less than this part of its squared length depends on those before it.
# Rounding to fp32 leaves about 1e-14; a condition number of 1e6, 1e-12.
DEPENDENT = 1e-13
# One pass leaves ‖PᵀP − I‖ of about 1e-16 over the part that is left: a second one where that may pass 1e-7.
AGAIN = 1e-9


def orthonormalise(panels: torch.Tensor, epsilon: float = 0.0) -> torch.Tensor:
    """An orthonormal basis of every panel's columns, by Gram–Schmidt in the Gram matrix's inner product.

    panels: [k, n, r], any floating-point dtype. With G = PᵀP, an upper triangular T such that TᵀGT = I turns
    P into P T; again where P is ill-conditioned, all in fp64. This holds ‖PᵀP − I‖ ≤ 1e-5 up to a condition number of 1e6. Columns that
    are zero or depend on earlier ones become zero. A panel that isn't finite becomes NaN. epsilon > 0 is
    added to every column's length before dividing by it, as in torch's hook; then there is one pass only.
    """
    wide = panels.double()
    transform, left = _triangle(wide.mT @ wide, epsilon)
    wide = wide @ transform
    if not epsilon and not left > AGAIN:
        transform, _ = _triangle(wide.mT @ wide, epsilon)
        wide = wide @ transform
    return wide.to(panels.dtype)


def _triangle(gram: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, float]:
    """(upper triangular T [k, r, r] with TᵀGT = I but zero columns for dependent ones, the smallest part of a
    column's squared length that was left; 0 where columns are dependent).
    """
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
    rank = gram.shape[-1]
    columns: list[torch.Tensor] = []
    for i in range(rank):
        column = torch.zeros_like(gram[:, :, :1])
        column[:, i] = 1.0
        for earlier in columns:
            # With epsilon a column taken away is shorter than 1, as in torch.
            column = column - (earlier.mT @ gram @ column) * earlier
        left = column.mT @ gram @ column
        # Written so that NaN stays.
        dependent = left <= DEPENDENT * gram[:, i : i + 1, i : i + 1]
        length = left.clamp(min=0).sqrt() + epsilon
        columns.append(torch.where(dependent, 0.0, column / torch.where(dependent, 1.0, length)))
    transform = torch.cat(columns, dim=-1)
    finite = gram.isfinite().all(-1).all(-1)
    return torch.where(finite[:, None, None], transform, torch.nan)


class Stack:
    """The matrices of one shape: where they lie in the bucket, their memory, and the factors.

    memory: the error between steps; M = gradient + error from project to reconstruct.
    """

    def __init__(
        self, matrices: Sequence[Matrix], dtype: torch.dtype, device: torch.device, keep_error: bool
    ):
        first = matrices[0]
        k, rows, cols, rank = len(matrices), first.rows, first.cols, first.rank
        self.matrices, self.shape, self.dtype = matrices, (k, rows, cols), dtype
        self.wide = torch.promote_types(dtype, torch.float32)
        self.is_one_piece = all(
            matrix.numel == rows * cols and matrix.offset == first.offset + i * rows * cols
            for i, matrix in enumerate(matrices)
        )
        self.memory = torch.zeros(k, rows, cols, dtype=dtype, device=device) if keep_error else None
        self.p = torch.zeros(k, rows, rank, dtype=self.wide, device=device)
        self.qt = torch.zeros(k, rank, cols, dtype=self.wide, device=device)
        # What the next step projects on, in orthonormal rows.
        self.direction = torch.zeros(k, rank, cols, dtype=self.wide, device=device)

    def parts(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Each matrix's elements in the bucket, flat."""
        for matrix in self.matrices:
            yield buffer[matrix.offset : matrix.offset + matrix.numel]

    def one_piece(self, buffer: torch.Tensor) -> torch.Tensor:
        """All matrices as a view of the bucket, where they lie one after another."""
        offset, numel = self.matrices[0].offset, len(self.matrices) * self.matrices[0].numel
        return buffer[offset : offset + numel].view(self.shape)

    def gradient(self, buffer: torch.Tensor) -> torch.Tensor:
        """The matrices stacked, in the wide dtype; zeros where a matrix has no element."""
        if self.is_one_piece:
            return self.one_piece(buffer).to(self.wide)
        stacked = torch.zeros(self.shape, dtype=self.wide, device=buffer.device)
        for matrix, part in zip(stacked.flatten(1), self.parts(buffer), strict=True):
            matrix[: part.numel()].copy_(part)
        return stacked

    def add_gradient(self, buffer: torch.Tensor) -> torch.Tensor:
        """M = gradient + error, in the error's place; returned in the wide dtype."""
        assert self.memory is not None
        if self.is_one_piece:
            self.memory.add_(self.one_piece(buffer))
        else:
            for matrix, part in zip(self.memory.flatten(1), self.parts(buffer), strict=True):
                matrix[: part.numel()].add_(part)
        return self.memory.to(self.wide)

    def write_product(self, buffer: torch.Tensor) -> None:
        """gradient = P Qᵀ; error = M − P Qᵀ, in M's place."""
        if self.is_one_piece and self.dtype == self.wide:
            product = self.one_piece(buffer)
            self._product(self.p, self.qt, product)
            if self.memory is not None:
                self.memory.sub_(product)
            return
        rows, cols = self.shape[1:]
        for i, part in enumerate(self.parts(buffer)):
            if part.numel() == rows * cols and self.dtype == self.wide:
                self._product(self.p[i], self.qt[i], part.view(rows, cols))
            else:
                part.copy_((self.p[i] @ self.qt[i]).view(-1)[: part.numel()])
            if self.memory is not None:
                self.memory[i].view(-1)[: part.numel()].sub_(part)

    def _product(self, p: torch.Tensor, qt: torch.Tensor, out: torch.Tensor) -> None:
        if p.shape[-1] == 1:
            torch.mul(p, qt, out=out)
        else:
            torch.matmul(p, qt, out=out)

    def replace(self, dead: torch.Tensor, lost: torch.Tensor, random: torch.Tensor) -> None:
        """Random directions in place of those lost [k, r]; no error left in the matrices dead [k]."""
        if self.memory is not None:
            self.memory[dead] = 0.0
        mixed = torch.where(lost[:, :, None], random, self.direction)
        self.direction.copy_(orthonormalise(mixed.mT).mT)


class LowRankPlan:
    """One bucket's working set for PowerSGD, and the local stages between its two all-reduces.

    p_wire: all P, then the tensors not compressed. q_wire: all Qᵀ. Both flat, in the bucket's dtype.
    """

    def __init__(
        self,
        layout: LowRankLayout,
        dtype: torch.dtype,
        device: torch.device,
        *,
        error_feedback: bool,
        warm_start: bool,
        epsilon: float,
        seed: int,
    ):
        self.layout = layout
        self.p_wire = torch.empty(layout.wire_numel, dtype=dtype, device=device)
        self.q_wire = torch.empty(layout.q_numel, dtype=dtype, device=device)
        self.stacks = [Stack(group, dtype, device, error_feedback) for group in layout.groups]
        self._error_feedback, self._warm_start, self._epsilon = error_feedback, warm_start, epsilon
        for stack, direction in zip(self.stacks, self._random(seed), strict=True):
            stack.direction.copy_(direction)

    def project(self, buffer: torch.Tensor, scale: float) -> None:
        """M = gradient + error; p_wire = scale · (all M Q, then what isn't compressed)."""
        for stack, wire in zip(self.stacks, self._p_panels(), strict=True):
            matrix = stack.add_gradient(buffer) if self._error_feedback else stack.gradient(buffer)
            wire.copy_(torch.bmm(matrix, stack.direction.mT).mul_(scale))
        rest = self.p_wire[self.layout.p_numel :].split([numel for _, numel in self.layout.rest])
        for (offset, numel), wire in zip(self.layout.rest, rest, strict=True):
            cast(buffer[offset : offset + numel], out=wire, scale=scale)

    def back_project(self, buffer: torch.Tensor, scale: float) -> None:
        """P = orthonormalise(p_wire's); q_wire = scale · all Qᵀ = Pᵀ M."""
        for stack, p, wire in zip(self.stacks, self._p_panels(), self._q_panels(), strict=True):
            stack.p.copy_(orthonormalise(p.to(stack.wide), self._epsilon))
            matrix = stack.gradient(buffer) if stack.memory is None else stack.memory.to(stack.wide)
            wire.copy_(torch.bmm(stack.p.mT, matrix).mul_(scale))

    def reconstruct(self, buffer: torch.Tensor, seed: int) -> None:
        """gradient = P Qᵀ and the averages of the rest; choose the next step's direction.

        A matrix whose factors aren't finite gives NaN now, and starts afresh in the next step.
        """
        random = self._random(seed) if not self._warm_start else None
        for i, (stack, wire) in enumerate(zip(self.stacks, self._q_panels(), strict=True)):
            stack.qt.copy_(wire)
            stack.write_product(buffer)
            if random is not None:
                stack.direction.copy_(random[i])
            else:
                stack.direction.copy_(orthonormalise(stack.qt.mT).mT)
            dead = ~(stack.p.isfinite().flatten(1).all(1) & stack.qt.isfinite().flatten(1).all(1))
            # A zero direction would never see a gradient again.
            lost = dead[:, None] | (stack.direction == 0).all(-1)
            if lost.any():
                random = random or self._random(seed)
                stack.replace(dead, lost, random[i])
        rest = self.p_wire[self.layout.p_numel :].split([numel for _, numel in self.layout.rest])
        for (offset, numel), wire in zip(self.layout.rest, rest, strict=True):
            buffer[offset : offset + numel].copy_(wire)

    def error(self) -> torch.Tensor:
        """This rank's error [numel] in the bucket's dtype, zero where nothing is compressed."""
        flat = torch.zeros(self.layout.numel, dtype=self.p_wire.dtype, device=self.p_wire.device)
        for stack in self.stacks:
            if stack.memory is not None:
                for error, part in zip(stack.memory.flatten(1), stack.parts(flat), strict=True):
                    part.copy_(error[: part.numel()])
        return flat

    def directions(self) -> list[torch.Tensor]:
        """What the next step projects on: Q [cols, rank] of every matrix, in the layout's order."""
        return [qt.mT.clone() for stack in self.stacks for qt in stack.direction]

    def load(self, error: torch.Tensor, directions: Sequence[torch.Tensor]) -> None:
        """Continue from another plan's error and directions; the latter may be any basis."""
        remaining = iter(directions)
        for stack in self.stacks:
            if stack.memory is not None:
                for memory, part in zip(stack.memory.flatten(1), stack.parts(error), strict=True):
                    memory[: part.numel()].copy_(part)
            given = torch.stack([next(remaining) for _ in stack.matrices]).to(stack.direction)
            gram = given.double().mT @ given.double()
            identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
            is_orthonormal = bool((gram - identity).abs().max() < 1e-5)
            stack.direction.copy_((given if is_orthonormal else orthonormalise(given)).mT)

    def _random(self, seed: int) -> list[torch.Tensor]:
        """Random orthonormal directions for every stack, the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        draws = (torch.randn(stack.qt.mT.shape, generator=generator) for stack in self.stacks)
        return [
            orthonormalise(draw.to(stack.direction)).mT
            for stack, draw in zip(self.stacks, draws, strict=True)
        ]

    def _p_panels(self) -> list[torch.Tensor]:
        """The stacks' P [k, rows, r] on the wire."""
        return self._panels(self.p_wire[: self.layout.p_numel], [stack.p for stack in self.stacks])

    def _q_panels(self) -> list[torch.Tensor]:
        """The stacks' Qᵀ [k, r, cols] on the wire."""
        return self._panels(self.q_wire, [stack.qt for stack in self.stacks])

    @staticmethod
    def _panels(wire: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parts = wire.split([tensor.numel() for tensor in like])
        return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
