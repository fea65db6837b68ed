"""PowerSGD as a compressor: two all-reduces of thin factors in place of one of the bucket."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.layout import LowRankLayout

from .compressor import BucketSpec, Compressor, State

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.


@dataclass(frozen=True)
class LowRankOptions:
    """The options that PowerSGD's working set depends on, beside the bucket.

    square: the whole bucket is one square matrix. epsilon: torch's, for P summed over the ranks. The others
    are PowerSGDState's.
    """

    square: bool
    rank: int
    min_compression_rate: float
    error_feedback: bool
    warm_start: bool
    epsilon: float

    def layout(self, shapes: Sequence[tuple[int, ...]]) -> LowRankLayout:
        """Return the layout of a bucket with these shapes."""
        if self.square:
            return LowRankLayout.square(sum(map(math.prod, shapes)), self.rank)
        return LowRankLayout(shapes, self.rank, self.min_compression_rate)

    def arithmetic(self, world_size: int) -> dict[str, Any]:
        """Return the options of the plan's arithmetic."""
        # P is averaged here where torch sums it, hence the quotient.
        epsilon = self.epsilon / world_size
        return {"error_feedback": self.error_feedback, "warm_start": self.warm_start, "epsilon": epsilon}

    def tensors_of_matrices(self, shapes: Sequence[tuple[int, ...]]) -> list[int]:
        """Return the position in the bucket of each matrix's tensor; an empty list for a square view."""
        if self.square:
            return []
        starts, start = {}, 0
        for index, numel in enumerate(map(math.prod, shapes)):
            if numel:
                starts[start] = index
            start += numel
        return [starts[matrix.offset] for matrix in self.layout(shapes).matrices]


class LowRankCompressor(Compressor):
    """PowerSGD for one bucket (Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2).

    Its state: "error", this rank's error, and "directions", the Q [cols, rank] that the next step projects
    each matrix on; a single Q for a square view.
    """

    def __init__(self, bucket: BucketSpec, options: LowRankOptions):
        self._num_tensors = len(bucket.shapes)
        self._tensors = options.tensors_of_matrices(bucket.shapes)
        self._is_square = options.square
        self._left_out: list[int] = []
        self.plan = ops.low_rank_plan(
            options.layout(bucket.shapes),
            bucket.dtype,
            bucket.device,
            **options.arithmetic(bucket.world_size),
            seed=bucket.seed,
            # average, which in_order runs, goes from the first stage to the last.
            shares_scratch=True,
        )
        # As torch counts: without the kernels' padding of each column to 16 bytes.
        self.sent_numel = self.plan.layout.wire_numel + self.plan.layout.q_numel

    @classmethod
    def warm_up(cls, bucket: BucketSpec, options: LowRankOptions) -> None:
        """Compile the kernels that the bucket's steps will launch."""
        ops.compile_low_rank(
            options.layout(bucket.shapes),
            bucket.dtype,
            bucket.device,
            **options.arithmetic(bucket.world_size),
        )

    def leave_out(self, unused: Sequence[int]) -> None:
        """Send no P of these tensors' matrices; if no rank does, nothing is taken out of the errors."""
        if self._is_square:
            is_unused = len(unused) == self._num_tensors
            self._left_out = list(range(len(self.plan.layout.matrices))) if is_unused else []
        else:
            self._left_out = [index for index, tensor in enumerate(self._tensors) if tensor in unused]

    def average(self, flat: torch.Tensor, group: dist.ProcessGroup, seed: int) -> None:
        """Apply the steps of powerSGD_hook to a flat bucket. seed: the seed for the next directions."""
        plan, scale = self.plan, 1 / group.size()
        plan.project(flat, scale)
        for index in self._left_out:
            plan.sent_p(index).zero_()
        dist.all_reduce(plan.p_wire, group=group)
        plan.back_project(flat, scale)
        if plan.q_wire.numel():
            dist.all_reduce(plan.q_wire, group=group)
        plan.reconstruct(flat, seed)

    def state(self) -> State:
        directions = self.plan.directions()
        if self._is_square:
            return {"error": self.plan.error(), **({"directions": directions[0]} if directions else {})}
        by_tensor: list[torch.Tensor | None] = [None] * self._num_tensors
        for tensor, direction in zip(self._tensors, directions, strict=True):
            by_tensor[tensor] = direction
        return {"error": self.plan.error(), "directions": by_tensor}

    def load(self, state: State) -> None:
        given, directions = state.get("directions"), self.plan.directions()
        if given is not None:
            by_matrix = [given] if self._is_square else [given[tensor] for tensor in self._tensors]
            pairs = zip(by_matrix, directions, strict=True)
            directions = [own if loaded is None else loaded for loaded, own in pairs]
        self.plan.load(state["error"], directions)

    def add_to_error(self, offset: int, values: torch.Tensor) -> None:
        self.plan.add_to_error(offset, values)
