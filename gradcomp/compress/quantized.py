"""Quantized all-reduce as a compressor: codes and scales in one exchange or in two, instead of an all-reduce.

In two:

    rank r    bucket + error ──quantize──▶ shard 0 │ shard 1 │ … │ shard W−1
    all-to-all: every rank gets its own shard from all ranks
    owner     its own values, exact, + Σ dequantized ──quantize──▶ the shard's mean
    all-gather: every rank gets the means of all shards, and dequantizes the same bytes

Rank r owns shard r. A rank sends and receives about two buckets of codes, whatever the number of ranks. If
several ranks share a network card, the hierarchical form sends these through the card once.

In one, between two ranks or where a round trip takes longer than the bytes:

    rank r    bucket + error ──quantize──▶ the whole bucket
    all-gather: every rank gets the codes of all ranks, its own too, and sums what it dequantizes
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradcomp.layout import BlockLayout

from ..comm.exchange import Works
from ..rules import BITS, BLOCK_SIZE, FEEDBACK, SIXTEEN_BITS, check_fields, checked_field
from .checkpoint import require_names
from .compressor import BucketSpec, Collective, Compressor, State
from .quantized_all_reduce import QuantizedAllReduce, collectives_of_all_reduce, compile_operations
from .reduce_scatter import ReduceScatter


@dataclass(frozen=True)
class QuantizedOptions:
    """The options of a quantized all-reduce, under QuantizationState's names.

    error_feedback: QuantizationState's use_error_feedback.

    Raises ValueError for an invalid value, and for error_feedback=True with 16 bits.
    """

    bits: int = checked_field(4, BITS)
    block_size: int = checked_field(128, BLOCK_SIZE)
    error_feedback: bool | None = checked_field(None, FEEDBACK, called="use_error_feedback")
    uncompressed_dtype: torch.dtype | None = checked_field(None, SIXTEEN_BITS)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.bits == 16 and self.error_feedback:
            raise ValueError(
                "use_error_feedback is on, but bits is 16: 16 bits keep no errors. Make another state"
            )
        if self.error_feedback is None and self.bits != 16:  # 4 or 8 may follow 16
            object.__setattr__(self, "error_feedback", True)

    def layout(self, shapes: Sequence[Sequence[int]], world_size: int) -> BlockLayout:
        """Return the blocks of a bucket with tensors of these shapes. With 16 bits there are none."""
        if self.bits == 16:
            shapes = [(sum(map(math.prod, shapes)),)]
        return BlockLayout(shapes, self.block_size, world_size)

    def sum_options(self) -> dict[str, Any]:
        """Return the options of a bucket's form."""
        bits, exact = self.bits, self.uncompressed_dtype
        if bits == 16:  # no blocks, so no codes
            bits, exact = 8, exact or torch.bfloat16
        return {"uncompressed_dtype": exact, "bits": bits, "error_feedback": bool(self.error_feedback)}

    def form(self, bucket: BucketSpec) -> QuantizedAllReduce | ReduceScatter:
        """Return a bucket's all-reduce or reduce-scatter."""
        if bucket.is_shard:
            return ReduceScatter(self.layout, bucket, **self.sum_options())
        layout_for = partial(self.layout, bucket.shapes)
        return QuantizedAllReduce(layout_for, bucket.dtype, bucket, **self.sum_options())


class QuantizedCompressor(Compressor):
    """The quantized all-reduce, or reduce-scatter, of one bucket, with error feedback. The state's entry:

    "error": [numel], the values that the averages (sums) still lack from this rank: what rounding has taken
        from its gradients and, with two exchanges, from the sum of all ranks in the shard that it owns.
    """

    is_same_on_all_processors = True
    sums_shards = True

    def __init__(self, bucket: BucketSpec, options: QuantizedOptions):
        self._sum = options.form(bucket)
        if self._sum.error is not None and not bucket.is_shard:
            quantized = {part.position for part in self._sum.layout.quantized}
            self.sent_exactly = set(range(len(bucket.shapes))) - quantized
        self._numel = sum(bucket.numels)
        self._rest: Tensor | None = None  # loaded errors that this place doesn't keep, for the next step
        # On CUDA the side stream may read it until the step ends, so it is freed in the step after.
        self._sent: Tensor | None = None
        # The number of elements in an all-reduce that sends as many bytes.
        self.sent_numel = -(-self._sum.num_bytes // bucket.dtype.itemsize)

    @classmethod
    def check_entry(cls, entry: dict[str, Tensor], *, of_bucket: bool) -> None:
        require_names(entry, ("error",))

    @classmethod
    def warm_up(cls, bucket: BucketSpec, options: QuantizedOptions) -> None:
        compile_operations(options.form, bucket)

    @classmethod
    def collectives(cls, bucket: BucketSpec, options: QuantizedOptions) -> list[Collective]:
        layout_for = partial(options.layout, bucket.shapes)
        return collectives_of_all_reduce(layout_for, bucket.dtype, bucket, **options.sum_options())

    def reduce(
        self, flat: Tensor, out: Tensor, group: dist.ProcessGroup, seed: int, unused: Collection[int] = ()
    ) -> Works:
        """Average blocks quantized, everything else exactly. Zeros are sent for unused tensors."""
        self._sent, self._rest = self._rest, None
        if self._sent is not None and unused:
            # torch's DDP drops the average of a tensor that no rank has used, so its errors wait, too.
            self._rest = torch.zeros_like(self._sent)
            for part in [each.in_bucket for each in self._sum.layout.quantized if each.position in unused]:
                self._rest[part] = self._sent[part]
            self._sent = self._sent - self._rest
        yield from self._sum.reduce(flat, group, out=out, unused=unused, rest=self._sent)

    # --- errors ---

    def current_error(self) -> Tensor | None:
        if (error := self._sum.error) is None:
            return None
        flat = error.new_zeros(self._numel) if self._rest is None else self._rest.clone()
        for in_bucket, kept in self._sum.kept:
            flat[in_bucket] = error[kept] / self._sum.unit
        return flat

    def state(self) -> State:
        error = self.current_error()
        return {} if error is None else {"error": error}

    def load(self, state: State) -> None:
        """Continue from errors. Those that this place doesn't keep are added to the next step's gradients."""
        if (error := self._sum.error) is None or "error" not in state:
            return
        self._rest = rest = state["error"].to(error, copy=True)
        error.zero_()
        for in_bucket, kept in self._sum.kept:
            error[kept] = rest[in_bucket] * self._sum.unit
            rest[in_bucket] = 0.0
