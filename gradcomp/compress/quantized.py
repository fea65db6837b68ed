"""Quantized all-reduce as a compressor: two collectives of codes and scales instead of one all-reduce.

    rank r    bucket + error ──quantize──▶ shard 0 │ shard 1 │ … │ shard W−1
    all-to-all: every rank gets its own shard from all ranks
    owner     Σ dequantized + the owner's error ──quantize──▶ the shard's mean
    all-gather: every rank gets the means of all shards, and dequantizes the same bytes

Rank r owns shard r. A rank sends and receives about two buckets of codes, whatever the number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.layout.blocks import BlockLayout, Part

from ..comm.exchange import all_gather, all_to_all
from ..comm.pipeline import run_through
from ..rules import BITS, BLOCK_SIZE, FLAG, UNCOMPRESSED_DTYPE, check_fields, checked_field
from .checkpoint import require_error
from .compressor import BucketSpec, Compressor, State, Works


@dataclass(frozen=True)
class QuantizedOptions:
    """The options of a quantized all-reduce.

    bits: 4 or 8 bits for each element.
    block_size: elements that share one scale; even, at most 4096.
    error_feedback: add a step's rounding errors to the next step's gradients.
    uncompressed_dtype: the dtype in which vectors and small tensors are sent: torch.bfloat16 or
        torch.float16. None: the bucket's dtype.

    Raises ValueError for an invalid value.
    """

    bits: int = checked_field(4, BITS)
    block_size: int = checked_field(128, BLOCK_SIZE)
    error_feedback: bool = checked_field(True, FLAG)
    uncompressed_dtype: torch.dtype | None = checked_field(None, UNCOMPRESSED_DTYPE)

    def __post_init__(self) -> None:
        check_fields(self)


class QuantizedCompressor(Compressor):
    """The quantized all-reduce of one bucket, with error feedback on a shard's senders and on its owner.

    A sender keeps the error of quantizing its gradients. An owner keeps the error of quantizing its shard's
    mean, times the number of ranks. The state's entries:

    "error": [numel], the values that the averages still lack from this rank: the sender's error everywhere,
        plus the owner's error in this rank's own shard.
    "shard_error": [numel], the owner's error alone, zero outside the shard. It is already part of "error".

    If a new run gives this rank another shard, the part of "shard_error" outside the new shard counts as the
    sender's error, so nothing is lost.
    """

    is_same_on_all_processors = True

    def __init__(self, bucket: BucketSpec, options: QuantizedOptions):
        layout = BlockLayout(bucket.shapes, options.block_size, bucket.world_size)
        self._plan = ops.quantized_plan(
            layout,
            bucket.dtype,
            bucket.device,
            bits=options.bits,
            error_feedback=options.error_feedback,
            exact_dtype=options.uncompressed_dtype,
        )
        self._layout = layout
        self._unused: list[Part] = []
        self._own: slice | None = None  # this rank's shard, once its rank is known
        self._loaded_shard_error: torch.Tensor | None = None
        # The number of elements in an all-reduce that sends as many bytes.
        self.sent_numel = -(-self._plan.payload.numel() // bucket.dtype.itemsize)

    @classmethod
    def check_state(
        cls, state: State, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, options: QuantizedOptions
    ) -> None:
        require_error(state, ("error", "shard_error"), shapes, dtype)

    @classmethod
    def warm_up(cls, bucket: BucketSpec, options: QuantizedOptions) -> None:
        """Compile the kernels that the bucket's steps will launch."""
        ops.compile_quantized(
            BlockLayout(bucket.shapes, options.block_size, bucket.world_size),
            bucket.dtype,
            bucket.device,
            bits=options.bits,
            error_feedback=options.error_feedback,
            exact_dtype=options.uncompressed_dtype,
        )

    def leave_out(self, unused: Sequence[int]) -> None:
        """Send zeros for these tensors, and keep their errors."""
        self._unused = [part for part in self._layout.quantized if part.position in unused]

    def average(self, flat: torch.Tensor, group: dist.ProcessGroup, seed: int) -> None:
        """Replace the bucket by its mean over the ranks: blocks quantized twice, everything else exact."""
        run_through(self.stages(flat, group, seed))

    def stages(self, flat: torch.Tensor, group: dist.ProcessGroup, seed: int) -> Works:
        """Average in three stages. Yields each collective in progress."""
        self._own = self._layout.shard(group.rank())
        if self._loaded_shard_error is not None and self._plan.shard_error is not None:
            self._plan.shard_error.copy_(self._padded(self._loaded_shard_error)[self._own])
            self._loaded_shard_error = None
        yield from quantized_all_reduce(self._plan, flat, group, self._unused)

    # --- errors ---

    def add_to_error(self, offset: int, values: torch.Tensor) -> None:
        for part in self._layout.quantized:
            start = offset - part.in_bucket.start
            if self._plan.error is not None and 0 <= start < part.in_bucket.stop - part.in_bucket.start:
                self._plan.error[part.stored][start : start + len(values)] += values

    def current_error(self) -> torch.Tensor | None:
        return None if self._plan.error is None else self._unpadded(self._plan.error)

    def state(self) -> State:
        error, own, shard_error = self._plan.error, self._own, self._plan.shard_error
        if error is None or shard_error is None:
            return {}
        if self._loaded_shard_error is not None:
            return {"error": self._unpadded(error), "shard_error": self._loaded_shard_error.clone()}
        padded = torch.zeros_like(error)
        if own is not None:
            padded[own] = shard_error
        return {"error": self._unpadded(error), "shard_error": self._unpadded(padded)}

    def load(self, state: State) -> None:
        error, shard_error = self._plan.error, self._plan.shard_error
        if error is not None and shard_error is not None and "error" in state:
            error.copy_(self._padded(state["error"]))
            shard_error.zero_()
            self._loaded_shard_error = state.get("shard_error")

    def _padded(self, flat: torch.Tensor) -> torch.Tensor:
        """Convert values in the bucket's order to the order of the padded blocks."""
        assert self._plan.error is not None
        padded = torch.zeros_like(self._plan.error)
        for run in self._layout.runs:
            padded[run.stored] = flat[run.in_bucket]
        return padded

    def _unpadded(self, blocks: torch.Tensor) -> torch.Tensor:
        """Convert values in the order of the padded blocks to the bucket's order; zeros for exact tensors."""
        flat = blocks.new_zeros(self._layout.numel)
        for run in self._layout.runs:
            flat[run.in_bucket] = blocks[run.stored]
        return flat


def quantized_all_reduce(
    plan: ops.QuantizedPlan, flat: torch.Tensor, group: dist.ProcessGroup, unused: Sequence[Part] = ()
) -> Works:
    """Replace a bucket by its mean over the ranks. Yields each of the two collectives in progress.

    unused: the layout's parts that this rank's backward has not used; see ops.quantized_plan.
    """
    if plan.payload.numel():
        plan.quantize(flat, group.rank(), unused)
        yield from average_payload(plan, flat, group)


def average_payload(plan: ops.QuantizedPlan, flat: torch.Tensor, group: dist.ProcessGroup) -> Works:
    """Run quantized_all_reduce from the all-to-all on; plan.payload already holds this rank's codes."""
    if plan.payload.numel():
        yield all_to_all(plan.received, plan.payload, group)
        plan.average(group.rank())
        yield all_gather(plan.payload, plan.mean, group)
        plan.dequantize(flat)
