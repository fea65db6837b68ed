"""Quantized all-reduce as a compressor: codes and scales in one exchange or in two, instead of an all-reduce.

In two:

    rank r    bucket + error ──quantize──▶ shard 0 │ shard 1 │ … │ shard W−1
    all-to-all: every rank gets its own shard from all ranks
    owner     its own values, exact, + Σ dequantized ──quantize──▶ the shard's mean
    all-gather: every rank gets the means of all shards, and dequantizes the same bytes

Rank r owns shard r. A rank sends and receives about two buckets of codes, whatever the number of ranks. If
several ranks share a network card, NodesAllReduce sends these through the card once.

In one, between two ranks or where a round trip takes longer than the bytes:

    rank r    bucket + error ──quantize──▶ the whole bucket
    all-gather: every rank gets the codes of all ranks, its own too, and sums what it dequantizes
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.layout.blocks import BlockLayout

from ..comm.exchange import Works
from ..comm.pipeline import run_through
from ..rules import BITS, BLOCK_SIZE, FEEDBACK, SIXTEEN_BITS, check_fields, checked_field
from .checkpoint import require_names
from .compressor import BucketSpec, Compressor, State
from .pending_errors import PendingErrors
from .quantized_all_reduce import all_reduce_for, compile_all_reduce
from .reduce_scatter import QuantizedReduceScatter


@dataclass(frozen=True)
class QuantizedOptions:
    """The options of a quantized all-reduce.

    bits: 4, 8 or 16 bits for each element. With 16, every element is sent in a 16-bit dtype, without scales.
    block_size: elements that share one scale; even, at most 4096. Unused with 16 bits.
    error_feedback: add a step's rounding errors to the next step's gradients. None: True with 4 and 8 bits,
        False with 16, which keep no errors.
    uncompressed_dtype: the dtype in which vectors and small tensors are sent, with 16 bits all tensors:
        torch.bfloat16 or torch.float16. None: the bucket's dtype; with 16 bits torch.bfloat16.
    within_dtype: by nodes, the dtype in which the ranks of a node exchange gradients to sum them:
        torch.bfloat16 or torch.float16. Error feedback doesn't include that rounding. None: exactly.

    Raises ValueError for an invalid value, and for error_feedback=True with 16 bits.
    """

    bits: int = checked_field(4, BITS)
    block_size: int = checked_field(128, BLOCK_SIZE)
    error_feedback: bool | None = checked_field(None, FEEDBACK)
    uncompressed_dtype: torch.dtype | None = checked_field(None, SIXTEEN_BITS)
    within_dtype: torch.dtype | None = checked_field(None, SIXTEEN_BITS, is_optional=True)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.bits == 16 and self.error_feedback:
            raise ValueError(
                "error_feedback is True, but bits is 16: values that are rounded to 16 bits keep no errors"
            )
        if self.error_feedback is None:
            object.__setattr__(self, "error_feedback", self.bits != 16)

    def layout(self, shapes: Sequence[Sequence[int]], world_size: int) -> BlockLayout:
        """Return the blocks of a bucket with tensors of these shapes. With 16 bits there are none."""
        if self.bits == 16:
            shapes = [(sum(map(math.prod, shapes)),)]
        return BlockLayout(shapes, self.block_size, world_size)

    def plan_options(self) -> dict[str, Any]:
        """Return the options of ops.quantized_plan."""
        if self.bits == 16:  # no blocks, so no codes
            return {
                "bits": 8,
                "error_feedback": False,
                "exact_dtype": self.uncompressed_dtype or torch.bfloat16,
            }
        return {
            "bits": self.bits,
            "error_feedback": self.error_feedback,
            "exact_dtype": self.uncompressed_dtype,
        }

    def all_reduce_options(self) -> dict[str, Any]:
        """Return the options of all_reduce_for."""
        return {**self.plan_options(), "within_dtype": self.within_dtype}


class QuantizedCompressor(Compressor):
    """The quantized all-reduce of one bucket, with error feedback. The state's entry:

    "error": [numel], the values that the averages still lack from this rank: what rounding has lost of its
        gradients, and with two exchanges, in this rank's own shard, what it has lost of the mean, times the
        number of ranks.

    If another compressor has left errors of exact tensors, they are sent.
    """

    is_same_on_all_processors = True
    of_shards = QuantizedReduceScatter

    def __init__(self, bucket: BucketSpec, options: QuantizedOptions):
        layout_for = partial(options.layout, bucket.shapes)
        self._all_reduce = all_reduce_for(layout_for, bucket.dtype, bucket, **options.all_reduce_options())
        self._plan, self._layout = self._all_reduce.plan, self._all_reduce.layout
        self._ranks_per_node, self._unit = bucket.ranks_per_node, self._all_reduce.unit
        quantized = {part.position for part in self._layout.quantized}
        self._pending = PendingErrors(bucket.shapes, set(range(len(bucket.shapes))) - quantized)
        self._unused: Sequence[int] = ()
        # The blocks that the plan has errors of, known from the first step on.
        self._kept: slice | None = None
        self._loaded: torch.Tensor | None = None  # the bucket's errors, until the next step
        # On CUDA the side stream may read it until the step ends, so it is freed in the step after.
        self._just_loaded: torch.Tensor | None = None
        # The number of elements in an all-reduce that sends as many bytes.
        self.sent_numel = -(-self._all_reduce.num_bytes // bucket.dtype.itemsize)

    @classmethod
    def check_entry(cls, entry: dict[str, torch.Tensor], *, of_bucket: bool) -> None:
        require_names(entry, ("error",))

    @classmethod
    def claims(cls, options: QuantizedOptions) -> dict[str, Any]:
        # A rank doesn't round its own shard, which 8 bits' tolerance allows for.
        return {"checkpoint": "safe"} if options.bits > 4 else {"checkpoint": "safe", "rank_symmetric": False}

    @classmethod
    def warm_up(cls, bucket: BucketSpec, options: QuantizedOptions) -> None:
        """Compile the kernels that the bucket's steps will launch."""
        layout_for = partial(options.layout, bucket.shapes)
        compile_all_reduce(layout_for, bucket.dtype, bucket, **options.all_reduce_options())

    def leave_out(self, unused: Sequence[int]) -> None:
        """Send zeros for these tensors, and keep their errors."""
        self._unused = unused

    def average(self, flat: torch.Tensor, group: dist.ProcessGroup, seed: int) -> None:
        """Replace the bucket by its mean over the ranks: blocks quantized, everything else exact."""
        run_through(self.stages(flat, group, seed))

    def stages(self, flat: torch.Tensor, group: dist.ProcessGroup, seed: int) -> Works:
        """Average in stages. Yields each collective in progress."""
        self._pending.add_to(flat, self._unused)
        unused = [part for part in self._layout.quantized if part.position in self._unused]
        rest = self._take_place(self._all_reduce.kept(group))
        yield from self._all_reduce.average(flat, group, unused, rest)

    # --- errors ---

    def add_to_error(self, offset: int, values: torch.Tensor) -> None:
        error = self._plan.error
        if error is None:
            return
        self._pending.take_back(offset, values)
        if self._kept is None and self._loaded is None:
            self._loaded = self._error(error)
        for part in self._layout.quantized:
            if not part.in_bucket.start <= offset < part.in_bucket.stop:
                continue
            if self._loaded is not None:
                self._loaded[offset : offset + len(values)] += values
                continue
            assert self._kept is not None
            first = part.stored.start + offset - part.in_bucket.start - self._kept.start
            start, stop = max(first, 0), min(first + len(values), len(error))
            if start < stop:
                # By nodes, one of a node's ranks_per_node ranks has the element's error for all of them.
                factor = self._unit * self._ranks_per_node
                error[start:stop] += values[start - first : stop - first] * factor

    def current_error(self) -> torch.Tensor | None:
        error = self._plan.error
        if self._loaded is not None or error is None:
            return self._loaded
        return self._error(error)

    def state(self) -> State:
        error = self.current_error()
        return {} if error is None else {"error": error.clone()}

    def load(self, state: State) -> None:
        if self._plan.error is not None and "error" in state:
            self._loaded = state["error"].clone()
            self._pending.load(state["error"])

    def _error(self, error: torch.Tensor) -> torch.Tensor:
        """Return this rank's error in the bucket's order. error: the plan's."""
        blocks = self._no_errors(error)
        if self._kept is not None:
            blocks[self._kept] = error / self._unit
        flat = error.new_zeros(self._layout.numel)
        for run in self._layout.runs:
            flat[run.in_bucket] = blocks[run.stored]
        self._pending.write_to(flat)
        return flat

    def _take_place(self, kept: slice) -> torch.Tensor | None:
        """Take this rank's place in the layout, and continue from the loaded errors.

        kept: the blocks whose errors this rank keeps.

        Returns the loaded errors of other blocks, to be added to the gradients; None if nothing was loaded.
        """
        error = self._plan.error
        if self._kept not in (None, kept) and self._loaded is None and error is not None:
            self._loaded = self._error(error)  # the nodes have changed
        self._kept = kept
        loaded = self._just_loaded = self._loaded
        self._loaded = None
        if loaded is None or error is None:
            return None
        rest = self._no_errors(error)
        for run in self._layout.runs:
            rest[run.stored] = loaded[run.in_bucket]
        error.copy_(rest[kept] * self._unit)
        rest[kept] = 0.0
        return rest

    def _no_errors(self, like: torch.Tensor) -> torch.Tensor:
        """Return zeros in the order of the padded blocks."""
        return like.new_zeros(self._layout.world_size * self._layout.shard_numel)
