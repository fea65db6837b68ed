"""What PowerSGD's kernels compute on for one bucket: tables, tensors and options. Launchers take a bucket."""

from __future__ import annotations

import threading
import weakref

import torch

from ...device import send
from ..launch import Slot
from .tile import SHRINK
from .work import PowerSGDWork

# Numbers that every step gives. Kernels annotate their types: these values only stand for them.
SCALE, SEED = Slot("scale", 1000.0), Slot("seed", 1000)

LINE_BYTES = 256  # every part of a scratch begins on a multiple of it


class Scratch:
    """Device memory that keeps its contents from a plan's first stage in a step to the plan's last stage.

    memory: uint8, as many bytes as the largest user needs. When the scratch grows, `memory` becomes another
        tensor, and the old one is freed at once. A user that finds another tensor must take its parts again.
    is_taken: whether a plan is between its first and last stage.
    """

    def __init__(self, device: torch.device):
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.is_taken = False


# Each device's scratches. The plans that have used a scratch keep it alive.
_scratches: dict[torch.device, weakref.WeakSet[Scratch]] = {}
_lock = threading.Lock()


def take_scratch(device: torch.device, last: Scratch | None, num_bytes: int) -> Scratch:
    """Return a scratch of at least num_bytes that no other plan has; a new one if all are taken.

    last: the scratch to prefer. A plan that gets its last one again needs no new views.

    There are as many scratches as plans that were under way at once. A scratch is used on the device's side
    stream, and by collectives that this stream waits for before the scratch is given back. So a plan that
    takes it later, from whatever thread, comes after all earlier work on it.
    """
    with _lock:
        scratches = _scratches.setdefault(device, weakref.WeakSet())
        found = next((each for each in (last, *scratches) if each is not None and not each.is_taken), None)
        if found is None:
            found = Scratch(device)
            scratches.add(found)
        found.is_taken = True
    if found.memory.numel() < num_bytes:
        # Free it now: other plans' views would keep it alive.
        found.memory.untyped_storage().resize_(0)
        found.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return found


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
    arrived: int32, see tile.is_adding. Zeros between launches.
    matrices, tables: int64, PowerSGDWork's matrix_table, and its rows of work by kernel.

    Kept within a step, in scratch_bytes of a scratch, from `place` on:

    partial: the partial sums of P, then of Q, in p's dtype.
    p_wire, q_wire: the wires, in wire_dtype.
    grams: fp64, the partial Gram matrices of P.
    """

    partial: torch.Tensor
    p_wire: torch.Tensor
    q_wire: torch.Tensor
    grams: torch.Tensor

    def __init__(
        self, work: PowerSGDWork, dtype: torch.dtype, wire_dtype: torch.dtype, device: torch.device, *,
        error_feedback: bool, warm_start: bool, epsilon: float,
    ):  # fmt: skip
        def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(numel, dtype=dtype, device=device)

        def sent(rows: list[tuple[int, ...]]) -> torch.Tensor:
            return send(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)

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
        lines = [-(-numel * dtype.itemsize // LINE_BYTES) for numel, dtype in self._scratch_parts]
        self._scratch_sizes = [count * LINE_BYTES for count in lines]
        self.scratch_bytes = sum(self._scratch_sizes)

    def place(self, memory: torch.Tensor) -> None:
        """Take a scratch's memory for partial sums, wires and Gram matrices."""
        memories = memory[: self.scratch_bytes].split(self._scratch_sizes)
        self.partial, self.p_wire, self.q_wire, self.grams = (
            each[: numel * dtype.itemsize].view(dtype)
            for each, (numel, dtype) in zip(memories, self._scratch_parts, strict=True)
        )


def wire_factor(dtype: torch.dtype) -> float:
    """Return the factor of P and Q on a wire of this dtype; see tile.SHRINK."""
    return 1.0 if dtype == torch.float16 else SHRINK.value
