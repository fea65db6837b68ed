"""PowerSGD's local arithmetic in plain torch: the reference, and what runs on CPU tensors.

Paper letters (Vogels et al. 2019, algorithm 1) for a stack of k matrices of one shape: M [k, rows, cols] is
gradient + error, P [k, rows, r] and Qᵀ [k, r, cols] its factors. Qᵀ rather than Q: with its rows in memory
order, the products run several times faster on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from .copy import cast
from .orthonormalise import orthonormalise

if TYPE_CHECKING:
    from gradcomp.layout import LowRankLayout, Matrix

# Elements of the matrices that go through a stage together: an L3 cache holds 4 MB.
PIECE = 1 << 20
# A product of this many matrices keeps a few threads busy; one product alone does not.
BATCH = 4
ALL = slice(None)
# Of Q's columns: the inverse of a shorter one nears the end of fp32.
SHORTEST = 1e-30


def fit_float16(error: torch.Tensor) -> None:
    """Shorten the error [rows, cols] of a matrix in float16 where the next step's factors might not fit float16.

    No element of M Q or Mᵀ P, with Q and P orthonormal, is larger than the longest row or column of M. Where that nears
    float16's largest after a step of gradients that do, the error is halved or less, which leaves room for the gradients.
    """
    largest = torch.finfo(error.dtype).max
    low, high = error.aminmax()
    if max(-float(low), float(high)) * math.sqrt(max(error.shape)) <= 0.75 * largest:
        return
    norms = (torch.linalg.vector_norm(error, dim=dim, dtype=torch.float32).max() for dim in (0, 1))
    longest = max(map(float, norms))
    if longest > 0.75 * largest:
        error.mul_(0.5 * largest / longest)


def row_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """[k, n, m] as [k · blocks, n / blocks, m]: cut so that a product of few matrices is one of BATCH."""
    k, rows, cols = tensor.shape
    blocks = next((blocks for blocks in (BATCH, BATCH // 2) if k * blocks <= BATCH and rows % blocks == 0), 1)
    return tensor.view(k * blocks, rows // blocks, cols)


def per_block(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A factor [k, r, cols] of every matrix once for each of its row_blocks."""
    k, rank, cols = tensor.shape
    if k == 1:
        return tensor.expand(num_blocks, rank, cols)
    return tensor[:, None].expand(k, num_blocks // k, rank, cols).reshape(num_blocks, rank, cols)


class Stack:
    """The matrices of one shape: where they lie in the bucket, their memory, and the factors.

    p [k, rows, r], qt [k, r, cols]: in the wide dtype, fp32 or fp64. memory: in the bucket's dtype, the error
    between steps; M = gradient + error from project to reconstruct. scratch: in the wide dtype, room for one
    matrix if it is needed (see LowRankPlan).
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        p: torch.Tensor,
        qt: torch.Tensor,
        scratch: torch.Tensor,
        dtype: torch.dtype,
        keep_error: bool,
    ):
        first = matrices[0]
        k, rows, cols, rank = len(matrices), first.rows, first.cols, first.rank
        self.matrices, self.shape, self.p, self.qt = matrices, (k, rows, cols), p, qt
        wide, device = p.dtype, p.device
        self.is_wide = dtype == wide
        self.is_complete = first.numel == rows * cols
        self.is_one_piece = self.is_complete and all(
            matrix.offset == first.offset + i * rows * cols for i, matrix in enumerate(matrices)
        )
        self.memory = torch.zeros(k, rows, cols, dtype=dtype, device=device) if keep_error else None
        # What the next step projects on, in rows of length 1.
        self.direction = torch.zeros(k, rank, cols, dtype=wide, device=device)
        # Where the bucket has no matrix in the wide dtype to show.
        self._matrix = scratch[: rows * cols].view(1, rows, cols) if len(scratch) else scratch
        self.scratch = torch.empty(2, *p.shape, dtype=torch.float64, device=device)
        # Partial Qᵀ of row_blocks.
        self._partial = torch.empty(BATCH, rank, cols, dtype=wide, device=device)
        # Of so many matrices at once, what a stage has written is still in a cache when it reads it again.
        step = max(1, PIECE // (rows * cols))
        self._pieces = [slice(i, min(i + step, k)) for i in range(0, k, step)]

    def parts(self, buffer: torch.Tensor, which: slice = ALL) -> Iterator[torch.Tensor]:
        """Each matrix's elements in the bucket, flat."""
        for matrix in self.matrices[which]:
            yield buffer[matrix.offset : matrix.offset + matrix.numel]

    def project(self, buffer: torch.Tensor) -> None:
        """M = gradient + error, in the error's place; P = M Q."""
        for piece in self._pieces:
            self._add(buffer, piece)
            for which, matrix in self._matrices(buffer, piece):
                blocks = row_blocks(matrix)
                direction = per_block(self.direction[which], len(blocks))
                torch.bmm(blocks, direction.mT, out=row_blocks(self.p[which]))

    def back_project(self, buffer: torch.Tensor) -> None:
        """Qᵀ = Pᵀ M."""
        # Backwards: what project read last is still in a cache, as what is read last here will be to reconstruct.
        for piece in reversed(self._pieces):
            for which, matrix in self._matrices(buffer, piece):
                blocks, qt = row_blocks(matrix), self.qt[which]
                if len(blocks) == len(qt):
                    torch.bmm(self.p[which].mT, matrix, out=qt)
                else:
                    partial = self._partial[: len(blocks)]
                    torch.bmm(row_blocks(self.p[which]).mT, blocks, out=partial)
                    torch.sum(partial.view(len(qt), -1, *qt.shape[1:]), dim=1, out=qt)

    def reconstruct(self, buffer: torch.Tensor) -> None:
        """gradient = P Qᵀ; error = M − P Qᵀ, in M's place."""
        if self.is_one_piece and self.is_wide:
            products = self._one_piece(buffer)
            for piece in self._pieces:
                self._product(piece, out=products[piece])
                if self.memory is not None:
                    self.memory[piece].sub_(products[piece])
            return
        for i, part in enumerate(self.parts(buffer)):
            which = slice(i, i + 1)
            if self.is_wide and self.is_complete:
                self._product(which, out=part.view(1, *self.shape[1:]))
            else:
                self._product(which, out=self._matrix)
                part.copy_(self._matrix.view(-1)[: part.numel()])
            if self.memory is not None:
                error = self.memory[i].view(-1)[: part.numel()].sub_(part)
                if not self.is_wide:
                    # What 16 bits can't hold is lost, instead of being infinite from now on.
                    error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                    if not part.isfinite().all():
                        error.zero_()  # nobody uses such a step
                if error.dtype == torch.float16:
                    fit_float16(self.memory[i])

    def turn(self) -> torch.Tensor:
        """Make the rows of Qᵀ the next direction. Returns their lengths [k · r]."""
        length: torch.Tensor = torch.linalg.vector_norm(self.qt, dim=-1, dtype=torch.float64)
        torch.div(self.qt, length.to(self.qt.dtype)[:, :, None], out=self.direction)
        return length.view(-1)

    def replace(self, lost: torch.Tensor, random: torch.Tensor) -> None:
        """Random directions in place of those lost [k · r]; no error where it isn't finite."""
        torch.where(lost.view(*random.shape[:2], 1), random, self.direction, out=self.direction)
        if self.memory is not None:
            self.memory.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _add(self, buffer: torch.Tensor, which: slice) -> None:
        """M = gradient + error, in the error's place."""
        if self.memory is None:
            return
        if self.is_one_piece:
            self.memory[which].add_(self._one_piece(buffer)[which])
            return
        for matrix, part in zip(self.memory[which].flatten(1), self.parts(buffer, which), strict=True):
            matrix[: part.numel()].add_(part)

    def _one_piece(self, buffer: torch.Tensor) -> torch.Tensor:
        """All matrices as a view of the bucket, where they lie one after another."""
        offset, numel = self.matrices[0].offset, len(self.matrices) * self.matrices[0].numel
        return buffer[offset : offset + numel].view(self.shape)

    def _matrices(self, buffer: torch.Tensor, which: slice) -> Iterator[tuple[slice, torch.Tensor]]:
        """M of these matrices in the wide dtype, as many at once as can be without a copy: (which, M)."""
        if self.is_wide and self.memory is not None:
            yield which, self.memory[which]
        elif self.is_wide and self.is_one_piece:
            yield which, self._one_piece(buffer)[which]
        else:
            for i, part in enumerate(self.parts(buffer, which), which.start or 0):
                if self.memory is not None:
                    matrix = self._matrix.copy_(self.memory[i])
                elif self.is_wide and self.is_complete:
                    matrix = part.view(1, *self.shape[1:])
                else:
                    # What lies behind a square view's end is P Qᵀ of the last step.
                    matrix = self._matrix.zero_() if not self.is_complete else self._matrix
                    matrix.view(-1)[: part.numel()].copy_(part)
                yield slice(i, i + 1), matrix

    def _product(self, which: slice, out: torch.Tensor) -> None:
        """P Qᵀ of some of the matrices."""
        p, qt = self.p[which], self.qt[which]
        if p.shape[-1] == 1:
            torch.mul(p, qt, out=out)
        else:
            blocks = row_blocks(out)
            torch.bmm(row_blocks(p), per_block(qt, len(blocks)), out=blocks)


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
        # The factors in the wide dtype: on the wire where that is the bucket's, else rounded to it.
        wide = torch.promote_types(dtype, torch.float32)
        self._p_part = self.p_wire[: layout.p_numel]
        self._p = self._p_part if dtype == wide else torch.empty_like(self._p_part, dtype=wide)
        self._q = self.q_wire if dtype == wide else torch.empty_like(self.q_wire, dtype=wide)
        # One matrix at a time, where the bucket has it in 16 bits or, of the square view, not whole.
        sizes = [m.rows * m.cols for m in layout.matrices if dtype != wide or m.numel < m.rows * m.cols]
        scratch = torch.zeros(max(sizes, default=0), dtype=wide, device=device)
        self.stacks = []
        # Their panels are orthonormalised together.
        self._of_rank: dict[int, list[Stack]] = {}
        p_begin = q_begin = 0
        for group in layout.groups:
            k, rows, cols, rank = len(group), group[0].rows, group[0].cols, group[0].rank
            p = self._p[p_begin : (p_begin := p_begin + k * rows * rank)].view(k, rows, rank)
            qt = self._q[q_begin : (q_begin := q_begin + k * rank * cols)].view(k, rank, cols)
            self.stacks.append(Stack(group, p, qt, scratch, dtype, error_feedback))
            self._of_rank.setdefault(rank, []).append(self.stacks[-1])
        self._error_feedback, self._warm_start, self._epsilon = error_feedback, warm_start, epsilon
        for stack, direction in zip(self.stacks, self._random(seed), strict=True):
            stack.direction.copy_(direction)

    def project(self, buffer: torch.Tensor, scale: float) -> None:
        """M = gradient + error; p_wire = scale · (all M Q, then what isn't compressed)."""
        for stack in self.stacks:
            stack.project(buffer)
        cast(self._p, out=self._p_part, scale=scale)
        for (offset, numel), wire in self._rest():
            cast(buffer[offset : offset + numel], out=wire, scale=scale)

    def orthonormalise(self) -> None:
        """P = orthonormal bases of what p_wire has."""
        self._p.copy_(self._p_part)
        for stacks in self._of_rank.values():
            orthonormalise([stack.p for stack in stacks], self._epsilon, [stack.scratch for stack in stacks])

    def back_project(self, buffer: torch.Tensor, scale: float) -> None:
        """P = orthonormalise(p_wire's); q_wire = scale · all Qᵀ = Pᵀ M."""
        self.orthonormalise()
        for stack in reversed(self.stacks):  # as each its pieces
            stack.back_project(buffer)
        cast(self._q, out=self.q_wire, scale=scale)

    def reconstruct(self, buffer: torch.Tensor, seed: int) -> None:
        """gradient = P Qᵀ and the averages of the rest; choose the next step's direction.

        A matrix whose factors aren't finite gives NaN now, and starts afresh in the next step.
        """
        self._q.copy_(self.q_wire)
        for stack in self.stacks:
            stack.reconstruct(buffer)
        for (offset, numel), wire in self._rest():
            buffer[offset : offset + numel].copy_(wire)
        if not self.stacks:
            return
        lengths = [stack.turn() for stack in self.stacks]
        length = torch.cat(lengths)
        # A zero direction would never see a gradient again.
        kept = (length > SHORTEST) & (length < torch.inf)
        if not self._warm_start:
            kept.fill_(False)
        if not kept.all():
            lost = (~kept).split([len(each) for each in lengths])
            for stack, of_stack, random in zip(self.stacks, lost, self._random(seed), strict=True):
                stack.replace(of_stack, random)

    def error(self) -> torch.Tensor:
        """This rank's error [numel] in the bucket's dtype, zero where nothing is compressed."""
        flat = torch.zeros(self.layout.numel, dtype=self.p_wire.dtype, device=self.p_wire.device)
        for stack in self.stacks:
            if stack.memory is not None:
                for error, part in zip(stack.memory.flatten(1), stack.parts(flat), strict=True):
                    part.copy_(error[: part.numel()])
        return flat

    def add_to_error(self, offset: int, values: torch.Tensor) -> None:
        """Add to this rank's error, where it is kept, from this place of the bucket on."""
        for stack in self.stacks:
            errors = () if stack.memory is None else stack.memory.flatten(1)
            for matrix, error in zip(stack.matrices, errors, strict=False):
                start = offset - matrix.offset
                if 0 <= start < matrix.numel:
                    error[start : start + len(values)].add_(values)

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
            given = torch.stack([next(remaining) for _ in stack.matrices]).mT.to(stack.qt)
            length = torch.linalg.vector_norm(given, dim=-1, keepdim=True)
            # Our own come back as they were, to the bit.
            is_normal = bool(((length - 1).abs() < 1e-5).all())
            kept = (length > SHORTEST) & (length < torch.inf)
            normal = given if is_normal else given / length
            torch.where(kept, normal, stack.direction, out=stack.direction)

    def _random(self, seed: int) -> Iterator[torch.Tensor]:
        """Random orthonormal directions for every stack, the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        for stack in self.stacks:
            panel = torch.randn(stack.qt.mT.shape, generator=generator, device="cpu").to(stack.direction)
            orthonormalise([panel], 0.0, [panel.new_empty(2, *panel.shape, dtype=torch.float64)])
            yield panel.mT

    def _rest(self) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        """What isn't compressed: (offset, numel) in the bucket, and its place on the wire."""
        wires = self.p_wire[self.layout.p_numel :].split([numel for _, numel in self.layout.rest])
        return zip(self.layout.rest, wires, strict=True)
