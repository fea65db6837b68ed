"""What PowerSGD's kernels compute on for one bucket: tables, tensors and options. Launchers take a bucket."""

from __future__ import annotations

import torch

from ..device import send
from ..launch import Slot
from ..scratch import num_bytes_of, parts_of_scratch
from .tile import SHRINK
from .work import PowerSGDWork

# Numbers that every step gives. Kernels annotate their types: these values only stand for them.
SCALE, SEED = Slot("scale", 1000.0), Slot("seed", 1000)


class PowerSGDBucket:
    """One bucket's tables and tensors on a device, and the options that its kernels are compiled for.

    work: the bucket's tables on the host.
    dtype, wire_dtype: of the bucket's flat buffer, and of the wires.
    error_feedback, warm_start, epsilon: see ops.powersgd_plan.

    Kept from step to step:

    memory: M of every matrix, in dtype; empty without error feedback.
    p, q: the panels of the last step's factors, fp32 (fp64 for an fp64 bucket); in the second half of q, the
        random Q.
    norms: [num_norms, rank], fp64, the sums of squares of Q's columns, each over some rows of Q. They are
        zeros at first, so the first step projects on the random Q.
    arrived: int32, see wire.is_adding. Zeros between launches.
    matrices, tables: int64, PowerSGDWork's matrix_table, and its rows of work by kernel.

    Kept within a step, in a scratch, from `place` on:

    partial: the partial sums of P, then of Q, in p's dtype.
    p_wire, q_wire: the wires, in wire_dtype.
    grams: fp64, the partial Gram matrices of P.
    """

    partial: torch.Tensor
    p_wire: torch.Tensor
    q_wire: torch.Tensor
    grams: torch.Tensor

    def __init__(
        self,
        work: PowerSGDWork,
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        device: torch.device,
        *,
        error_feedback: bool,
        warm_start: bool,
        epsilon: float,
    ):
        def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(numel, dtype=dtype, device=device)

        def sent(rows: list[tuple[int, ...]]) -> torch.Tensor:
            return send(torch.tensor(rows, dtype=torch.int64), device)

        self.work, self.dtype = work, dtype
        self.error_feedback, self.warm_start = error_feedback, warm_start
        # Lengths of columns on the wire are shrunk, too.
        self.has_epsilon, self.epsilon = epsilon > 0, epsilon * wire_factor(wire_dtype)
        wide = torch.promote_types(dtype, torch.float32)
        self.memory = zeros(work.memory_numel if error_feedback else 0, dtype)
        self.p = zeros(work.p_panel_numel, wide)
        self.q = zeros(work.q_panel_numel, wide)
        self.norms = zeros(work.num_norms * work.rank, torch.float64).view(-1, work.rank)
        self.arrived = zeros(work.num_walks, torch.int32)
        self.matrices = sent(work.matrix_table)
        names = ("project", "orthonormalize", "back_project", "reconstruct")
        self.tables = {name: sent(getattr(work, f"{name}_work")) for name in names}
        self._scratch_parts = [
            (work.partial_numel, wide),
            (work.p_wire_numel, wire_dtype),
            (work.q_wire_numel, wire_dtype),
            (work.grams_numel, torch.float64),
        ]

    @property
    def scratch_bytes(self) -> int:
        """The bytes that the bucket takes in a scratch."""
        return num_bytes_of(self._scratch_parts)

    def place(self, memory: torch.Tensor) -> None:
        """Take a scratch's memory for partial sums, wires and Gram matrices."""
        self.partial, self.p_wire, self.q_wire, self.grams = parts_of_scratch(memory, self._scratch_parts)


def wire_factor(dtype: torch.dtype) -> float:
    """Return the factor of P and Q on a wire of this dtype; see tile.SHRINK."""
    return 1.0 if dtype == torch.float16 else SHRINK.value
