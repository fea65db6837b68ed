"""PowerSGD's local arithmetic in plain torch, for CPU tensors and as the kernels' reference.

Letters as in the paper (Vogels et al. 2019, algorithm 1), for k matrices of one shape: M [k, rows, cols] is
gradient + error, and P [k, rows, r] and Qᵀ [k, r, cols] are M's factors. Qᵀ is stored rather than Q, because
products are several times faster on a CPU if Qᵀ's rows are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .copy import cast
from .orthonormalize import orthonormalize

if TYPE_CHECKING:
    from gradcomp.layout import Matrix, PowerSGDLayout

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
# Products multiply P and Q by this power of two, which changes no bits. Then no sum of finite products
# overflows in matrices of up to 65,536 rows and columns. Results near the smallest fp32 numbers lose bits.
SHRINK = 2.0**-16
# Columns of Q shorter than this are replaced, because the inverse of their length might overflow fp32.
MIN_LENGTH = 1e-30


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
    """View [k, n, m] as [k, blocks, n / blocks, m]: a product of few matrices becomes one of up to BATCH."""
    k, rows, cols = tensor.shape
    blocks = next((blocks for blocks in (BATCH, BATCH // 2) if k * blocks <= BATCH and rows % blocks == 0), 1)
    return tensor.view(k, blocks, rows // blocks, cols)


@dataclass(frozen=True)
class Run:
    """Matrices of a group that are one after another in the bucket.

    which: the matrices among the group's.
    stored, in_bucket: their elements in the group's memory, flat, and in the bucket.
    """

    which: slice
    stored: slice
    in_bucket: slice


class MatrixGroup:
    """The matrices of one shape: their positions in the bucket, their errors, and their factors.

    p [k, rows, r], qt [k, r, cols]: the factors, in the wide dtype (fp32 or fp64), kept from step to step.
        For reconstruct they are P / shrunk and shrunk · Q (see PowerSGDPlan).
    scratch: a buffer for one matrix in the wide dtype, empty if none is needed (see PowerSGDPlan).
    dtype: the bucket's dtype.

    memory: [k, rows, cols] in the bucket's dtype; None without error feedback. From project to reconstruct it
        holds M = gradient + error. Between steps it holds the error, or still M; settle() then subtracts
        P Qᵀ. Where only M isn't finite, the error counts as zero.
    direction: [k, r, cols], the rows of length 1 that the next step projects on.
    runs: all matrices.
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
        (k, rows, rank), cols, numel = p.shape, qt.shape[2], matrices[0].numel
        self.p, self.qt, self._shape = p, qt, (-1, rows, cols)
        wide, device = p.dtype, p.device
        self._is_wide = dtype == wide
        # Whether the arithmetic can be on views of the bucket.
        self._is_viewed = self._is_wide and numel == rows * cols
        self.memory = torch.zeros(k, rows, cols, dtype=dtype, device=device) if keep_error else None
        # True while memory still holds M, from which P Qᵀ must be subtracted.
        self._is_unsettled = False
        self.direction = torch.zeros(k, rank, cols, dtype=wide, device=device)
        # Holds one matrix in the wide dtype if the bucket has no such view.
        self._matrix = scratch[: rows * cols].view(1, rows, cols) if len(scratch) else scratch
        self.scratch = torch.empty(2, *p.shape, dtype=torch.float64, device=device)
        # One partial sum of Qᵀ for each of row_blocks.
        self._partial = torch.empty(BATCH, rank, cols, dtype=wide, device=device)
        starts = [matrix.offset for matrix in matrices]
        are_adjacent = self._is_viewed and starts == [starts[0] + i * numel for i in range(k)]

        def run(start: int, stop: int) -> Run:
            stored = slice(start * rows * cols, (stop - 1) * rows * cols + numel)
            return Run(slice(start, stop), stored, slice(starts[start], starts[stop - 1] + numel))

        # Chunks are so small that a cache still holds their results when the stage reads them again.
        step = max(1, CHUNK_NUMEL // (rows * cols))
        self._chunks: list[tuple[slice, list[Run]]] = []
        for i in range(0, k, step):
            stop = min(i + step, k)
            runs = [run(i, stop)] if are_adjacent else [run(j, j + 1) for j in range(i, stop)]
            self._chunks.append((slice(i, stop), runs))
        self.runs = [run for _, runs in self._chunks for run in runs]

    def project(self, buffer: torch.Tensor) -> None:
        """Compute M = gradient + error, in place of the error, and p = SHRINK · M Q."""
        memory = None if self.memory is None else self.memory.view(-1)
        for which, runs in self._chunks:
            if self._is_unsettled:
                self._product(which, out=self.memory[which], subtract=True)  # type: ignore[index]
            if memory is not None:
                for run in runs:
                    memory[run.stored].add_(buffer[run.in_bucket])
            self._multiply(buffer, which, runs)
        self._is_unsettled = False
        if memory is not None and not math.isfinite(self.p.sum()):
            for run in self.runs:
                matrix = memory[run.stored]
                torch.where(matrix.isfinite(), matrix, buffer[run.in_bucket], out=matrix)
            self._multiply(buffer, slice(None), self.runs)
            memory.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def lost(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (mask of matrices that get no average, their errors before project, up to rounding).

        buffer: the gradients still. Where they aren't finite, the errors are zeros.
        """
        is_lost = self.p[:, 0, 0].isnan()  # then all of P is
        if self.memory is None:
            return is_lost, self.p[:0]
        errors = self.memory.clone()
        for run in self.runs:
            gradient = buffer[run.in_bucket].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            errors.view(-1)[run.stored].sub_(gradient)
        return is_lost, errors[is_lost]

    def _multiply(self, buffer: torch.Tensor, chunk: slice, runs: Sequence[Run]) -> None:
        """Compute p = SHRINK · M Q for the matrices of a chunk."""
        for which, blocks in self._blocks(buffer, chunk, runs):
            direction = (self.direction[which] * SHRINK)[:, None]
            torch.matmul(blocks, direction.mT, out=row_blocks(self.p[which]))

    def back_project(self, buffer: torch.Tensor) -> None:
        """Compute qt = pᵀ M."""
        # In reverse: a cache still holds project's last chunk, and will hold the first chunk in reconstruct.
        for chunk, runs in reversed(self._chunks):
            for which, blocks in self._blocks(buffer, chunk, runs):
                qt, num_blocks = self.qt[which], blocks.shape[1]
                products = qt[:, None]
                if num_blocks > 1:
                    products = self._partial[: len(qt) * num_blocks].unflatten(0, (len(qt), num_blocks))
                torch.matmul(row_blocks(self.p[which]).mT, blocks, out=products)
                if num_blocks > 1:
                    torch.sum(products, dim=1, out=qt)

    def reconstruct(self, buffer: torch.Tensor) -> None:
        """Compute gradient = P Qᵀ, and error = M − P Qᵀ in place of M, now or later in settle or project."""
        is_deferred = self._is_viewed and self.p.shape[-1] <= MAX_DEFERRED_TERMS
        self._is_unsettled = is_deferred and self.memory is not None
        for run in self.runs:
            part = buffer[run.in_bucket]
            if self._is_viewed:
                product = part.view(self._shape)
                self._product(run.which, out=product)
                if self.memory is not None and not is_deferred:
                    self.memory[run.which].sub_(product)
                continue
            self._product(run.which, out=self._matrix)
            part.copy_(self._matrix.view(-1)[: part.numel()])
            if self.memory is not None:
                error = self.memory.view(-1)[run.stored].sub_(part)
                if not self._is_wide:
                    # An error that overflows 16 bits is lost; it would stay infinite in all later steps.
                    error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                    if not part.isfinite().all():
                        error.zero_()  # a GradScaler skips such a step
                if error.dtype == torch.float16:
                    fit_float16(self.memory[run.which][0])

    def settle(self) -> torch.Tensor | None:
        """Return the error [k · rows · cols], as a view of memory; None without error feedback."""
        if self.memory is None:
            return None
        if self._is_unsettled:
            for which, _ in self._chunks:
                self._product(which, out=self.memory[which], subtract=True)
            self._is_unsettled = False
        return self.memory.view(-1)

    def _blocks(
        self, buffer: torch.Tensor, chunk: slice, runs: Sequence[Run]
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield (which, row_blocks of M) in the wide dtype: as many matrices at once as needs no copy."""
        if self.memory is not None and self._is_wide:
            yield chunk, row_blocks(self.memory[chunk])
            return
        for run in runs:
            part, matrix = buffer[run.in_bucket], self._matrix
            if self.memory is not None:
                matrix.copy_(self.memory[run.which])
            elif self._is_viewed:
                matrix = part.view(self._shape)
            else:
                matrix.view(-1)[: part.numel()].copy_(part)
                matrix.view(-1)[part.numel() :].zero_()  # padding still holds the last step's P Qᵀ
            yield run.which, row_blocks(matrix)

    def _product(self, which: slice, out: torch.Tensor, subtract: bool = False) -> None:
        """Compute out = P Qᵀ for some of the matrices.

        subtract: True to subtract P Qᵀ from out instead, for ranks of at most MAX_TERMS.
        """
        p, qt = self.p[which], self.qt[which]
        if p.shape[-1] > MAX_TERMS:
            torch.matmul(row_blocks(p), qt[:, None], out=row_blocks(out))
            return
        # As many rows at once as a cache holds.
        step = max(1, CHUNK_NUMEL * out.shape[1] // out.numel())
        for rows, columns in zip(out.split(step, 1), p.split(step, 1), strict=True):
            for j, (column, row) in enumerate(zip(columns.split(1, 2), qt.split(1, 1), strict=True)):
                if j == 0 and not subtract:
                    torch.mul(column, row, out=rows)
                else:
                    rows.addcmul_(column, row, value=-1 if subtract else 1)


class PowerSGDPlan:
    """One bucket's PowerSGD plan in plain torch: its buffers and local stages; see ops.powersgd_plan.

    p_wire and q_wire hold P and Qᵀ, with wire_dtype Pᵀ and Qᵀ, times SHRINK; in float16, which has few small
    numbers, not times SHRINK.
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
        self.layout, self._dtype, self._warm_start = layout, dtype, warm_start
        self.p_wire = torch.empty(layout.wire_numel, dtype=wire_dtype or dtype, device=device)
        self.q_wire = torch.empty(layout.q_numel, dtype=wire_dtype or dtype, device=device)
        # The wires hold P and Q times this.
        self._shrunk = 1.0 if self.p_wire.dtype == torch.float16 else SHRINK
        self._epsilon = epsilon * self._shrunk
        self.wire_numels = (layout.p_numels, layout.wire_numel - layout.p_numel, layout.q_numels)
        p_part, *uncompressed = self.p_wire.split([layout.p_numel, *(n for _, n in layout.uncompressed)])
        self._each_p = p_part.split(layout.p_numels)  # by matrix
        places = [slice(offset, offset + numel) for offset, numel in layout.uncompressed]
        self._uncompressed = list(zip(places, uncompressed, strict=True))  # in the bucket, on the wire
        # Factors are in the wide dtype. They share the wire's tensor if it has that dtype and order.
        wide = torch.promote_types(dtype, torch.float32)
        is_alike = self.p_wire.dtype == wide
        self._p = p_part if is_alike and wire_dtype is None else torch.empty_like(p_part, dtype=wide)
        self._q = self.q_wire if is_alike else torch.empty_like(self.q_wire, dtype=wide)
        # Scratch for one matrix at a time: a 16-bit matrix, or a square view with padding.
        sizes = [m.rows * m.cols for m in layout.matrices if dtype != wide or m.numel < m.rows * m.cols]
        scratch = torch.zeros(max(sizes, default=0), dtype=wide, device=device)
        self.groups = []
        # The panels of one rank are orthonormalized together.
        self._groups_by_rank: dict[int, list[MatrixGroup]] = {}
        self._sent_p = [(self._p, p_part)] if wire_dtype is None else []  # tensors, their views on the wire
        p_begin = q_begin = 0
        for matrices in layout.groups:
            k, rows, cols, rank = len(matrices), matrices[0].rows, matrices[0].cols, matrices[0].rank
            p_place = slice(p_begin, p_begin := p_begin + k * rows * rank)
            group_p = self._p[p_place].view(k, rows, rank)
            qt = self._q[q_begin : (q_begin := q_begin + k * rank * cols)].view(k, rank, cols)
            group = MatrixGroup(matrices, group_p, qt, scratch, dtype, error_feedback)
            self.groups.append(group)
            self._groups_by_rank.setdefault(rank, []).append(group)
            if wire_dtype is not None:
                self._sent_p.append((group_p.mT, p_part[p_place].view(k, rank, rows)))
        for group, direction in zip(self.groups, self._random(seed), strict=True):
            group.direction.copy_(direction)

    def project(self, buffer: torch.Tensor, scale: float, left_out: Sequence[int] = ()) -> None:
        for group in self.groups:
            group.project(buffer)
        for p, sent in self._sent_p:
            cast(p, out=sent, scale=scale * self._shrunk / SHRINK)
        for in_bucket, wire in self._uncompressed:
            cast(buffer[in_bucket], out=wire, scale=scale)
        for index in left_out:
            self._each_p[index].zero_()

    def back_project(self, buffer: torch.Tensor, scale: float) -> None:
        for p, sent in self._sent_p:
            p.copy_(sent)
        for groups in self._groups_by_rank.values():
            orthonormalize([group.p for group in groups], self._epsilon, [group.scratch for group in groups])
        self._p.mul_(SHRINK)
        for group in reversed(self.groups):  # in reverse for the caches' sake; see MatrixGroup.back_project
            group.back_project(buffer)
        self._p.mul_(1 / (SHRINK * self._shrunk))
        cast(self._q, out=self.q_wire, scale=scale * self._shrunk / SHRINK)

    def reconstruct(self, buffer: torch.Tensor, seed: int) -> None:
        """Write P Qᵀ and the uncompressed averages to the buffer; choose the next step's directions.

        A matrix with factors that aren't finite becomes NaN in this step, and the next step takes random
        directions for it. If a rank's gradients aren't finite, errors are as before the step, otherwise zero.
        """
        for in_bucket, wire in self._uncompressed:
            buffer[in_bucket].copy_(wire)
        if not self.groups:
            return
        self._q.copy_(self.q_wire)
        lengths = [
            torch.linalg.vector_norm(group.qt, dim=-1, keepdim=True, dtype=torch.float64)
            for group in self.groups
        ]
        length = torch.cat([each.view(-1) for each in lengths]) / self._shrunk
        is_finite = length < torch.inf
        lost = [] if is_finite.all() else [group.lost(buffer) for group in self.groups]
        for group in self.groups:
            group.reconstruct(buffer)
        for group, each in zip(self.groups, lengths, strict=True):
            torch.div(group.qt, each.to(group.qt.dtype), out=group.direction)
        # A zero direction would stay zero in every later step.
        kept = (length > MIN_LENGTH) & is_finite
        if not self._warm_start:
            kept.fill_(False)
        if not kept.all():
            replaced = (~kept).split([each.numel() for each in lengths])
            for group, is_replaced, random in zip(self.groups, replaced, self._random(seed), strict=True):
                mask = is_replaced.view(*random.shape[:2], 1)
                torch.where(mask, random, group.direction, out=group.direction)
        for group, (is_lost, errors) in zip(self.groups, lost, strict=False):
            group.settle()
            if group.memory is not None:
                group.memory.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                group.memory[is_lost] = errors

    def error(self) -> torch.Tensor:
        flat = torch.zeros(self.layout.numel, dtype=self._dtype, device=self.p_wire.device)
        for error, run in self._errors():
            flat[run.in_bucket] = error[run.stored]
        # The next step also counts an error that isn't finite as zero.
        return flat.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def add_to_error(self, offset: int, values: torch.Tensor) -> None:
        for error, run in self._errors():
            if run.in_bucket.start <= offset < run.in_bucket.stop:
                start = run.stored.start + offset - run.in_bucket.start
                error[start : start + len(values)].add_(values)

    def directions(self) -> list[torch.Tensor]:
        return [qt.mT.clone() for group in self.groups for qt in group.direction]

    def load(self, error: torch.Tensor, directions: Sequence[torch.Tensor]) -> None:
        for own_error, run in self._errors():
            own_error[run.stored] = error[run.in_bucket]
        remaining = iter(directions)
        for group in self.groups:
            given = torch.stack([next(remaining) for _ in group.direction]).mT.to(group.qt)
            length = torch.linalg.vector_norm(given, dim=-1, keepdim=True)
            # Directions that have length 1 already are loaded bit for bit.
            is_normal = bool(((length - 1).abs() < 1e-5).all())
            kept = (length > MIN_LENGTH) & (length < torch.inf)
            normal = given if is_normal else given / length
            torch.where(kept, normal, group.direction, out=group.direction)

    def kept(self) -> list[torch.Tensor]:
        pairs = [(group.settle(), group.direction) for group in self.groups]
        return [each for pair in pairs for each in pair if each is not None]

    def _errors(self) -> Iterator[tuple[torch.Tensor, Run]]:
        """Yield (a group's error, flat, a run of its matrices) for all runs; nothing without feedback."""
        for group in self.groups:
            error = group.settle()
            if error is not None:
                yield from ((error, run) for run in group.runs)

    def _random(self, seed: int) -> Iterator[torch.Tensor]:
        """Yield random orthonormal directions for every matrix group, the same on every rank."""
        generator = torch.Generator()
        for group, matrices in zip(self.groups, self.layout.groups, strict=True):
            panel = group.qt.mT.new_empty(group.qt.mT.shape)
            for q, matrix in zip(panel, matrices, strict=True):
                own = generator.manual_seed(seed + matrix.draw)
                q.copy_(torch.randn(q.shape, generator=own, dtype=torch.float32, device="cpu"))
            orthonormalize([panel], 0.0, [panel.new_empty(2, *panel.shape, dtype=torch.float64)])
            yield panel.mT
