"""A plain all-reduce as a compressor, in the bucket's dtype or in 16 bits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradcomp import ops

from ..comm.exchange import Works, all_reduce, reduce_by_nodes
from ..comm.nodes import nodes_of
from ..comm.pipeline import Stages, run_through
from ..rules import SIXTEEN_BITS, check_fields, checked_field
from .compressor import BucketSpec, Compressor, State
from .pending_errors import PendingErrors


@dataclass(frozen=True)
class AllReducedOptions:
    """The options of an all-reduce.

    wire_dtype: torch.bfloat16 or torch.float16; None for the bucket's dtype.

    Raises ValueError for another dtype.
    """

    wire_dtype: torch.dtype | None = checked_field(None, SIXTEEN_BITS)

    def __post_init__(self) -> None:
        check_fields(self)


class AllReducedCompressor(Compressor):
    """Sends a bucket as it is, or rounded to 16 bits: for states that compress in some steps only.

    It makes no errors to keep. The errors that another compressor has left are added to the first gradients.
    """

    is_same_on_all_processors = True

    def __init__(self, bucket: BucketSpec, options: AllReducedOptions):
        self._dtype = options.wire_dtype if options.wire_dtype != bucket.dtype else None
        self._scale = 1 / bucket.world_size
        self._ranks_per_node = bucket.ranks_per_node
        self._pending = PendingErrors(bucket.shapes, range(len(bucket.shapes)))
        self._unused: Sequence[int] = ()
        self._has_loaded = False
        # Kept from step to step: a CPU's new memory takes longer to write for the first time.
        self._wire: torch.Tensor | None = None
        self._spec = bucket
        self.sent_numel = -(
            -sum(bucket.numels) * (self._dtype or bucket.dtype).itemsize // bucket.dtype.itemsize
        )

    @property
    def is_plain(self) -> bool:
        """True if nothing but the gradients is sent, in their own dtype."""
        return self._dtype is None and self._ranks_per_node == 1 and self._pending.are_none

    def leave_out(self, unused: Sequence[int]) -> None:
        """Keep these tensors' errors."""
        self._unused = unused

    def average(self, flat: torch.Tensor, group: dist.ProcessGroup, seed: int) -> None:
        """Replace the bucket by its mean over the ranks."""
        run_through(self.stages(flat, group, seed))

    def stages(self, flat: torch.Tensor, group: dist.ProcessGroup, seed: int) -> Works:
        """Average in stages. Yields each collective in progress."""
        self._pending.add_to(flat, self._unused)
        if self._ranks_per_node == 1:
            yield from self._sum(flat, group, self._scale)
            return
        nodes = nodes_of(group, self._ranks_per_node)

        def between(part: torch.Tensor) -> Stages:
            yield from self._sum(part, nodes.between, 1.0)
            return part

        yield from reduce_by_nodes(flat, nodes, between, self._scale)

    def _sum(self, flat: torch.Tensor, group: dist.ProcessGroup, scale: float) -> Works:
        """Sum scale · flat over a group, in place."""
        wire = flat
        if self._dtype is None:
            if scale != 1.0:
                flat.mul_(scale)
        else:
            if self._wire is None:
                self._wire = flat.new_empty(flat.numel(), dtype=self._dtype)
            wire = ops.compress_cast(flat, out=self._wire, scale=scale, overwrite=True)
        yield from all_reduce(wire, group, has_delay=self._spec.has_delay, out=flat)

    def state(self) -> State:
        # On every rank or on none, whichever ranks have sent their errors.
        if not self._has_loaded:
            return {}
        wide = torch.promote_types(self._spec.dtype, torch.float32)
        error = torch.zeros(sum(self._spec.numels), dtype=wide, device=self._spec.device)
        self._pending.write_to(error)
        return {"error": error}

    def load(self, state: State) -> None:
        if "error" in state:
            self._has_loaded = True
            self._pending.load(state["error"])

    def current_error(self) -> None:
        """Return None: no errors are made."""

    def add_to_error(self, offset: int, values: torch.Tensor) -> None:
        self._pending.take_back(offset, values)
