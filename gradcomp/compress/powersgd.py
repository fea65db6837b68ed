"""PowerSGD as a compressor: two all-reduces of thin factors instead of one all-reduce of the bucket."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradcomp import ops
from gradcomp.device import has_streams
from gradcomp.layout import SCALE_BYTES, BlockLayout, PowerSGDLayout

from ..comm.exchange import Works, all_reduce, reduce_hierarchically
from ..rules import (
    EPSILON,
    FACTOR_DTYPE,
    FLAG,
    RANK,
    RATE,
    SIXTEEN_BITS,
    START_BITS,
    check_fields,
    checked_field,
)
from .checkpoint import require_names
from .compressor import BucketSpec, Collective, Compressor, State
from .quantized_all_reduce import LayoutFor, QuantizedAllReduce, collectives_of_all_reduce, compile_operations

# Smaller wires are summed without nodes: two exchanges more within a node take longer than the bytes that
# they save between nodes (docs/network.md).
LEAST_HIERARCHICAL_BYTES = 2**18


@dataclass(frozen=True)
class PowerSGDOptions:
    """PowerSGD's options, under torch's names where torch has the option; see PowerSGDState.

    square: True to compress a bucket as one square matrix, for batched_powerSGD_hook.

    Raises ValueError for an invalid value.
    """

    # int8 factors have a scale for every 128 elements, column after column.
    BLOCK_SIZE = 128

    matrix_approximation_rank: int = checked_field(1, RANK)
    min_compression_rate: float = checked_field(2.0, RATE)
    use_error_feedback: bool = checked_field(True, FLAG)
    warm_start: bool = checked_field(True, FLAG)
    orthogonalization_epsilon: float = checked_field(0.0, EPSILON)
    batch_tensors_with_same_shape: bool = checked_field(False, FLAG, is_compared=False)
    factor_dtype: torch.dtype | None = checked_field(None, FACTOR_DTYPE)
    uncompressed_dtype: torch.dtype | None = checked_field(None, SIXTEEN_BITS)
    start_bits: int | None = checked_field(None, START_BITS)
    square: bool = checked_field(False, FLAG)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.uncompressed_dtype is not None and not self.is_quantized:
            raise ValueError(
                f"uncompressed_dtype is {self.uncompressed_dtype}, which goes with factor_dtype=torch.int8 "
                f"only, but factor_dtype is {self.factor_dtype}: uncompressed tensors are sent in "
                f"{self.factor_dtype or 'their own dtype'}"
            )

    @property
    def is_quantized(self) -> bool:
        """True if factors are sent in 8 bits per element."""
        return self.factor_dtype == torch.int8

    def plan_options(self, dtype: torch.dtype, world_size: int) -> dict[str, Any]:
        """Return the options of ops.powersgd_plan for a bucket of this dtype, except the seed."""
        wide = torch.promote_types(dtype, torch.float32)
        return {
            "error_feedback": self.use_error_feedback,
            "warm_start": self.warm_start,
            # gradcomp averages P before orthonormalizing it, but torch sums P: hence the quotient.
            "epsilon": self.orthogonalization_epsilon / world_size,
            "wire_dtype": wide if self.is_quantized else self.factor_dtype,
        }

    def codes_options(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the options of QuantizedAllReduce for int8 factors of a bucket of this dtype."""
        wide, exact = torch.promote_types(dtype, torch.float32), self.uncompressed_dtype or dtype
        # PowerSGD's error includes the rounding errors.
        return {"dtype": wide, "bits": 8, "error_feedback": False, "uncompressed_dtype": exact}

    def wire_layouts(self, wire_numels: tuple[list[int], int, list[int]]) -> list[LayoutFor]:
        """Return what gives the blocks of p_wire and of q_wire. wire_numels: the plan's.

        A factor begins a block if padding then adds at most 1 % to its wire. So its codes don't depend on the
        factors beside it, which differ where ranks of tensor parallelism share a weight.
        """
        p_numels, uncompressed_numel, q_numels = wire_numels
        shapes: list[list[tuple[int, ...]]] = [[], []]
        for of_wire, numels in zip(shapes, (p_numels, q_numels), strict=True):
            padding = sum(-numel % self.BLOCK_SIZE for numel in numels)
            is_apart = 100 * padding <= sum(numels) and min(numels, default=0) >= self.BLOCK_SIZE
            of_wire += [(1, numel) for numel in (numels if is_apart else [sum(numels)])]
        shapes[0].append((uncompressed_numel,))
        return [partial(BlockLayout, each, self.BLOCK_SIZE) for each in shapes]

    def wire_bytes(self, layout: PowerSGDLayout, dtype: torch.dtype) -> list[int]:
        """Return the bytes of p_wire and of q_wire without codes, for a bucket of this dtype."""
        itemsize = (self.factor_dtype or dtype).itemsize
        return [layout.wire_numel * itemsize, layout.q_numel * itemsize]

    def layout(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, draws: Sequence[int] | None = None
    ) -> PowerSGDLayout:
        """Return the layout of a bucket with tensors of these shapes and draws, in this dtype."""
        if self.square:
            return PowerSGDLayout.square(sum(map(math.prod, shapes)), self.matrix_approximation_rank)
        rate = self.min_compression_rate
        if self.factor_dtype is not None:
            scale_bytes = SCALE_BYTES / self.BLOCK_SIZE if self.is_quantized else 0
            rate *= (self.factor_dtype.itemsize + scale_bytes) / dtype.itemsize
        return PowerSGDLayout(shapes, self.matrix_approximation_rank, rate, draws)


def _way(num_bytes: int, bucket: BucketSpec) -> BucketSpec:
    """Return the bucket with the nodes and the delay that count for a wire of this size without codes.

    On a CPU with nodes, the sum of a large wire is hierarchical. NCCL's rings pass each node once anyway.
    """
    is_small = num_bytes < LEAST_HIERARCHICAL_BYTES
    if not (is_small or has_streams(bucket.device)):
        return bucket
    # Between two ranks one exchange of a small wire is faster than gloo's ring on any link.
    has_delay = bucket.has_delay or (bucket.world_size == 2 and is_small)
    return replace(bucket, ranks_per_node=1, has_delay=has_delay)


class PowerSGDCompressor(Compressor):
    """PowerSGD for one bucket (Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2).

    The state's entries:

    "error": [numel], this rank's error.
    "direction": by tensor, the Q [cols, rank] that the next step projects on.
    "square_direction": instead, the Q of a square view of the bucket.

    Directions for another rank are not used.
    """

    def __init__(self, bucket: BucketSpec, options: PowerSGDOptions):
        self._num_tensors = len(bucket.shapes)
        self._is_square, self._keeps_error = options.square, options.use_error_feedback
        self.plan = ops.powersgd_plan(
            options.layout(bucket.shapes, bucket.dtype, bucket.draws),
            bucket.dtype,
            bucket.device,
            **options.plan_options(bucket.dtype, bucket.world_size),
            seed=bucket.seed,
        )
        self._tensors = [matrix.tensor for matrix in self.plan.layout.matrices]
        if options.use_error_feedback and not options.square:
            self.sent_exactly = set(range(self._num_tensors)) - set(self._tensors)
        self._all_reduces: list[Callable[[Tensor, dist.ProcessGroup], Works]] = []  # of P's wire, of Q's
        # The quantized all-reduce averages, the others sum.
        self._divides = not options.is_quantized
        if options.is_quantized:
            of_wires = [
                QuantizedAllReduce(layout_for, spec=bucket, **options.codes_options(bucket.dtype))
                for layout_for in options.wire_layouts(self.plan.wire_numels)
            ]
            self._all_reduces += [each.reduce for each in of_wires]
            sent_bytes = sum(each.num_bytes for each in of_wires)
        else:
            # Counted without the kernels' padding of each column to 16 bytes, so that it compares with torch.
            wires = options.wire_bytes(self.plan.layout, bucket.dtype)
            sent_bytes = sum(wires)
            for way in (_way(each, bucket) for each in wires):
                across = partial(all_reduce, has_delay=way.has_delay)
                if (per_node := way.ranks_per_node) > 1:
                    across = partial(reduce_hierarchically, ranks_per_node=per_node, between=across)
                self._all_reduces.append(across)
        self.sent_numel = -(-sent_bytes // bucket.dtype.itemsize)

    @classmethod
    def check_entry(cls, entry: dict[str, Tensor], *, of_bucket: bool) -> None:
        name = "square_direction" if of_bucket else "direction"
        require_names(entry, [name] if of_bucket else ["error", name])
        direction, error = entry.get(name), entry.get("error")
        if direction is None:
            return
        if error is None and not of_bucket:
            raise ValueError(f"has a {name} but no error")
        cols = None if error is None else math.prod(error.shape[1:])
        is_wide = direction.dtype in (torch.float32, torch.float64)
        if not is_wide or direction.dim() != 2 or cols not in (None, direction.shape[0]):
            raise ValueError(
                f"has a {name} {list(direction.shape)} of {direction.dtype}, but must have "
                f"[{cols or 'cols'}, rank] of float32 or float64"
            )

    @classmethod
    def warm_up(cls, bucket: BucketSpec, options: PowerSGDOptions) -> None:
        """Compile the kernels that the bucket's steps will launch."""
        ops.compile_powersgd(
            options.layout(bucket.shapes, bucket.dtype),
            bucket.dtype,
            bucket.device,
            **options.plan_options(bucket.dtype, bucket.world_size),
        )
        if options.is_quantized:
            # The quantization kernels don't depend on shapes.
            layout_for = partial(BlockLayout, [(1, options.BLOCK_SIZE)], options.BLOCK_SIZE)
            codes = options.codes_options(bucket.dtype)
            compile_operations(lambda spec: QuantizedAllReduce(layout_for, spec=spec, **codes), bucket)

    @classmethod
    def collectives(cls, bucket: BucketSpec, options: PowerSGDOptions) -> list[Collective]:
        layout = options.layout(bucket.shapes, bucket.dtype)
        if options.is_quantized:
            wire_numels = layout.p_numels, layout.wire_numel - layout.p_numel, layout.q_numels
            codes = options.codes_options(bucket.dtype)
            p, q = (
                collectives_of_all_reduce(layout_for, spec=bucket, **codes)
                for layout_for in options.wire_layouts(wire_numels)
            )
        else:
            wires = options.wire_bytes(layout, bucket.dtype)
            p, q = (_way(each, bucket).summing(each, each) if each else [] for each in wires)
        return p + q

    def reduce(
        self, flat: Tensor, out: Tensor, group: dist.ProcessGroup, seed: int, unused: Collection[int] = ()
    ) -> Works:
        """Average in a stage before, between and after collectives; powerSGD_hook lists the steps.

        seed: the seed for the next step's random directions.
        unused: zeros are sent as P of these tensors' matrices. If all ranks do so, their errors stay.
        """
        plan, (of_p, of_q) = self.plan, self._all_reduces
        scale = 1 / group.size() if self._divides else 1.0
        if self._is_square and len(unused) < self._num_tensors:
            unused = ()  # one matrix has all tensors
        left_out = [index for index, tensor in enumerate(self._tensors) if tensor in unused] if unused else []
        plan.project(flat, scale, left_out)
        yield from of_p(plan.p_wire, group)
        plan.back_project(flat, scale)
        if plan.q_wire.numel():
            yield from of_q(plan.q_wire, group)
        plan.reconstruct(flat, seed)

    def state(self) -> State:
        error, directions = self.plan.error(), self.plan.directions()
        if self._is_square:
            return {"error": error, **({"square_direction": directions[0]} if directions else {})}
        by_tensor: list[Tensor | None] = [None] * self._num_tensors
        for tensor, direction in zip(self._tensors, directions, strict=True):
            by_tensor[tensor] = direction
        return {"error": error, "direction": by_tensor}

    def load(self, state: State) -> None:
        directions = self.plan.directions()
        if self._is_square:
            given = [state.get("square_direction")] * len(directions)
        else:
            by_tensor = state.get("direction", [None] * self._num_tensors)
            given = [by_tensor[tensor] for tensor in self._tensors]
        pairs = zip(given, directions, strict=True)
        directions = [own if q is None or q.shape != own.shape else q for q, own in pairs]
        self.plan.load(state["error"], directions)

    def snapshot(self) -> Callable[[], None]:
        copies = [each.clone() for each in self.plan.kept()]

        def restore() -> None:
            for own, copy in zip(self.plan.kept(), copies, strict=True):
                own.copy_(copy)

        return restore

    def current_error(self) -> Tensor | None:
        return self.plan.error() if self._keeps_error else None

    def add_to_error(self, offset: int, values: Tensor) -> None:
        self.plan.add_to_error(offset, values)
