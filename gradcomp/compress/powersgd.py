"""PowerSGD as a compressor: two all-reduces of thin factors in place of one of the bucket."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.layout import BlockLayout, PowerSGDLayout
from gradcomp.layout.blocks import SCALE_BYTES

from ..comm.pipeline import run_through
from ..rules import (
    EPSILON,
    FACTOR_DTYPE,
    FLAG,
    RANK,
    RATE,
    START_BITS,
    UNCOMPRESSED_DTYPE,
    check_fields,
    checked_field,
)
from .checkpoint import as_list, checked_tensor, require_error
from .compressor import BucketSpec, Compressor, State, Works
from .quantized import QuantizedCompressor, QuantizedOptions, average_payload


@dataclass(frozen=True)
class PowerSGDOptions:
    """PowerSGD's options, by torch's names where torch has them. PowerSGDState's docstring describes them.

    square: True if a bucket is compressed as one square matrix, by batched_powerSGD_hook.

    Raises ValueError for other values.
    """

    # int8 factors have a scale for so many elements, column after column.
    BLOCK_SIZE = 128

    matrix_approximation_rank: int = checked_field(1, RANK)
    min_compression_rate: float = checked_field(2.0, RATE)
    use_error_feedback: bool = checked_field(True, FLAG)
    warm_start: bool = checked_field(True, FLAG)
    orthogonalization_epsilon: float = checked_field(0.0, EPSILON)
    batch_tensors_with_same_shape: bool = checked_field(False, FLAG, is_compared=False)
    factor_dtype: torch.dtype | None = checked_field(None, FACTOR_DTYPE)
    uncompressed_dtype: torch.dtype | None = checked_field(None, UNCOMPRESSED_DTYPE)
    start_bits: int | None = checked_field(None, START_BITS)
    square: bool = checked_field(False, FLAG)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.uncompressed_dtype is not None and not self.is_quantized:
            raise ValueError(
                f"uncompressed_dtype is {self.uncompressed_dtype}, which goes with factor_dtype=torch.int8 "
                f"only, but factor_dtype is {self.factor_dtype}: what isn't compressed is sent in that, too"
            )

    @property
    def is_quantized(self) -> bool:
        """True if factors are sent in 8 bits."""
        return self.factor_dtype == torch.int8

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the dtype in which a bucket's plan gives its factors; None for the bucket's, this dtype."""
        return torch.promote_types(dtype, torch.float32) if self.is_quantized else self.factor_dtype

    def layout(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> PowerSGDLayout:
        """Return the layout of a bucket with these shapes."""
        if self.square:
            return PowerSGDLayout.square(sum(map(math.prod, shapes)), self.matrix_approximation_rank)
        rate = self.min_compression_rate
        if self.factor_dtype is not None:
            scale_bytes = SCALE_BYTES / self.BLOCK_SIZE if self.is_quantized else 0
            rate *= (self.factor_dtype.itemsize + scale_bytes) / dtype.itemsize
        return PowerSGDLayout(shapes, self.matrix_approximation_rank, rate)

    def arithmetic(self, world_size: int) -> dict[str, Any]:
        """Return the options of the plan's arithmetic."""
        # P is averaged here where torch sums it, hence the quotient.
        epsilon = self.orthogonalization_epsilon / world_size
        return {"error_feedback": self.use_error_feedback, "warm_start": self.warm_start, "epsilon": epsilon}

    def tensors_of_matrices(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[int]:
        """Return the position in the bucket of each matrix's tensor; an empty list for a square view."""
        if self.square:
            return []
        starts, start = {}, 0
        for index, numel in enumerate(map(math.prod, shapes)):
            if numel:
                starts[start] = index
            start += numel
        return [starts[matrix.offset] for matrix in self.layout(shapes, dtype).matrices]


class PowerSGDCompressor(Compressor):
    """PowerSGD for one bucket (Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2).

    Its state: "error", this rank's error, and "directions", the Q [cols, rank] that the next step projects
    each matrix on; a single Q for a square view.

    After a quantized start there are errors of tensors that PowerSGD sends exactly. Each is sent with the
    next gradient of its tensor that is used.
    """

    def __init__(self, bucket: BucketSpec, options: PowerSGDOptions):
        self._num_tensors = len(bucket.shapes)
        self._tensors = options.tensors_of_matrices(bucket.shapes, bucket.dtype)
        self._is_square, self._keeps_error = options.square, options.use_error_feedback
        self._left_out: list[int] = []
        self._unused: Sequence[int] = ()
        self.plan = ops.powersgd_plan(
            options.layout(bucket.shapes, bucket.dtype),
            bucket.dtype,
            bucket.device,
            **options.arithmetic(bucket.world_size),
            wire_dtype=options.wire_dtype(bucket.dtype),
            seed=bucket.seed,
            # Where a scratch is shared, run_on_side_stream runs all stages of a bucket before another's.
            shares_scratch=True,
        )
        self._wires = _QuantizedWires(self.plan, bucket, options) if options.is_quantized else None
        # The errors of tensors that are sent exactly, by position: (the tensor's slice of the bucket, error).
        self._owed: dict[int, tuple[slice, torch.Tensor]] = {}
        if options.start_bits is not None and options.use_error_feedback and not options.square:
            wide = torch.promote_types(bucket.dtype, torch.float32)
            start = 0
            for position, numel in enumerate(bucket.numels):
                if position not in self._tensors:
                    owed = torch.zeros(numel, dtype=wide, device=bucket.device)
                    self._owed[position] = slice(start, start + numel), owed
                start += numel
        if self._wires is not None:
            sent_bytes = self._wires.num_bytes
        else:
            # As torch counts: without the kernels' padding of each column to 16 bytes.
            numel = self.plan.layout.wire_numel + self.plan.layout.q_numel
            sent_bytes = numel * (options.factor_dtype or bucket.dtype).itemsize
        self.sent_numel = -(-sent_bytes // bucket.dtype.itemsize)

    @classmethod
    def check_state(
        cls, state: State, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, options: PowerSGDOptions
    ) -> None:
        require_error(state, ("error", "shard_error", "directions"), shapes, dtype)
        given = state.get("directions")
        if given is None:
            return
        matrices = options.layout(shapes, dtype).matrices
        if options.square:
            given, tensors = [given], [0] * len(matrices)
        else:
            tensors = options.tensors_of_matrices(shapes, dtype)
            given = as_list("directions", given)
        for position, matrix in zip(tensors, matrices, strict=True):
            if given[position] is not None:
                wide = torch.promote_types(dtype, torch.float32)
                checked_tensor("a direction", given[position], (matrix.cols, matrix.rank), wide)

    @classmethod
    def warm_up(cls, bucket: BucketSpec, options: PowerSGDOptions) -> None:
        """Compile the kernels that the bucket's steps will launch."""
        exact_dtype = options.uncompressed_dtype or bucket.dtype
        ops.compile_powersgd(
            options.layout(bucket.shapes, bucket.dtype),
            bucket.dtype,
            bucket.device,
            **options.arithmetic(bucket.world_size),
            wire_dtype=options.wire_dtype(bucket.dtype),
            **({"codes": (exact_dtype, options.BLOCK_SIZE)} if options.is_quantized else {}),
        )
        if options.is_quantized:
            # Its kernels don't depend on shapes.
            ops.compile_quantized(
                BlockLayout([(1, options.BLOCK_SIZE)], options.BLOCK_SIZE, bucket.world_size),
                torch.promote_types(bucket.dtype, torch.float32),
                bucket.device,
                bits=8,
                error_feedback=False,
                exact_dtype=exact_dtype,
            )

    def leave_out(self, unused: Sequence[int]) -> None:
        """Send no P of these tensors' matrices; if no rank does, nothing is taken out of the errors."""
        self._unused = unused
        if self._is_square:
            is_unused = len(unused) == self._num_tensors
            self._left_out = list(range(len(self.plan.layout.matrices))) if is_unused else []
        else:
            self._left_out = [index for index, tensor in enumerate(self._tensors) if tensor in unused]

    def average(self, flat: torch.Tensor, group: dist.ProcessGroup, seed: int) -> None:
        """Apply the steps of powerSGD_hook to a flat bucket. seed: the seed for the next directions."""
        run_through(self.stages(flat, group, seed))

    def stages(self, flat: torch.Tensor, group: dist.ProcessGroup, seed: int) -> Works:
        """Average in three stages, or five with quantized factors; yield each collective under way."""
        plan, wires = self.plan, self._wires
        # The quantized all-reduce divides by itself.
        scale = 1.0 if wires else 1 / group.size()
        for position, (part, owed) in self._owed.items():
            if position not in self._unused:
                flat[part] += owed
                owed.zero_()
        plan.project(flat, scale, self._left_out)
        if wires:
            yield from average_payload(wires.p, plan.p_wire, group)
            plan.back_project(flat, scale)
            yield from average_payload(wires.q, plan.q_wire, group)
        else:
            is_async = not ops.has_streams(flat.device)
            yield dist.all_reduce(plan.p_wire, group=group, async_op=is_async)
            plan.back_project(flat, scale)
            if plan.q_wire.numel():
                yield dist.all_reduce(plan.q_wire, group=group, async_op=is_async)
        plan.reconstruct(flat, seed)

    def state(self) -> State:
        directions = self.plan.directions()
        if self._is_square:
            return {"error": self._error(), **({"directions": directions[0]} if directions else {})}
        by_tensor: list[torch.Tensor | None] = [None] * self._num_tensors
        for tensor, direction in zip(self._tensors, directions, strict=True):
            by_tensor[tensor] = direction
        return {"error": self._error(), "directions": by_tensor}

    def _error(self) -> torch.Tensor:
        """Return this rank's error, [numel], in a tensor of its own."""
        error = self.plan.error()
        for part, owed in self._owed.values():
            error[part] = owed
        return error

    def load(self, state: State) -> None:
        given, directions = state.get("directions"), self.plan.directions()
        if given is not None:
            by_matrix = [given] if self._is_square else [given[tensor] for tensor in self._tensors]
            pairs = zip(by_matrix, directions, strict=True)
            directions = [own if loaded is None else loaded for loaded, own in pairs]
        self.plan.load(state["error"], directions)
        for part, owed in self._owed.values():
            owed.copy_(state["error"][part])

    def current_error(self) -> torch.Tensor | None:
        return self._error() if self._keeps_error else None

    def add_to_error(self, offset: int, values: torch.Tensor) -> None:
        self.plan.add_to_error(offset, values)
        for part, owed in self._owed.values():
            if part.start == offset:
                owed += values


class _QuantizedWires:
    """The working sets of the two quantized all-reduces of a plan's wires."""

    def __init__(self, plan: ops.PowerSGDPlan, bucket: BucketSpec, options: PowerSGDOptions):
        p_numel, uncompressed_numel, q_numel = plan.wire_numels
        exact_dtype = options.uncompressed_dtype or bucket.dtype

        def quantized(*shapes: tuple[int, ...]) -> ops.QuantizedPlan:
            return ops.quantized_plan(
                BlockLayout(shapes, options.BLOCK_SIZE, bucket.world_size),
                torch.promote_types(bucket.dtype, torch.float32),
                bucket.device,
                bits=8,
                error_feedback=False,  # PowerSGD's error has what rounding loses, too
                exact_dtype=exact_dtype,
            )

        self.p = quantized((1, p_numel), (uncompressed_numel,))
        self.q = quantized((1, q_numel))
        self.num_bytes = self.p.payload.numel() + self.q.payload.numel()
        plan.send_in_codes(self.p, self.q)


class QuantizedStart(QuantizedCompressor):
    """The compressor of PowerSGD's first steps, if these are quantized."""

    def __init__(self, bucket: BucketSpec, options: PowerSGDOptions):
        super().__init__(bucket, _start_options(options))

    @classmethod
    def warm_up(cls, bucket: BucketSpec, options: PowerSGDOptions) -> None:  # type: ignore[override]
        super().warm_up(bucket, _start_options(options))


def _start_options(options: PowerSGDOptions) -> QuantizedOptions:
    assert options.start_bits is not None
    return QuantizedOptions(options.start_bits, error_feedback=options.use_error_feedback)
