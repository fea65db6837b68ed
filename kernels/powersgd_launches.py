"""The tensors of PowerSGD's plan for a bucket, and the launches of its stages on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .device import is_fp64_slow, launching_on, send
from .launch import Stage
from .powersgd_back_project import back_project
from .powersgd_codes_work import is_packed_as_codes
from .powersgd_orthonormalise import orthonormalise
from .powersgd_pack import pack
from .powersgd_pack_codes import FactorCodes, pack_codes
from .powersgd_project import project
from .powersgd_random import random_q
from .powersgd_reconstruct import reconstruct
from .powersgd_tile import SHRINK
from .powersgd_work import LowRankWork
from .scratch import num_bytes_of, parts_of_scratch


@dataclass(frozen=True)
class LowRankArithmetic:
    """What a plan's kernels depend on beside the bucket: ops.low_rank_plan's options."""

    error_feedback: bool
    warm_start: bool
    epsilon: float
    in_pairs: bool  # whether the device's fp64 is so slow that pairs of fp32 take its place


def wire_factor(dtype: torch.dtype) -> float:
    """Return what P and Q are multiplied by on a wire of this dtype: see powersgd_tile.SHRINK."""
    return 1.0 if dtype == torch.float16 else SHRINK.value


class LowRankTensors:
    """The tensors of a plan that last from step to step.

    Zero lengths of Q's columns make the first step project on the random Q.
    """

    def __init__(self, work: LowRankWork, dtype: torch.dtype, device: torch.device, error_feedback: bool):
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
            for name in ("project", "pack", "orthonormalise", "back_project", "reduce", "reconstruct")
        }

    def randomise(self, work: LowRankWork, seed: int) -> None:
        """Make the random Q. One launch."""
        random_q(
            self.matrices,
            self.tables["reconstruct"],
            out=self.q,
            num_programs=work.num_norms,
            seed=seed,
            rank=work.rank,
            block_cols=work.block_cols,
        )


class LowRankStages:
    """The launches of a plan's stages, on given tensors.

    codes: where P and Q are packed in 8 bits instead of on the wires; None for the wires. pack_p: the last
    launch of project, for codes.
    """

    def __init__(
        self,
        work: LowRankWork,
        tensors: LowRankTensors,
        scratch: Sequence[torch.Tensor],
        dtype: torch.dtype,
        arithmetic: LowRankArithmetic,
        codes: tuple[FactorCodes, FactorCodes] | None = None,
    ):
        self._work, self._tensors, self._arithmetic = work, tensors, arithmetic
        self.partial, self.p_wire, self.q_wire, self._grams = scratch
        self._blocks = {"rank": work.rank, "block_rows": work.block_rows, "block_cols": work.block_cols}
        self._codes = {"pack": codes[0], "reduce": codes[1]} if codes else {}
        self.project = Stage(self._project, dtype, float)
        self.pack_p = Stage(self._pack_p, dtype, float)
        self.orthonormalise = Stage(self._orthonormalise, dtype, float)
        self.back_project = Stage(self._back_project, dtype, float)
        self.reconstruct = Stage(self._reconstruct, dtype, int)

    @staticmethod
    def scratch_parts(
        work: LowRankWork, dtype: torch.dtype, wire_dtype: torch.dtype
    ) -> list[tuple[int, torch.dtype]]:
        """Return the (elements, dtype) of partial sums, wires and Gram matrices, not kept for long."""
        wide = torch.promote_types(dtype, torch.float32)
        return [
            (work.partial_numel, wide),
            (work.p_wire_numel, wire_dtype),
            (work.q_wire_numel, wire_dtype),
            (work.orthonormalise_numel, torch.float64),
        ]

    def compile(self) -> None:
        """Compile every kernel for the current device."""
        for stage in (self.project, self.back_project, self.orthonormalise, self.reconstruct):
            stage.compile()
        if self._codes:
            self.pack_p.compile()

    def _project(self, buffer: torch.Tensor, scale: float) -> None:
        own = self._tensors
        project(
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
        self._pack_p(buffer, scale)

    def _pack_p(self, buffer: torch.Tensor, scale: float) -> None:
        self._pack(buffer, "pack", self.p_wire, self._work.block_rows, scale)

    def _orthonormalise(self, buffer: torch.Tensor, scale: float) -> None:
        self.orthonormalise_in(self._arithmetic.in_pairs)

    def orthonormalise_in(self, pairs: bool) -> None:
        """Orthonormalise P in pairs of fp32, or in fp64."""
        own = self._tensors
        orthonormalise(
            self.p_wire,
            own.matrices,
            own.tables["orthonormalise"],
            scratch=self._grams,
            out=own.p,
            rank=self._work.rank,
            epsilon=self._arithmetic.epsilon * wire_factor(self.p_wire.dtype),
            pairs=pairs,
        )

    def _back_project(self, buffer: torch.Tensor, scale: float) -> None:
        own, feedback = self._tensors, self._arithmetic.error_feedback
        self._orthonormalise(buffer, scale)
        back_project(
            own.memory if feedback else buffer,
            own.p,
            own.matrices,
            own.tables["back_project"],
            out=self.partial,
            feedback=feedback,
            **self._blocks,
        )
        self._pack(buffer, "reduce", self.q_wire, self._work.block_cols, scale)

    def _reconstruct(self, buffer: torch.Tensor, seed: int) -> None:
        own = self._tensors
        reconstruct(
            self.p_wire,
            self.q_wire,
            own.p,
            own.matrices,
            own.tables["reconstruct"],
            out=buffer,
            q=own.q,
            norms=own.norms,
            seed=seed,
            warm_start=self._arithmetic.warm_start,
            **self._blocks,
        )

    def _pack(self, buffer: torch.Tensor, table: str, out: torch.Tensor, block: int, scale: float) -> None:
        rank, codes, work = self._work.rank, self._codes.get(table), self._tensors.tables[table]
        if codes is not None:
            pack_codes(self.partial, buffer, codes, rank=rank, block=block, scale=scale)
        else:
            pack(self.partial, buffer, work, out=out, rank=rank, block=block, scale=scale)


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
    """Compile every kernel that a LowRankPlan with these arguments launches. Its tensors are "meta" here.

    codes: for a plan that sends codes, the dtype of what is sent exactly, the elements with one scale, and
    the largest scale.
    """
    wire_dtype, meta = wire_dtype or dtype, torch.device("meta")
    work = LowRankWork.of(layout, dtype.itemsize, wire_dtype.itemsize)
    tensors = LowRankTensors(work, dtype, meta, error_feedback)
    parts = LowRankStages.scratch_parts(work, dtype, wire_dtype)
    memory = torch.empty(num_bytes_of(parts), dtype=torch.uint8, device=meta)
    arithmetic = LowRankArithmetic(error_feedback, warm_start, epsilon, is_fp64_slow(device))
    of_factors = None
    if codes and is_packed_as_codes(work, codes[1]):
        of_factors = (FactorCodes.on_meta(*codes), FactorCodes.on_meta(*codes))
    stages = LowRankStages(work, tensors, parts_of_scratch(memory, parts), dtype, arithmetic, of_factors)
    first_q = Stage(lambda _, seed: tensors.randomise(work, seed), dtype, int)
    with launching_on(device):
        stages.compile()
        first_q.compile()
