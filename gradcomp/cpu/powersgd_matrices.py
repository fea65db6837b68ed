"""The matrices of one shape in a bucket, and PowerSGD's arithmetic on them in plain torch.

Letters as in the paper (Vogels et al. 2019, algorithm 1), for k matrices of one shape: M [k, rows, cols] is
gradient + error, and P [k, rows, r] and Qᵀ [k, r, cols] are M's factors. Qᵀ is stored rather than Q, because
products are several times faster on a CPU if Qᵀ's rows are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gradcomp.layout import Matrix

# The number of matrix elements that a stage processes together: 4 MB in fp32, which an L3 cache holds.
CHUNK_NUMEL = 1 << 20
# A batched product of this many matrices keeps a few threads busy; a single product does not.
BATCH = 4
# Up to this rank P Qᵀ is computed elementwise, term by term. For so short a sum, matrix multiplication takes
# up to three times as long.
MAX_TERMS = 4
# Up to this rank P Qᵀ is subtracted from M only when the next gradient is added, term by term. That saves two
# passes over main memory. With more terms it is faster to subtract the product while a cache holds it.
MAX_DEFERRED_TERMS = 2
ALL = slice(None)
# Products multiply P and Q by this power of two, which changes no bits. Then no sum of finite products
# overflows in matrices of up to 65,536 rows and columns. Results near the smallest fp32 numbers lose bits.
SHRINK = 2.0**-16


def fit_float16(error: torch.Tensor) -> None:
    """Scale down the error [rows, cols] of a float16 matrix, in place, if the next factors might overflow.

    With Q and P orthonormal, no element of M Q or Mᵀ P exceeds the norm of M's longest row or column. After
    gradients near float16's largest value, that norm may not fit float16. If the error's longest row or
    column exceeds three quarters of the largest value, the error is scaled so that it has half of the largest
    value. Then its sum with the next gradients fits.
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
    """View [k, n, m] as [k · blocks, n / blocks, m]: a product of few matrices becomes one of up to BATCH."""
    k, rows, cols = tensor.shape
    blocks = next((blocks for blocks in (BATCH, BATCH // 2) if k * blocks <= BATCH and rows % blocks == 0), 1)
    return tensor.view(k * blocks, rows // blocks, cols)


def per_block(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Repeat each matrix's factor, given as [k, r, cols], for each of the matrix's row_blocks."""
    k, rank, cols = tensor.shape
    if k == 1:
        return tensor.expand(num_blocks, rank, cols)
    return tensor[:, None].expand(k, num_blocks // k, rank, cols).reshape(num_blocks, rank, cols)


Term = tuple[torch.Tensor, torch.Tensor]  # a column of P [k, n, 1] and a row of Qᵀ [k, 1, cols]


def terms(p: torch.Tensor, qt: torch.Tensor, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[Term]]]:
    """Yield (rows of out, P Qᵀ's terms for these rows), for as many rows at once as a cache holds."""
    rows_at_once = max(1, CHUNK_NUMEL * out.shape[1] // out.numel())
    for rows, columns in zip(out.split(rows_at_once, 1), p.split(rows_at_once, 1), strict=True):
        yield rows, list(zip(columns.split(1, 2), qt.split(1, 1), strict=True))


class MatrixGroup:
    """The matrices of one shape: their positions in the bucket, their errors, and their factors.

    matrices: the matrices' positions in the bucket.
    p [k, rows, r], qt [k, r, cols]: the factors, in the wide dtype (fp32 or fp64), kept from step to step.
        back_project sets p to SHRINK · P. reconstruct expects qt = shrunk · Q, and sets p to P / shrunk.
    scratch: a buffer for one matrix in the wide dtype, empty if none is needed (see PowerSGDPlan).
    dtype: the bucket's dtype.
    keep_error: True with error feedback.
    shrunk: the factor by which P and Q on the wire are multiplied.

    memory: [k, rows, cols] in the bucket's dtype; None without error feedback. From project to reconstruct it
        holds M = gradient + error. Between steps it holds the error, or still M; settle() then subtracts
        P Qᵀ. Where M isn't finite, the error counts as zero.
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
        # True while memory still holds M, from which P Qᵀ must be subtracted.
        self._is_unsettled = False
        # The rows of length 1 that the next step projects on.
        self.direction = torch.zeros(k, rank, cols, dtype=wide, device=device)
        # Holds one matrix in the wide dtype if the bucket has no such view.
        self._matrix = scratch[: rows * cols].view(1, rows, cols) if len(scratch) else scratch
        self.scratch = torch.empty(2, *p.shape, dtype=torch.float64, device=device)
        # One partial sum of Qᵀ for each of row_blocks.
        self._partial = torch.empty(BATCH, rank, cols, dtype=wide, device=device)
        # A chunk is small enough that a cache still holds its results when the stage reads them again.
        step = max(1, CHUNK_NUMEL // (rows * cols))
        self._chunks = [slice(i, min(i + step, k)) for i in range(0, k, step)]

    def parts(self, buffer: torch.Tensor, which: slice = ALL) -> Iterator[torch.Tensor]:
        """Yield each matrix's elements in the bucket, flat."""
        for matrix in self.matrices[which]:
            yield buffer[matrix.offset : matrix.offset + matrix.numel]

    def project(self, buffer: torch.Tensor) -> None:
        """Compute M = gradient + error, in place of the error, and p = SHRINK · M Q."""
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
        """Compute p = SHRINK · M Q for the matrices of a chunk."""
        for which, matrix in self._matrices(buffer, chunk):
            blocks = row_blocks(matrix)
            direction = per_block(self.direction[which] * SHRINK, len(blocks))
            torch.bmm(blocks, direction.mT, out=row_blocks(self.p[which]))

    def back_project(self, buffer: torch.Tensor) -> None:
        """Set p to SHRINK · P, and compute qt = SHRINK · Pᵀ M."""
        self.p.mul_(SHRINK)
        self._is_p_shrunk = True
        # In reverse: a cache still holds project's last chunk, and will hold the first chunk in reconstruct.
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
        """Compute gradient = P Qᵀ, and error = M − P Qᵀ in place of M, now or later in settle or project."""
        if self._is_p_shrunk:  # False if the stage is repeated, as in benchmarks
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
                    # An error that overflows 16 bits is lost; it would stay infinite in all later steps.
                    error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                    if not part.isfinite().all():
                        error.zero_()  # a GradScaler skips such a step
                if error.dtype == torch.float16:
                    fit_float16(self.memory[i])

    def settle(self) -> torch.Tensor | None:
        """Return the error [k, rows, cols]; None without error feedback."""
        if self._is_unsettled:
            for chunk in self._chunks:
                self._subtract_product(chunk)
            self._is_unsettled = False
        return self.memory

    def normalize_directions(self) -> torch.Tensor:
        """Set the next directions to qt's rows, scaled to length 1. Returns the rows' lengths, [k · r]."""
        length: torch.Tensor = torch.linalg.vector_norm(self.qt, dim=-1, dtype=torch.float64)
        torch.div(self.qt, length.to(self.qt.dtype)[:, :, None], out=self.direction)
        return length.view(-1)

    def replace(self, lost: torch.Tensor, random: torch.Tensor) -> None:
        """Replace lost directions by random directions.

        lost: [k · r], True for a direction to replace.
        random: [k, r, cols], the random directions.
        """
        torch.where(lost.view(*random.shape[:2], 1), random, self.direction, out=self.direction)

    def clear_error(self) -> None:
        """Set the error to zero where it isn't finite."""
        error = self.settle()
        if error is not None:
            error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _add(self, buffer: torch.Tensor, which: slice) -> None:
        """Compute M = gradient + error, in place of the error."""
        if self.memory is None:
            return
        if self.is_contiguous:
            self.memory[which].add_(self._contiguous_view(buffer)[which])
            return
        for matrix, part in zip(self.memory[which].flatten(1), self.parts(buffer, which), strict=True):
            matrix[: part.numel()].add_(part)

    def _contiguous_view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return all matrices as one view of the bucket. They must be contiguous there."""
        offset, numel = self.matrices[0].offset, len(self.matrices) * self.matrices[0].numel
        return buffer[offset : offset + numel].view(self.shape)

    def _views(self, buffer: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield (which, view [n, rows, cols] of the bucket), for as many matrices at once as possible."""
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
                    # A square view's padding in scratch still holds the last step's P Qᵀ.
                    matrix = self._matrix.zero_() if not self.is_complete else self._matrix
                    matrix.view(-1)[: part.numel()].copy_(part)
                yield slice(i, i + 1), matrix

    def _product(self, which: slice, out: torch.Tensor) -> None:
        """Compute P Qᵀ for some of the matrices."""
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
        """Compute M − P Qᵀ in place of M, for some of the matrices."""
        assert self.memory is not None
        for rows, each in terms(self.p[which], self.qt[which], self.memory[which]):
            for column, row in each:
                rows.addcmul_(column, row, value=-1)
