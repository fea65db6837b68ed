"""PowerSGD's local arithmetic in plain torch, for CPU tensors and as the kernels' reference.

A plan has the buffers of one bucket. It consists of matrix groups (powersgd_matrices.py), one per shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from .copy import cast
from .orthonormalize import orthonormalize
from .powersgd_matrices import SHRINK, MatrixGroup

if TYPE_CHECKING:
    from gradcomp.layout import PowerSGDLayout

# Columns of Q shorter than this are replaced, because the inverse of their length might overflow fp32.
MIN_LENGTH = 1e-30


class PowerSGDPlan:
    """One bucket's PowerSGD plan in plain torch: its buffers and local stages; see ops.powersgd_plan.

    p_wire: all P, then the uncompressed tensors, flat. With wire_dtype, all Pᵀ instead of P.
    q_wire: all Qᵀ, flat.

    Both are in wire_dtype, or in the bucket's dtype. They hold P and Q times SHRINK, but in float16, which
    has few small numbers, P and Q themselves.
    """

    def __init__(
        self,
        layout: PowerSGDLayout,
        dtype: torch.dtype,
        device: torch.device,
        *,
        error_feedback: bool,
        warm_start: bool,
        epsilon: float,
        seed: int,
        wire_dtype: torch.dtype | None = None,
    ):
        self.layout, self._dtype = layout, dtype
        self.p_wire = torch.empty(layout.wire_numel, dtype=wire_dtype or dtype, device=device)
        self.q_wire = torch.empty(layout.q_numel, dtype=wire_dtype or dtype, device=device)
        # The wires hold P and Q times this.
        self._shrunk = 1.0 if self.p_wire.dtype == torch.float16 else SHRINK
        self.wire_numels = (layout.p_numel, layout.wire_numel - layout.p_numel, layout.q_numel)
        # Factors are in the wide dtype. They share the wire's tensor if it has that dtype and order.
        wide = torch.promote_types(dtype, torch.float32)
        self._p_part = self.p_wire[: layout.p_numel]
        is_alike = self.p_wire.dtype == wide
        self._by_column = wire_dtype is not None
        self._p = (
            self._p_part if is_alike and not self._by_column else torch.empty_like(self._p_part, dtype=wide)
        )
        self._q = self.q_wire if is_alike else torch.empty_like(self.q_wire, dtype=wide)
        # Scratch for one matrix at a time: a 16-bit matrix, or a square view with padding.
        sizes = [m.rows * m.cols for m in layout.matrices if dtype != wide or m.numel < m.rows * m.cols]
        scratch = torch.zeros(max(sizes, default=0), dtype=wide, device=device)
        self.groups = []
        # The panels of one rank are orthonormalized together.
        self._groups_by_rank: dict[int, list[MatrixGroup]] = {}
        p_begin = q_begin = 0
        for matrices in layout.groups:
            k, rows, cols, rank = len(matrices), matrices[0].rows, matrices[0].cols, matrices[0].rank
            p = self._p[p_begin : (p_begin := p_begin + k * rows * rank)].view(k, rows, rank)
            qt = self._q[q_begin : (q_begin := q_begin + k * rank * cols)].view(k, rank, cols)
            self.groups.append(MatrixGroup(matrices, p, qt, scratch, dtype, error_feedback, self._shrunk))
            self._groups_by_rank.setdefault(rank, []).append(self.groups[-1])
        self._error_feedback, self._warm_start = error_feedback, warm_start
        self._epsilon = epsilon * self._shrunk
        for group, direction in zip(self.groups, self._random(seed), strict=True):
            group.direction.copy_(direction)

    def sent_p(self, index: int) -> torch.Tensor:
        """Return the part of p_wire that holds P of the matrix with this index."""
        return self.p_wire[self.layout.p_slice(index)]

    def project(self, buffer: torch.Tensor, scale: float, left_out: Sequence[int] = ()) -> None:
        """Compute M = gradient + error, and p_wire = scale · (all M Q, then the uncompressed tensors).

        left_out: indices of matrices to send zeros for, instead of P.
        """
        for group in self.groups:
            group.project(buffer)
        if self._by_column:
            for group, sent in self._sent_groups():
                cast(group.p.mT, out=sent, scale=scale * self._shrunk / SHRINK)
        else:
            cast(self._p, out=self._p_part, scale=scale * self._shrunk / SHRINK)
        for (offset, numel), wire in self._uncompressed():
            cast(buffer[offset : offset + numel], out=wire, scale=scale)
        for index in left_out:
            self.sent_p(index).zero_()

    def orthonormalize(self) -> None:
        """Copy the averaged P from p_wire, and orthonormalize its columns."""
        if self._by_column:
            for group, sent in self._sent_groups():
                group.p.copy_(sent.mT)
        else:
            self._p.copy_(self._p_part)
        for groups in self._groups_by_rank.values():
            orthonormalize([group.p for group in groups], self._epsilon, [group.scratch for group in groups])

    def back_project(self, buffer: torch.Tensor, scale: float) -> None:
        """Orthonormalize P, and compute q_wire = scale · (all Qᵀ = Pᵀ M)."""
        self.orthonormalize()
        for group in reversed(self.groups):  # in reverse for the caches' sake; see MatrixGroup.back_project
            group.back_project(buffer)
        cast(self._q, out=self.q_wire, scale=scale * self._shrunk / SHRINK)

    def reconstruct(self, buffer: torch.Tensor, seed: int) -> None:
        """Write P Qᵀ and the uncompressed averages to the buffer; choose the next step's directions.

        seed: the seed for random directions.

        A matrix with factors that aren't finite becomes NaN in this step. In the next step it starts again,
        with a zero error and random directions.
        """
        self._q.copy_(self.q_wire)
        for group in self.groups:
            group.reconstruct(buffer)
        for (offset, numel), wire in self._uncompressed():
            buffer[offset : offset + numel].copy_(wire)
        if not self.groups:
            return
        lengths = [group.normalize_directions() for group in self.groups]
        length = torch.cat(lengths) / self._shrunk
        is_finite = length < torch.inf
        # A zero direction would stay zero in every later step.
        kept = (length > MIN_LENGTH) & is_finite
        if not self._warm_start:
            kept.fill_(False)
        if not kept.all():
            lost = (~kept).split([len(each) for each in lengths])
            for group, lost_directions, random in zip(self.groups, lost, self._random(seed), strict=True):
                group.replace(lost_directions, random)
        if not is_finite.all():
            for group in self.groups:
                group.clear_error()

    def error(self) -> torch.Tensor:
        """Return this rank's error [numel] in the bucket's dtype, zero where nothing is compressed."""
        flat = torch.zeros(self.layout.numel, dtype=self._dtype, device=self.p_wire.device)
        for group in self.groups:
            errors = group.settle()
            if errors is not None:
                for error, part in zip(errors.flatten(1), group.parts(flat), strict=True):
                    part.copy_(error[: part.numel()])
        # The next step also counts an error that isn't finite as zero.
        return flat.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def add_to_error(self, offset: int, values: torch.Tensor) -> None:
        """Add values to this rank's error. Does nothing without error feedback.

        offset: the position in the bucket of the first value.
        """
        for group in self.groups:
            errors = group.settle()
            if errors is None:
                continue
            for matrix, error in zip(group.matrices, errors.flatten(1), strict=True):
                start = offset - matrix.offset
                if 0 <= start < matrix.numel:
                    error[start : start + len(values)].add_(values)

    def directions(self) -> list[torch.Tensor]:
        """Return copies of the directions that the next step projects on: Q [cols, rank] for every matrix."""
        return [qt.mT.clone() for group in self.groups for qt in group.direction]

    def load(self, error: torch.Tensor, directions: Sequence[torch.Tensor]) -> None:
        """Continue from another plan's error and directions.

        error: [numel]; ignored without error feedback.
        directions: Q [cols, rank] for every matrix, in the layout's order: any basis. Its columns are scaled
            to length 1.
        """
        remaining = iter(directions)
        for group in self.groups:
            errors = group.settle()
            if errors is not None:
                for memory, part in zip(errors.flatten(1), group.parts(error), strict=True):
                    memory[: part.numel()].copy_(part)
            given = torch.stack([next(remaining) for _ in group.matrices]).mT.to(group.qt)
            length = torch.linalg.vector_norm(given, dim=-1, keepdim=True)
            # Directions that have length 1 already are loaded bit for bit.
            is_normal = bool(((length - 1).abs() < 1e-5).all())
            kept = (length > MIN_LENGTH) & (length < torch.inf)
            normal = given if is_normal else given / length
            torch.where(kept, normal, group.direction, out=group.direction)

    def _random(self, seed: int) -> Iterator[torch.Tensor]:
        """Yield random orthonormal directions for every matrix group, the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        for group in self.groups:
            panel = torch.randn(group.qt.mT.shape, generator=generator, device="cpu").to(group.direction)
            orthonormalize([panel], 0.0, [panel.new_empty(2, *panel.shape, dtype=torch.float64)])
            yield panel.mT

    def _sent_groups(self) -> Iterator[tuple[MatrixGroup, torch.Tensor]]:
        """Return (matrix group, view [k, r, rows] of its Pᵀ on the wire) for each group."""
        parts = self._p_part.split([group.p.numel() for group in self.groups])
        return ((group, part.view(group.p.mT.shape)) for group, part in zip(self.groups, parts, strict=True))

    def _uncompressed(self) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        """Return ((offset, numel) in the bucket, view of p_wire) for each uncompressed tensor."""
        wires = self.p_wire[self.layout.p_numel :].split([numel for _, numel in self.layout.uncompressed])
        return zip(self.layout.uncompressed, wires, strict=True)
