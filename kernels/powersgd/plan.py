"""PowerSGD's plan of one bucket on the kernels: tables, error and wires; five launches per step.

On ROCm there are seven: project and back_project take one more; see tile.py.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..launch import Stage
from .back_project import back_project
from .bucket import PowerSGDBucket, Scratch, take_scratch
from .orthonormalize import orthonormalize
from .project import project
from .random import is_kept, random_q, scale_of
from .reconstruct import reconstruct
from .tile import SHRINK
from .work import PowerSGDWork, wire_stride


class PowerSGDPlan:
    """One bucket's plan on a device that runs Triton; see ops.powersgd_plan.

    layout: a PowerSGDLayout.
    device: the bucket's device; "meta" for a plan that is only compiled.
    arithmetic: PowerSGDBucket's error_feedback, warm_start and epsilon.

    M (as large as the compressed gradients, in their dtype) and the factors are allocated here. A step
    allocates nothing, unless it needs another scratch or a larger one.
    """

    def __init__(
        self, layout: Any, dtype: torch.dtype, device: torch.device, *, seed: int,
        wire_dtype: torch.dtype | None = None, **arithmetic: Any,
    ):  # fmt: skip
        self.layout, self._dtype, self._device = layout, dtype, device
        size, matrices = (wire_dtype := wire_dtype or dtype).itemsize, layout.matrices
        self._work = work = PowerSGDWork(layout, dtype.itemsize, size)
        p_numels = [wire_stride(each.rows, size) * each.rank for each in matrices]
        q_numels = [wire_stride(each.cols, size) * each.rank for each in matrices]
        self.wire_numels = (p_numels, work.p_wire_numel - work.uncompressed_start, q_numels)
        self._bucket = PowerSGDBucket(work, dtype, wire_dtype, device, **arithmetic)
        self._scratch: Scratch | None = None
        self._scratch_memory: torch.Tensor | None = None
        self._has_taken_scratch = False
        self._random_q = Stage([random_q(self._bucket)], device)
        if device.type != "meta":
            self._random_q(seed=seed)

    def take_scratch(self) -> None:
        """Take a scratch for a step, and make the stages on its memory, unless the plan has one already."""
        if self._has_taken_scratch:
            return
        self._scratch = take_scratch(self._device, self._scratch, self._bucket.scratch_bytes)
        self._has_taken_scratch, memory = True, self._scratch.memory
        if memory is self._scratch_memory:
            return
        self._scratch_memory = memory
        self._bucket.place(memory)
        self.p_wire, self.q_wire = self._bucket.p_wire, self._bucket.q_wire
        self._projecting = Stage(project(self._bucket), self._device)
        last_launches = back_project(self._bucket)
        self._back_projecting = Stage([*orthonormalize(self._bucket), *last_launches], self._device)
        self._reconstructing = Stage([reconstruct(self._bucket)], self._device)

    def compile(self, device: torch.device) -> None:
        """Compile every kernel for a device. The plan's own is "meta"."""
        self.take_scratch()
        for stage in (self._random_q, self._projecting, self._back_projecting, self._reconstructing):
            stage.compile(device)

    def project(self, buffer: torch.Tensor, scale: float, left_out: Sequence[int] = ()) -> None:
        self.take_scratch()
        self._projecting(buffer=buffer, scale=scale)
        for index in left_out:
            start = self._work.fields(index)["p_wire"]
            self.p_wire[start : start + self.wire_numels[0][index]].zero_()

    def back_project(self, buffer: torch.Tensor, scale: float) -> None:
        self._back_projecting(buffer=buffer, scale=scale)

    def reconstruct(self, buffer: torch.Tensor, seed: int) -> None:
        self._reconstructing(buffer=buffer, seed=seed)
        assert self._scratch is not None, "reconstruct comes after project"
        self._scratch.is_taken = self._has_taken_scratch = False

    # For checkpoints, in plain torch, one matrix at a time: their time doesn't matter.

    def error(self) -> torch.Tensor:
        flat = torch.zeros(self.layout.numel, dtype=self._dtype, device=self._device)
        if self._bucket.error_feedback:
            for index, matrix in enumerate(self.layout.matrices):
                p, q = self._panel(index, "p"), self._panel(index, "q")
                # In fp64: no user's setting, such as TF32 or autocast, makes it less precise.
                product = (p.double() @ q.double().mT / SHRINK.value).to(flat.dtype)
                product = torch.where(p[0, 0].isnan(), 0.0, product)  # see tile.is_lost
                error = (self._matrix(index).to(p.dtype) - product.to(p.dtype)).to(flat.dtype)
                # An error that isn't finite counts as zero, as in project.
                error = torch.where(error.isfinite(), error, 0.0).flatten()
                flat[matrix.offset : matrix.offset + matrix.numel] = error[: matrix.numel]
        return flat

    def add_to_error(self, offset: int, values: torch.Tensor) -> None:
        for index, matrix in enumerate(self.layout.matrices if self._bucket.error_feedback else ()):
            start = offset - matrix.offset
            if 0 <= start < matrix.numel:
                added = self._bucket.memory.new_zeros(matrix.rows * matrix.cols)
                added[start : start + len(values)] = values
                self._matrix(index).add_(added.view(matrix.rows, matrix.cols))

    def directions(self) -> list[torch.Tensor]:
        directions = []
        for index in range(len(self.layout.matrices)):
            q, random = self._panel(index, "q"), self._panel(index, "random")
            squared = self._norms(index).sum(0)[: q.shape[1]]
            scaled = q * scale_of(squared, self._bucket.has_epsilon).to(q.dtype)
            directions.append(torch.where(is_kept(squared), scaled, random))
        return directions

    def load(self, error: torch.Tensor, directions: Sequence[torch.Tensor]) -> None:
        self._bucket.p.zero_()
        self._bucket.memory.zero_()
        for index, (matrix, direction) in enumerate(zip(self.layout.matrices, directions, strict=True)):
            self.add_to_error(matrix.offset, error[matrix.offset : matrix.offset + matrix.numel])
            q, random = self._panel(index, "q"), self._panel(index, "random")
            q.copy_(direction)
            squared = q.double().square().sum(0)
            # The results of directions() aren't scaled again, so that the next step computes the same bits:
            # scaled columns of Q, with lengths in these limits up to rounding, and random columns.
            is_unit = self._bucket.has_epsilon and self._bucket.warm_start
            shortest, longest = (1.0 - 1e-6, 1.0 + 1e-6) if is_unit else (0.25 - 1e-6, 4.0)
            squared[(squared > shortest) & (squared < longest)] = 1.0
            squared[(q == random).all(0)] = 0.0
            norms = self._norms(index)
            norms.zero_()
            norms[0, : matrix.rank] = squared

    def kept(self) -> list[torch.Tensor]:
        bucket = self._bucket
        return [bucket.memory, bucket.p, bucket.q, bucket.norms]

    def _panel(self, index: int, name: str) -> torch.Tensor:
        """Return a matrix's factor [rows or cols, rank] as a view of its panel. name: p, q or random."""
        matrix, fields = self.layout.matrices[index], self._work.fields(index)
        if name == "p":
            panels, length, stride = self._bucket.p, matrix.rows, fields["p_stride"]
        else:
            panels, length, stride = self._bucket.q, matrix.cols, fields["q_stride"]
        start = fields[f"{name}_panel"]
        return panels[start : start + self._work.rank * stride].view(-1, stride).mT[:length, : matrix.rank]

    def _norms(self, index: int) -> torch.Tensor:
        fields = self._work.fields(index)
        return self._bucket.norms[fields["first_norm"] :][: fields["num_norms"]]

    def _matrix(self, index: int) -> torch.Tensor:
        """Return M [rows, cols] of a matrix as a view of the memory."""
        matrix, fields = self.layout.matrices[index], self._work.fields(index)
        memory = self._bucket.memory[fields["memory"] :][: matrix.rows * fields["memory_cols"]]
        return memory.view(matrix.rows, -1)[:, : matrix.cols]
