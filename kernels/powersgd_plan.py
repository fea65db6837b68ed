"""PowerSGD's working set for one bucket on the kernels: tables, memory and wires; seven launches a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .device import has_streams, is_fp64_slow, launching_on
from .powersgd_codes_work import is_packed_as_codes
from .powersgd_direction import is_kept, scale_of
from .powersgd_launches import LowRankArithmetic, LowRankStages, LowRankTensors
from .powersgd_pack_codes import FactorCodes
from .powersgd_tile import SHRINK
from .powersgd_work import LowRankWork, wire_stride
from .quantise_plan import QuantisedPlan
from .scratch import Scratch, num_bytes_of, parts_of_scratch, shared_scratch


class LowRankPlan:
    """The plan that ops.low_rank_plan describes, on a device that runs Triton.

    layout: a LowRankLayout. Everything is allocated here: the memory of M (as large as the compressed
    gradients, in their dtype), the factors, partial sums and wires. A step allocates nothing. shares_scratch:
    partial sums and wires are the thread's shared_scratch instead, from the first step on.
    """

    def __init__(
        self,
        layout: Any,
        dtype: torch.dtype,
        device: torch.device,
        *,
        error_feedback: bool,
        warm_start: bool,
        epsilon: float,
        seed: int,
        wire_dtype: torch.dtype | None = None,
        shares_scratch: bool = False,
    ):
        self.layout = layout
        self._dtype, self._device, self._feedback = dtype, device, error_feedback
        self._arithmetic = LowRankArithmetic(error_feedback, warm_start, epsilon, is_fp64_slow(device))
        wire_dtype = wire_dtype or dtype
        self._work = work = LowRankWork.of(layout, dtype.itemsize, wire_dtype.itemsize)
        first = work.uncompressed_start
        self.wire_numels = (first, work.p_wire_numel - first, work.q_wire_numel)
        self._tensors = own = LowRankTensors(work, dtype, device, error_feedback)
        self._memory, self._p, self._q, self._norms = own.memory, own.p, own.q, own.norms
        self._scratch_parts = LowRankStages.scratch_parts(work, dtype, wire_dtype)
        self._scratch: Scratch | None = None
        self._quantised: tuple[QuantisedPlan, QuantisedPlan] | None = None
        self._codes: tuple[FactorCodes, FactorCodes] | None = None
        self._shares_scratch = shares_scratch
        with launching_on(device):
            own.randomise(work, seed)
        if not shares_scratch:
            self._use(Scratch(device))

    def _use(self, scratch: Scratch) -> None:
        """Take partial sums and wires from a scratch, and prepare the launches on them."""
        scratch.reserve(num_bytes_of(self._scratch_parts))
        self._scratch, self._scratch_memory = scratch, scratch.memory
        parts = parts_of_scratch(scratch.memory, self._scratch_parts)
        self._partial, self.p_wire, self.q_wire, _ = parts
        self._stages = LowRankStages(
            self._work, self._tensors, parts, self._dtype, self._arithmetic, self._codes
        )
        if has_streams(self._device):
            with launching_on(self._device):
                self._stages.compile()

    def send_in_codes(self, p: Any, q: Any) -> None:
        """Leave P and Q in these QuantisedPlans' payloads, instead of on the wires, from the next step on."""
        self._quantised = (p, q)
        if is_packed_as_codes(self._work, p.layout.block_size):
            itemsize = torch.promote_types(self._dtype, torch.float32).itemsize
            self._codes = (
                FactorCodes.of(self._work, "p", p, itemsize),
                FactorCodes.of(self._work, "q", q, itemsize),
            )
        if self._scratch is not None:
            self._use(self._scratch)

    def sent_p(self, index: int) -> torch.Tensor:
        """Return the part of p_wire that holds P of the matrix with this index."""
        matrix, start = self.layout.matrices[index], self._field(index, "p_wire")
        return self.p_wire[start : start + matrix.rank * wire_stride(matrix.rows, self.p_wire.itemsize)]

    def project(self, buffer: torch.Tensor, scale: float, left_out: Sequence[int] = ()) -> None:
        """Compute M = gradient + error, p_wire = scale · (all M Q, then the uncompressed). Two launches.

        left_out: indices of the matrices whose P is zero on the wire.
        """
        if self._shares_scratch:
            scratch = shared_scratch(self._device)
            if scratch is not self._scratch or scratch.memory is not self._scratch_memory:
                self._use(scratch)
        with launching_on(self._device):
            self._stages.project(buffer, scale)
            if left_out and self._codes:
                for index in left_out:
                    self._partial_p(index).zero_()
                self._stages.pack_p(buffer, scale)
        if not self._codes:
            for index in left_out:
                self.sent_p(index).zero_()
            if self._quantised:
                self._quantised[0].quantise(self.p_wire, 0)

    def orthonormalise(self, pairs: bool | None = None) -> None:
        """Set P to orthonormal bases of the panels in p_wire. Two launches.

        pairs: compute in pairs of fp32 rather than in fp64; None where the device's fp64 is slow.
        """
        with launching_on(self._device):
            if pairs is None:
                self._stages.orthonormalise(self.p_wire, 1.0)
            else:
                self._stages.orthonormalise_in(pairs)

    def back_project(self, buffer: torch.Tensor, scale: float) -> None:
        """Orthonormalise P, and compute q_wire = scale · (all Mᵀ P). Four launches."""
        with launching_on(self._device):
            self._stages.back_project(buffer, scale)
        if self._quantised and not self._codes:
            self._quantised[1].quantise(self.q_wire, 0)

    def reconstruct(self, buffer: torch.Tensor, seed: int) -> None:
        """Write P Qᵀ and the uncompressed averages to the buffer; keep Q for the next step. One launch."""
        with launching_on(self._device):
            self._stages.reconstruct(buffer, seed)

    # For checkpoints, where time doesn't matter: plain torch, matrix after matrix.

    def error(self) -> torch.Tensor:
        """Return this rank's error [numel] in the bucket's dtype, zero where nothing is compressed."""
        flat = torch.zeros(self.layout.numel, dtype=self._dtype, device=self._device)
        if self._feedback:
            for index, matrix in enumerate(self.layout.matrices):
                p, q = self._panel(self._p, index, "p"), self._panel(self._q, index, "q")
                # In fp64, which no setting of the user (TF32, autocast) makes less precise.
                product = (p.double() @ q.double().mT / SHRINK.value).to(flat.dtype)
                error = (self._matrix(index).to(p.dtype) - product.to(p.dtype)).to(flat.dtype)
                # As project does: an error that isn't finite counts as zero.
                error = torch.where(error.isfinite(), error, 0.0).flatten()
                flat[matrix.offset : matrix.offset + matrix.numel] = error[: matrix.numel]
        return flat

    def add_to_error(self, offset: int, values: torch.Tensor) -> None:
        """Add values to this rank's error, if one is kept, from this offset in the bucket on."""
        for index, matrix in enumerate(self.layout.matrices if self._feedback else ()):
            start = offset - matrix.offset
            if 0 <= start < matrix.numel:
                added = self._memory.new_zeros(matrix.rows * matrix.cols)
                added[start : start + len(values)] = values
                self._matrix(index).add_(added.view(matrix.rows, matrix.cols))

    def directions(self) -> list[torch.Tensor]:
        """Return what the next step projects on: Q [cols, rank] of every matrix, in the layout's order."""
        directions = []
        for index in range(len(self.layout.matrices)):
            q, random = self._panel(self._q, index, "q"), self._panel(self._q, index, "random")
            squared = self._squared_lengths(index)[: q.shape[1]]
            scaled = q * scale_of(squared, self._arithmetic.epsilon > 0).to(q.dtype)
            directions.append(torch.where(is_kept(squared), scaled, random))
        return directions

    def load(self, error: torch.Tensor, directions: Sequence[torch.Tensor]) -> None:
        """Continue from another plan's error and directions, which may be any basis."""
        self._p.zero_()
        for index, (matrix, direction) in enumerate(zip(self.layout.matrices, directions, strict=True)):
            if self._feedback:
                whole = torch.zeros(matrix.rows * matrix.cols, dtype=error.dtype, device=error.device)
                whole[: matrix.numel] = error[matrix.offset : matrix.offset + matrix.numel]
                self._matrix(index).copy_(whole.view(matrix.rows, matrix.cols))
            q, random = self._panel(self._q, index, "q"), self._panel(self._q, index, "random")
            q.copy_(direction)
            squared = q.double().square().sum(0)
            # What directions() returned isn't scaled again, so that the next step computes the same bits: Q's
            # scaled columns, whose lengths lie between these up to rounding, and random ones.
            is_unit = self._arithmetic.epsilon > 0 and self._arithmetic.warm_start
            shortest, longest = (1.0 - 1e-6, 1.0 + 1e-6) if is_unit else (0.25 - 1e-6, 4.0)
            squared[(squared > shortest) & (squared < longest)] = 1.0
            squared[(q == random).all(0)] = 0.0
            first, count = (self._field(index, name) for name in ("first_norm", "num_norms"))
            self._norms[first : first + count].zero_()
            self._norms[first, : matrix.rank] = squared

    def _partial_p(self, index: int) -> torch.Tensor:
        """Return the partial sums of a matrix's P."""
        programs = [row[0] == index for row in self._work.project_work]
        first, numel = programs.index(True), self._work.rank * self._work.block_rows
        return self._partial[first * numel : (first + sum(programs)) * numel]

    def _field(self, index: int, name: str) -> int:
        value: int = self._work.fields(index)[name]
        return value

    def _panel(self, panels: torch.Tensor, index: int, name: str) -> torch.Tensor:
        """Return a matrix's factor [rows or cols, rank] as a view of its panel."""
        matrix = self.layout.matrices[index]
        start = self._field(index, f"{name}_panel")
        stride = self._field(index, "p_stride" if name == "p" else "q_stride")
        length = matrix.rows if name == "p" else matrix.cols
        return panels[start : start + self._work.rank * stride].view(-1, stride).mT[:length, : matrix.rank]

    def _squared_lengths(self, index: int) -> torch.Tensor:
        first, count = (self._field(index, name) for name in ("first_norm", "num_norms"))
        return self._norms[first : first + count].sum(0)

    def _matrix(self, index: int) -> torch.Tensor:
        """Return M [rows, cols] of a matrix as a view of the memory."""
        start, rows, cols, stride = (
            self._field(index, name) for name in ("memory", "rows", "cols", "memory_cols")
        )
        return self._memory[start : start + rows * stride].view(rows, stride)[:, :cols]
