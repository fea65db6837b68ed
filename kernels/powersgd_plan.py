"""PowerSGD's working set for one bucket on the kernels: tables, memory and wires; seven launches a step."""

from collections.abc import Sequence
from typing import Any

import torch

from .device import launching_on, send
from .powersgd_back_project import back_project
from .powersgd_orthonormalise import orthonormalise
from .powersgd_pack import pack
from .powersgd_project import SHORTEST_SQUARED, project
from .powersgd_random import random_q
from .powersgd_reconstruct import reconstruct
from .powersgd_work import LowRankWork


class LowRankPlan:
    """The plan that ops.low_rank_plan describes, on a device that runs Triton.

    layout: a LowRankLayout. Everything is allocated here: the memory of M (as large as the compressed
    gradients, in their dtype), the factors, partial sums and wires. A step allocates nothing.
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
    ):
        self.layout = layout
        self._work = work = LowRankWork.of(layout, dtype.itemsize)
        self._feedback, self._warm_start, self._epsilon = error_feedback, warm_start, epsilon
        wide = torch.promote_types(dtype, torch.float32)

        def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(numel, dtype=dtype, device=device)

        self.p_wire = zeros(work.p_wire_numel, dtype)
        self.q_wire = zeros(work.q_wire_numel, dtype)
        self._memory = zeros(work.memory_numel if error_feedback else 0, dtype)
        self._p = zeros(work.p_panel_numel, wide)
        self._q = zeros(work.q_panel_numel, wide)
        # Zero lengths make the first step project on the random Q.
        self._norms = zeros(work.num_norms * work.rank, torch.float64).view(-1, work.rank)
        self._partial = zeros(work.partial_numel, wide)
        self._grams = zeros(work.orthonormalise_numel, torch.float64)
        self._matrices = send(torch.tensor(work.matrix_table, dtype=torch.int64), device)
        self._tables = {
            name: send(torch.tensor(getattr(work, f"{name}_work"), dtype=torch.int64), device)
            for name in ("project", "pack", "orthonormalise", "back_project", "reduce", "reconstruct")
        }
        self._blocks = {"rank": work.rank, "block_rows": work.block_rows, "block_cols": work.block_cols}
        with launching_on(device):
            random_q(
                self._matrices,
                self._tables["reconstruct"],
                out=self._q,
                num_programs=work.num_norms,
                seed=seed,
                rank=work.rank,
                block_cols=work.block_cols,
            )

    def project(self, buffer: torch.Tensor, scale: float) -> None:
        """Compute M = gradient + error, p_wire = scale · (all M Q, then the uncompressed). Two launches."""
        with launching_on(buffer.device):
            project(
                buffer,
                self._memory,
                self._p,
                self._q,
                self._norms,
                self._matrices,
                self._tables["project"],
                out=self._partial,
                feedback=self._feedback,
                **self._blocks,
            )
            self._pack(buffer, "pack", self.p_wire, self._work.block_rows, scale)

    def orthonormalise(self, pairs: bool | None = None) -> None:
        """Set P to orthonormal bases of the panels in p_wire. Two launches.

        pairs: compute in pairs of fp32 rather than in fp64; None where the device's fp64 is slow.
        """
        with launching_on(self.p_wire.device):
            orthonormalise(
                self.p_wire,
                self._matrices,
                self._tables["orthonormalise"],
                scratch=self._grams,
                out=self._p,
                rank=self._work.rank,
                epsilon=self._epsilon,
                pairs=pairs,
            )

    def back_project(self, buffer: torch.Tensor, scale: float) -> None:
        """Orthonormalise P, and compute q_wire = scale · (all Mᵀ P). Four launches."""
        with launching_on(buffer.device):
            self.orthonormalise()
            back_project(
                self._memory if self._feedback else buffer,
                self._p,
                self._matrices,
                self._tables["back_project"],
                out=self._partial,
                feedback=self._feedback,
                **self._blocks,
            )
            self._pack(buffer, "reduce", self.q_wire, self._work.block_cols, scale)

    def reconstruct(self, buffer: torch.Tensor, seed: int) -> None:
        """Write P Qᵀ and the uncompressed averages to the buffer; keep Q for the next step. One launch."""
        with launching_on(buffer.device):
            reconstruct(
                self.p_wire,
                self.q_wire,
                self._p,
                self._matrices,
                self._tables["reconstruct"],
                out=buffer,
                q=self._q,
                norms=self._norms,
                seed=seed,
                warm_start=self._warm_start,
                **self._blocks,
            )

    def _pack(self, buffer: torch.Tensor, table: str, out: torch.Tensor, block: int, scale: float) -> None:
        work = self._tables[table]
        pack(self._partial, buffer, work, out=out, rank=self._work.rank, block=block, scale=scale)

    # For checkpoints, where time doesn't matter: plain torch, matrix after matrix.

    def error(self) -> torch.Tensor:
        """Return this rank's error [numel] in the bucket's dtype, zero where nothing is compressed."""
        flat = torch.zeros(self.layout.numel, dtype=self.p_wire.dtype, device=self.p_wire.device)
        if self._feedback:
            for index, matrix in enumerate(self.layout.matrices):
                p, q = self._panel(self._p, index, "p"), self._panel(self._q, index, "q")
                # In fp64, which no setting of the user (TF32, autocast) makes less precise.
                product = (p.double() @ q.double().mT).to(flat.dtype)
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
            # As direction in powersgd_project.py does.
            alive = (squared >= SHORTEST_SQUARED.value) & (squared < torch.inf)
            directions.append(torch.where(alive, q, random))
        return directions

    def load(self, error: torch.Tensor, directions: Sequence[torch.Tensor]) -> None:
        """Continue from another plan's error and directions, which may be any basis."""
        self._p.zero_()
        for index, (matrix, direction) in enumerate(zip(self.layout.matrices, directions, strict=True)):
            if self._feedback:
                whole = torch.zeros(matrix.rows * matrix.cols, dtype=error.dtype, device=error.device)
                whole[: matrix.numel] = error[matrix.offset : matrix.offset + matrix.numel]
                self._matrix(index).copy_(whole.view(matrix.rows, matrix.cols))
            q = self._panel(self._q, index, "q")
            q.copy_(direction)
            first, count = (self._field(index, name) for name in ("first_norm", "num_norms"))
            self._norms[first : first + count].zero_()
            self._norms[first, : matrix.rank] = q.double().square().sum(0)

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
