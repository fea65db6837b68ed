"""PowerSGD's plan of one bucket on the kernels: tables, error and wires; seven launches per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..device import has_streams, launching_on, send
from ..launch import Launch, Slot, Stage
from ..quantize.plan import QuantizedPlan
from ..scratch import Scratch, num_bytes_of, parts_of_scratch, take_scratch
from .back_project import back_project
from .codes_work import is_packed_as_codes
from .orthonormalize import orthonormalize
from .pack import pack
from .pack_codes import FactorCodes, pack_codes
from .project import project
from .random import is_kept, random_q, scale_of
from .reconstruct import reconstruct
from .tile import SHRINK
from .work import PowerSGDWork, wire_stride

# Numbers that every step gives. Kernels annotate their types: these values only stand for them.
SCALE, SEED = Slot("scale", 1000.0), Slot("seed", 1000)


@dataclass(frozen=True)
class PowerSGDArithmetic:
    """The options of ops.powersgd_plan that kernels are compiled for."""

    error_feedback: bool
    warm_start: bool
    epsilon: float


def wire_factor(dtype: torch.dtype) -> float:
    """Return the factor of P and Q on a wire of this dtype; see tile.SHRINK."""
    return 1.0 if dtype == torch.float16 else SHRINK.value


class PowerSGDTensors:
    """The tensors of a plan that are kept from step to step.

    The columns of Q have length zero at first, so the first step projects on the random Q.
    """

    def __init__(self, work: PowerSGDWork, dtype: torch.dtype, device: torch.device, error_feedback: bool):
        wide = torch.promote_types(dtype, torch.float32)

        def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(numel, dtype=dtype, device=device)

        self.memory = zeros(work.memory_numel if error_feedback else 0, dtype)
        self.p = zeros(work.p_panel_numel, wide)
        self.q = zeros(work.q_panel_numel, wide)
        self.norms = zeros(work.num_norms * work.rank, torch.float64).view(-1, work.rank)
        self.matrices = send(torch.tensor(work.matrix_table, dtype=torch.int64), device)
        self.tables = {
            name: send(torch.tensor(getattr(work, f"{name}_work"), dtype=torch.int64), device)
            for name in ("project", "pack", "orthonormalize", "back_project", "reduce", "reconstruct")
        }

    def randomize(self, work: PowerSGDWork) -> Launch:
        """Return the launch that makes the random Q from a seed."""
        return random_q(
            self.matrices,
            self.tables["reconstruct"],
            out=self.q,
            num_programs=work.num_norms,
            seed=SEED,
            rank=work.rank,
            block_cols=work.block_cols,
        )


class PowerSGDStages:
    """A plan's stages on given tensors.

    scratch: the tensors of scratch_parts, in that order.
    codes: the payloads for P and Q if they are packed in 8 bits; None if they are packed on the wires.

    pack_p: the last launch of project alone.
    """

    def __init__(
        self,
        work: PowerSGDWork,
        tensors: PowerSGDTensors,
        scratch: Sequence[torch.Tensor],
        dtype: torch.dtype,
        arithmetic: PowerSGDArithmetic,
        codes: tuple[FactorCodes, FactorCodes] | None = None,
    ):
        self._work, self._tensors, self._arithmetic = work, tensors, arithmetic
        self.partial, self.p_wire, self.q_wire, self._grams = scratch
        self._blocks = {"rank": work.rank, "block_rows": work.block_rows, "block_cols": work.block_cols}
        self._codes = {"pack": codes[0], "reduce": codes[1]} if codes else {}
        buffer = Slot.buffer(dtype)
        pack_p = self._pack(buffer, "pack", self.p_wire, work.block_rows)
        pack_q = self._pack(buffer, "reduce", self.q_wire, work.block_cols)
        bases = self._orthonormalize()
        self.project = Stage([self._project(buffer), pack_p])
        self.pack_p = Stage([pack_p])
        self.orthonormalize = Stage(bases)
        self.back_project = Stage([*bases, self._back_project(buffer), pack_q])
        self.reconstruct = Stage([self._reconstruct(buffer)])

    @staticmethod
    def scratch_parts(
        work: PowerSGDWork, dtype: torch.dtype, wire_dtype: torch.dtype
    ) -> list[tuple[int, torch.dtype]]:
        """Return (elements, dtype) of the partial sums, both wires and the Gram matrices."""
        wide = torch.promote_types(dtype, torch.float32)
        return [
            (work.partial_numel, wide),
            (work.p_wire_numel, wire_dtype),
            (work.q_wire_numel, wire_dtype),
            (work.orthonormalize_numel, torch.float64),
        ]

    def compile(self) -> None:
        """Compile every kernel for the current device."""
        for stage in (self.project, self.pack_p, self.orthonormalize, self.back_project, self.reconstruct):
            stage.compile()

    def _project(self, buffer: Slot) -> Launch:
        own = self._tensors
        return project(
            buffer,
            own.memory,
            own.p,
            own.q,
            own.norms,
            own.matrices,
            own.tables["project"],
            out=self.partial,
            feedback=self._arithmetic.error_feedback,
            unit=self._arithmetic.epsilon > 0,
            **self._blocks,
        )

    def _orthonormalize(self) -> list[Launch]:
        own = self._tensors
        return orthonormalize(
            self.p_wire,
            own.matrices,
            own.tables["orthonormalize"],
            scratch=self._grams,
            out=own.p,
            rank=self._work.rank,
            epsilon=self._arithmetic.epsilon * wire_factor(self.p_wire.dtype),
        )

    def _back_project(self, buffer: Slot) -> Launch:
        own, feedback = self._tensors, self._arithmetic.error_feedback
        return back_project(
            own.memory if feedback else buffer,
            own.p,
            own.matrices,
            own.tables["back_project"],
            out=self.partial,
            feedback=feedback,
            **self._blocks,
        )

    def _reconstruct(self, buffer: Slot) -> Launch:
        own = self._tensors
        return reconstruct(
            self.p_wire,
            self.q_wire,
            own.p,
            own.matrices,
            own.tables["reconstruct"],
            out=buffer,
            q=own.q,
            norms=own.norms,
            seed=SEED,
            warm_start=self._arithmetic.warm_start,
            **self._blocks,
        )

    def _pack(self, buffer: Slot, table: str, out: torch.Tensor, block: int) -> Launch:
        rank, codes, work = self._work.rank, self._codes.get(table), self._tensors.tables[table]
        if codes is not None:
            return pack_codes(self.partial, buffer, codes, rank=rank, block=block, scale=SCALE)
        return pack(self.partial, buffer, work, out=out, rank=rank, block=block, scale=SCALE)


def compile_kernels(
    layout: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    error_feedback: bool,
    warm_start: bool,
    epsilon: float,
    wire_dtype: torch.dtype | None = None,
    codes: tuple[torch.dtype, int, float] | None = None,
) -> None:
    """Compile every kernel that a PowerSGDPlan with these arguments launches, on "meta" tensors.

    codes: for a plan that sends codes: (dtype of uncompressed elements, elements per scale, largest scale).
    """
    wire_dtype, meta = wire_dtype or dtype, torch.device("meta")
    work = PowerSGDWork.of(layout, dtype.itemsize, wire_dtype.itemsize)
    tensors = PowerSGDTensors(work, dtype, meta, error_feedback)
    parts = PowerSGDStages.scratch_parts(work, dtype, wire_dtype)
    memory = torch.empty(num_bytes_of(parts), dtype=torch.uint8, device=meta)
    arithmetic = PowerSGDArithmetic(error_feedback, warm_start, epsilon)
    of_factors = None
    if codes and is_packed_as_codes(work, codes[1]):
        of_factors = (FactorCodes.on_meta(*codes), FactorCodes.on_meta(*codes))
    stages = PowerSGDStages(work, tensors, parts_of_scratch(memory, parts), dtype, arithmetic, of_factors)
    with launching_on(device):
        stages.compile()
        tensors.randomize(work).compile()


class PowerSGDPlan:
    """One bucket's plan on a device that runs Triton; see ops.powersgd_plan.

    layout: a PowerSGDLayout.
    shares_scratch: True to keep partial sums and wires in a scratch of take_scratch, from project to
        reconstruct.

    Everything else is allocated here: M (as large as the compressed gradients, in their dtype) and the
    factors. A step allocates nothing.
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
        self._arithmetic = PowerSGDArithmetic(error_feedback, warm_start, epsilon)
        wire_dtype = wire_dtype or dtype
        self._work = work = PowerSGDWork.of(layout, dtype.itemsize, wire_dtype.itemsize)
        first = work.uncompressed_start
        self.wire_numels = (first, work.p_wire_numel - first, work.q_wire_numel)
        self._tensors = own = PowerSGDTensors(work, dtype, device, error_feedback)
        self._memory, self._p, self._q, self._norms = own.memory, own.p, own.q, own.norms
        self._scratch_parts = PowerSGDStages.scratch_parts(work, dtype, wire_dtype)
        self._scratch: Scratch | None = None
        self._quantized: tuple[QuantizedPlan, QuantizedPlan] | None = None
        self._codes: tuple[FactorCodes, FactorCodes] | None = None
        self._shares_scratch, self._has_taken_scratch = shares_scratch, False
        with launching_on(device):
            own.randomize(work)(seed=seed)
        if not shares_scratch:
            self._use(Scratch(device))

    def _use(self, scratch: Scratch) -> None:
        """Place partial sums and wires in a scratch, and make the stages on them."""
        scratch.reserve(num_bytes_of(self._scratch_parts))
        self._scratch, self._scratch_memory = scratch, scratch.memory
        parts = parts_of_scratch(scratch.memory, self._scratch_parts)
        self._partial, self.p_wire, self.q_wire, _ = parts
        self._stages = PowerSGDStages(
            self._work, self._tensors, parts, self._dtype, self._arithmetic, self._codes
        )
        if has_streams(self._device):
            with launching_on(self._device):
                self._stages.compile()

    def send_in_codes(self, p: Any, q: Any) -> None:
        """Write P and Q to the payloads of two QuantizedPlans instead of the wires, from the next step on."""
        self._quantized = (p, q)
        if is_packed_as_codes(self._work, p.layout.block_size):
            itemsize = torch.promote_types(self._dtype, torch.float32).itemsize
            self._codes = (
                FactorCodes.of(self._work, "p", p, itemsize),
                FactorCodes.of(self._work, "q", q, itemsize),
            )
        if self._scratch is not None:
            self._use(self._scratch)

    def sent_p(self, index: int) -> torch.Tensor:
        """Return the part of p_wire with P of the matrix with this index."""
        matrix, start = self.layout.matrices[index], self._field(index, "p_wire")
        return self.p_wire[start : start + matrix.rank * wire_stride(matrix.rows, self.p_wire.itemsize)]

    def project(self, buffer: torch.Tensor, scale: float, left_out: Sequence[int] = ()) -> None:
        """Compute M = gradient + error, p_wire = scale · (all M Q, then uncompressed tensors). Two launches.

        left_out: indices of matrices. Zeros are sent as their P.
        """
        if self._shares_scratch and not self._has_taken_scratch:
            scratch = take_scratch(self._device, self._scratch)
            self._has_taken_scratch = True
            if scratch is not self._scratch or scratch.memory is not self._scratch_memory:
                self._use(scratch)
        with launching_on(self._device):
            self._stages.project(buffer=buffer, scale=scale)
            if left_out and self._codes:
                for index in left_out:
                    self._partial_p(index).zero_()
                self._stages.pack_p(buffer=buffer, scale=scale)
        if not self._codes:
            for index in left_out:
                self.sent_p(index).zero_()
            if self._quantized:
                self._quantized[0].quantize(self.p_wire, 0)

    def orthonormalize(self) -> None:
        """Set P to orthonormal bases of the panels in p_wire. Two launches."""
        with launching_on(self._device):
            self._stages.orthonormalize()

    def back_project(self, buffer: torch.Tensor, scale: float) -> None:
        """Orthonormalize P, and compute q_wire = scale · (all Mᵀ P). Four launches."""
        with launching_on(self._device):
            self._stages.back_project(buffer=buffer, scale=scale)
        if self._quantized and not self._codes:
            self._quantized[1].quantize(self.q_wire, 0)

    def reconstruct(self, buffer: torch.Tensor, seed: int) -> None:
        """Write P Qᵀ and the averages of uncompressed tensors to the buffer, and keep Q. One launch."""
        with launching_on(self._device):
            self._stages.reconstruct(buffer=buffer, seed=seed)
        if self._has_taken_scratch:
            assert self._scratch is not None
            self._scratch.is_taken = self._has_taken_scratch = False

    # For checkpoints, in plain torch, one matrix at a time: their time doesn't matter.

    def error(self) -> torch.Tensor:
        """Return this rank's error [numel] in the bucket's dtype, zero where nothing is compressed."""
        flat = torch.zeros(self.layout.numel, dtype=self._dtype, device=self._device)
        if self._feedback:
            for index, matrix in enumerate(self.layout.matrices):
                p, q = self._panel(self._p, index, "p"), self._panel(self._q, index, "q")
                # In fp64: no user's setting, such as TF32 or autocast, makes it less precise.
                product = (p.double() @ q.double().mT / SHRINK.value).to(flat.dtype)
                error = (self._matrix(index).to(p.dtype) - product.to(p.dtype)).to(flat.dtype)
                # An error that isn't finite counts as zero, as in project.
                error = torch.where(error.isfinite(), error, 0.0).flatten()
                flat[matrix.offset : matrix.offset + matrix.numel] = error[: matrix.numel]
        return flat

    def add_to_error(self, offset: int, values: torch.Tensor) -> None:
        """Add values to this rank's error, if one is kept, from an offset in the bucket on."""
        for index, matrix in enumerate(self.layout.matrices if self._feedback else ()):
            start = offset - matrix.offset
            if 0 <= start < matrix.numel:
                added = self._memory.new_zeros(matrix.rows * matrix.cols)
                added[start : start + len(values)] = values
                self._matrix(index).add_(added.view(matrix.rows, matrix.cols))

    def directions(self) -> list[torch.Tensor]:
        """Return every matrix's Q [cols, rank] that the next step projects on, in the layout's order."""
        directions = []
        for index in range(len(self.layout.matrices)):
            q, random = self._panel(self._q, index, "q"), self._panel(self._q, index, "random")
            squared = self._squared_lengths(index)[: q.shape[1]]
            scaled = q * scale_of(squared, self._arithmetic.epsilon > 0).to(q.dtype)
            directions.append(torch.where(is_kept(squared), scaled, random))
        return directions

    def load(self, error: torch.Tensor, directions: Sequence[torch.Tensor]) -> None:
        """Continue from another plan's error and directions. Directions may be any basis."""
        self._p.zero_()
        for index, (matrix, direction) in enumerate(zip(self.layout.matrices, directions, strict=True)):
            if self._feedback:
                whole = torch.zeros(matrix.rows * matrix.cols, dtype=error.dtype, device=error.device)
                whole[: matrix.numel] = error[matrix.offset : matrix.offset + matrix.numel]
                self._matrix(index).copy_(whole.view(matrix.rows, matrix.cols))
            q, random = self._panel(self._q, index, "q"), self._panel(self._q, index, "random")
            q.copy_(direction)
            squared = q.double().square().sum(0)
            # The results of directions() aren't scaled again, so that the next step computes the same bits:
            # scaled columns of Q, with lengths in these limits up to rounding, and random columns.
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
