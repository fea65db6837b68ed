"""A plain all-reduce as a compressor, in the bucket's dtype or in 16 bits."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gradcomp import ops

from ..comm.exchange import Works, all_reduce, reduce_hierarchically
from ..rules import SIXTEEN_BITS, check_fields, checked_field
from .compressor import BucketSpec, Collective, Compressor, State


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

    It makes no errors to keep.
    """

    is_same_on_all_processors = True

    def __init__(self, bucket: BucketSpec, options: AllReducedOptions):
        self._bucket, self._scale = bucket, 1 / bucket.world_size
        self._dtype = options.wire_dtype if options.wire_dtype != bucket.dtype else None
        self.sent_exactly = range(len(bucket.shapes))
        self.is_plain = self._dtype is None and bucket.ranks_per_node == 1
        # Kept from step to step: a CPU's new memory takes longer to write for the first time.
        self._wire: Tensor | None = None
        num_bytes = sum(bucket.numels) * (self._dtype or bucket.dtype).itemsize
        self.sent_numel = -(-num_bytes // bucket.dtype.itemsize)

    @classmethod
    def collectives(cls, bucket: BucketSpec, options: AllReducedOptions) -> list[Collective]:
        numel = sum(bucket.numels)
        wire_dtype = options.wire_dtype or bucket.dtype
        return bucket.summing(numel * wire_dtype.itemsize, numel * bucket.dtype.itemsize)

    def reduce(
        self, flat: Tensor, out: Tensor, group: dist.ProcessGroup, seed: int, unused: Collection[int] = ()
    ) -> Works:
        """Replace the bucket by its mean over the ranks, in stages."""
        per_node = self._bucket.ranks_per_node
        if per_node == 1:
            return self._sum(flat, group, self._scale)
        return reduce_hierarchically(flat, group, per_node, partial(self._sum, scale=1.0), self._scale)

    def _sum(self, flat: Tensor, group: dist.ProcessGroup, scale: float) -> Works:
        """Sum scale · flat over a group, in place."""
        wire = flat
        if self._dtype is None:
            if scale != 1.0:
                flat.mul_(scale)
        else:
            if self._wire is None:
                self._wire = flat.new_empty(flat.numel(), dtype=self._dtype)
            wire = ops.cast(flat, out=self._wire, scale=scale, overwrite=True)
        yield from all_reduce(wire, group, has_delay=self._bucket.has_delay, out=flat)

    def state(self) -> State:
        return {}

    def load(self, state: State) -> None:
        """Do nothing: the state adds what other compressors have left."""
