"""The matrices of one shape in a bucket, and PowerSGD's arithmetic on them in plain torch.

Paper letters (Vogels et al. 2019, algorithm 1) for k matrices of one shape: M [k, rows, cols] is gradient +
error, P [k, rows, r] and Qᵀ [k, r, cols] are its factors. Qᵀ rather than Q: with its rows in memory order,
the products run several times faster on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gradcomp.layout import Matrix

# Elements of the matrices that go through a stage together: 4 MB in fp32, which an L3 cache holds.
CHUNK_NUMEL = 1 << 20
# A product of this many matrices keeps a few threads busy; one product alone does not.
BATCH = 4
# Up to this rank P Qᵀ is computed term by term, elementwise: matrix multiplication with so short a sum takes
# up to three times as long.
MAX_TERMS = 4
# Up to this rank P Qᵀ is taken off M when the next gradient is added, term by term, to save two passes over
# memory. More terms take longer than the subtraction of the product while that is in a cache.
MAX_DEFERRED_TERMS = 2
ALL = slice(None)
# Factors are computed of P and Q times this, a power of two that changes no bits: in matrices of up to
# 65,536 rows and columns no sum of finite products overflows. One that nears the least numbers loses bits.
SHRINK = 2.0**-16


def fit_float16(error: torch.Tensor) -> None:
    """Shorten the error [rows, cols] of a float16 matrix where the next step's factors might overflow.

    No element of M Q or Mᵀ P, with Q and P orthonormal, is larger than the norm of M's longest row or column.
    Gradients near float16's largest value can leave an error whose rows or columns are that long. Its longest
    one is scaled down to half of that value, so that the sum with the next gradients fits.
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
    """View [k, n, m] as [k · blocks, n / blocks, m], so that a product of few matrices is one of BATCH."""
    k, rows, cols = tensor.shape
    blocks = next((blocks for blocks in (BATCH, BATCH // 2) if k * blocks <= BATCH and rows % blocks == 0), 1)
    return tensor.view(k * blocks, rows // blocks, cols)


def per_block(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Repeat each matrix's factor [k, r, cols] for each of its row_blocks."""
    k, rank, cols = tensor.shape
    if k == 1:
        return tensor.expand(num_blocks, rank, cols)
    return tensor[:, None].expand(k, num_blocks // k, rank, cols).reshape(num_blocks, rank, cols)


Term = tuple[torch.Tensor, torch.Tensor]  # a column of P [k, n, 1] and a row of Qᵀ [k, 1, cols]


def terms(p: torch.Tensor, qt: torch.Tensor, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[Term]]]:
    """Yield (rows of out, the terms that P Qᵀ has there), for as many rows at once as a cache holds."""
    rows_at_once = max(1, CHUNK_NUMEL * out.shape[1] // out.numel())
    for rows, columns in zip(out.split(rows_at_once, 1), p.split(rows_at_once, 1), strict=True):
        yield rows, list(zip(columns.split(1, 2), qt.split(1, 1), strict=True))


class MatrixGroup:
    """The matrices of one shape: their positions in the bucket, their memory, and their factors.

    p [k, rows, r], qt [k, r, cols]: the factors, in the wide dtype (fp32 or fp64), kept from step to step.
    memory: M = gradient + error from project on, in the bucket's dtype; and between steps M still, of which
    settle() makes the error, or the error. Where M isn't finite, the error counts as zero. From back_project
    on p is SHRINK · P; from reconstruct on p and qt are P / shrunk and shrunk · Q. scratch: memory for one
    matrix in the wide dtype, empty where none is needed (see PowerSGDPlan).
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        p: torch.Tensor,
        qt: torch.Tensor,
        scratch: torch.Tensor,
        dtype: torch.dtype,
        keep_error: bool,
        shrunk: float,
    ):
        first = matrices[0]
        k, rows, cols, rank = len(matrices), first.rows, first.cols, first.rank
        self.matrices, self.shape, self.p, self.qt = matrices, (k, rows, cols), p, qt
        self.shrunk, self._is_p_shrunk = shrunk, False
        wide, device = p.dtype, p.device
        self.is_wide = dtype == wide
        self.is_complete = first.numel == rows * cols
        self.is_contiguous = self.is_complete and all(
            matrix.offset == first.offset + i * rows * cols for i, matrix in enumerate(matrices)
        )
        self.memory = torch.zeros(k, rows, cols, dtype=dtype, device=device) if keep_error else None
        # Whether P Qᵀ is still in the memory.
        self._is_unsettled = False
        # The rows of length 1 that the next step projects on.
        self.direction = torch.zeros(k, rank, cols, dtype=wide, device=device)
        # Holds one matrix in the wide dtype where the bucket has no view of it.
        self._matrix = scratch[: rows * cols].view(1, rows, cols) if len(scratch) else scratch
        self.scratch = torch.empty(2, *p.shape, dtype=torch.float64, device=device)
        # The partial Qᵀ of row_blocks.
        self._partial = torch.empty(BATCH, rank, cols, dtype=wide, device=device)
        # With so many matrices at once, what a stage has written is still in a cache when it reads it again.
        step = max(1, CHUNK_NUMEL // (rows * cols))
        self._chunks = [slice(i, min(i + step, k)) for i in range(0, k, step)]

    def parts(self, buffer: torch.Tensor, which: slice = ALL) -> Iterator[torch.Tensor]:
        """Yield each matrix's elements in the bucket, flat."""
        for matrix in self.matrices[which]:
            yield buffer[matrix.offset : matrix.offset + matrix.numel]

    def project(self, buffer: torch.Tensor) -> None:
        """Compute M = gradient + error, in the error's place, and SHRINK · P = SHRINK · M Q."""
        for chunk in self._chunks:
            if self._is_unsettled:
                self._subtract_product(chunk)
            self._add(buffer, chunk)
            self._multiply(buffer, chunk)
        self._is_unsettled = False
        if self.memory is not None and not math.isfinite(self.p.sum()):
            for i, part in enumerate(self.parts(buffer)):
                matrix = self.memory[i].view(-1)[: part.numel()]
                torch.where(matrix.isfinite(), matrix, part, out=matrix)
            self._multiply(buffer, ALL)

    def _multiply(self, buffer: torch.Tensor, chunk: slice) -> None:
        """Compute SHRINK · M Q of some of the matrices."""
        for which, matrix in self._matrices(buffer, chunk):
            blocks = row_blocks(matrix)
            direction = per_block(self.direction[which] * SHRINK, len(blocks))
            torch.bmm(blocks, direction.mT, out=row_blocks(self.p[which]))

    def back_project(self, buffer: torch.Tensor) -> None:
        """Compute SHRINK · Qᵀ = SHRINK · Pᵀ M."""
        self.p.mul_(SHRINK)
        self._is_p_shrunk = True
        # Backwards: project read the last chunk last, so it is still in a cache; so will the first be in
        # reconstruct.
        for chunk in reversed(self._chunks):
            for which, matrix in self._matrices(buffer, chunk):
                blocks, qt = row_blocks(matrix), self.qt[which]
                if len(blocks) == len(qt):
                    torch.bmm(self.p[which].mT, matrix, out=qt)
                else:
                    partial = self._partial[: len(blocks)]
                    torch.bmm(row_blocks(self.p[which]).mT, blocks, out=partial)
                    torch.sum(partial.view(len(qt), -1, *qt.shape[1:]), dim=1, out=qt)

    def reconstruct(self, buffer: torch.Tensor) -> None:
        """Compute gradient = P Qᵀ, and error = M − P Qᵀ in M's place, now or when it is needed."""
        if self._is_p_shrunk:  # no longer where the stage is repeated, as benchmarks do
            self.p.mul_(1 / (SHRINK * self.shrunk))
            self._is_p_shrunk = False
        if self.is_wide and self.is_complete:
            self._is_unsettled = self.memory is not None and self.p.shape[-1] <= MAX_DEFERRED_TERMS
            for which, product in self._views(buffer):
                self._product(which, out=product)
                if self.memory is not None and not self._is_unsettled:
                    self.memory[which].sub_(product)
            return
        for i, part in enumerate(self.parts(buffer)):
            which = slice(i, i + 1)
            self._product(which, out=self._matrix)
            part.copy_(self._matrix.view(-1)[: part.numel()])
            if self.memory is not None:
                error = self.memory[i].view(-1)[: part.numel()].sub_(part)
                if not self.is_wide:
                    # What 16 bits can't hold is lost; otherwise it would stay infinite in all later steps.
                    error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                    if not part.isfinite().all():
                        error.zero_()  # a GradScaler skips such a step
                if error.dtype == torch.float16:
                    fit_float16(self.memory[i])

    def settle(self) -> torch.Tensor | None:
        """Return the error [k, rows, cols], None if none is kept."""
        if self._is_unsettled:
            for chunk in self._chunks:
                self._subtract_product(chunk)
            self._is_unsettled = False
        return self.memory

    def normalize_directions(self) -> torch.Tensor:
        """Scale the rows of Qᵀ to length 1, as the next directions. Returns their lengths before, [k · r]."""
        length: torch.Tensor = torch.linalg.vector_norm(self.qt, dim=-1, dtype=torch.float64)
        torch.div(self.qt, length.to(self.qt.dtype)[:, :, None], out=self.direction)
        return length.view(-1)

    def replace(self, lost: torch.Tensor, random: torch.Tensor) -> None:
        """Put random directions in place of the lost ones.

        lost: a mask, [k · r]. random: the random directions, [k, r, cols].
        """
        torch.where(lost.view(*random.shape[:2], 1), random, self.direction, out=self.direction)

    def clear_error(self) -> None:
        """Put zeros where the error isn't finite."""
        error = self.settle()
        if error is not None:
            error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _add(self, buffer: torch.Tensor, which: slice) -> None:
        """Compute M = gradient + error, in the error's place."""
        if self.memory is None:
            return
        if self.is_contiguous:
            self.memory[which].add_(self._contiguous_view(buffer)[which])
            return
        for matrix, part in zip(self.memory[which].flatten(1), self.parts(buffer, which), strict=True):
            matrix[: part.numel()].add_(part)

    def _contiguous_view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return all matrices as one view of the bucket, which has them one after another."""
        offset, numel = self.matrices[0].offset, len(self.matrices) * self.matrices[0].numel
        return buffer[offset : offset + numel].view(self.shape)

    def _views(self, buffer: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield (which, a view [n, rows, cols] of the bucket) of complete matrices, as many as possible."""
        if self.is_contiguous:
            matrices = self._contiguous_view(buffer)
            yield from ((chunk, matrices[chunk]) for chunk in self._chunks)
        else:
            for i, part in enumerate(self.parts(buffer)):
                yield slice(i, i + 1), part.view(1, *self.shape[1:])

    def _matrices(self, buffer: torch.Tensor, which: slice) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield (which, M) in the wide dtype, for as many matrices at once as possible without a copy."""
        if self.is_wide and self.memory is not None:
            yield which, self.memory[which]
        elif self.is_wide and self.is_contiguous:
            yield which, self._contiguous_view(buffer)[which]
        else:
            for i, part in enumerate(self.parts(buffer, which), which.start or 0):
                if self.memory is not None:
                    matrix = self._matrix.copy_(self.memory[i])
                elif self.is_wide and self.is_complete:
                    matrix = part.view(1, *self.shape[1:])
                else:
                    # Behind the end of a square view, scratch still holds P Qᵀ of the last step.
                    matrix = self._matrix.zero_() if not self.is_complete else self._matrix
                    matrix.view(-1)[: part.numel()].copy_(part)
                yield slice(i, i + 1), matrix

    def _product(self, which: slice, out: torch.Tensor) -> None:
        """Compute P Qᵀ of some of the matrices."""
        p, qt = self.p[which], self.qt[which]
        if p.shape[-1] > MAX_TERMS:
            blocks = row_blocks(out)
            torch.bmm(row_blocks(p), per_block(qt, len(blocks)), out=blocks)
            return
        for rows, (first, *others) in terms(p, qt, out):
            torch.mul(*first, out=rows)
            for column, row in others:
                rows.addcmul_(column, row)

    def _subtract_product(self, which: slice) -> None:
        """Compute M − P Qᵀ in M's place, for some of the matrices."""
        assert self.memory is not None
        for rows, each in terms(self.p[which], self.qt[which], self.memory[which]):
            for column, row in each:
                rows.addcmul_(column, row, value=-1)
