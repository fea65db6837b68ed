"""One step: buckets are averaged as they become full, and written back to the gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from . import errors
from .communicator import BucketCommunicator, Pending
from .parameters import check_gradient, expected_gradient
from .sparse import average_rows
from .usage import Usage


class Step:
    """A step under way: which parameters are ready, and which buckets are being averaged.

    Constructing it begins the step, on all ranks together.

    Parameters are known by their indices. sparse: those with sparse gradients, which are in no bucket.
    unused: those that this rank does not use in the step: ready from the beginning, they keep the gradients
    they have.
    """

    def __init__(
        self, communicator: BucketCommunicator, usage: Usage, sparse: set[int], unused: Iterable[int] = ()
    ):
        self._communicator, self._usage, self._sparse = communicator, usage, sparse
        self._params, self._bucket_of = communicator.params, communicator.bucket_of
        self._ready: dict[int, None] = {}
        self._next_bucket = 0
        self._averages: dict[int, Pending] = {}  # by bucket
        self._gradients_before: dict[
            int, torch.Tensor
        ] = {}  # of unused parameters, where averages overwrite them
        communicator.begin()
        unused = sorted(unused)
        self._skippable = usage.begin(unused)
        for index in unused:
            gradient = self._params[index].grad
            if communicator.as_view and gradient is not None:
                self._gradients_before[index] = gradient.detach().clone()
            self.mark_ready(index)

    @property
    def order(self) -> list[int]:
        """The parameters that are ready, in the order in which they became so."""
        return list(self._ready)

    @property
    def is_over(self) -> bool:
        """Whether all parameters are ready."""
        return len(self._ready) == len(self._params)

    def missing(self) -> list[int]:
        """Return the parameters that are not ready."""
        return [index for index in range(len(self._params)) if index not in self._ready]

    def mark_ready(self, index: int) -> None:
        """Take a parameter's gradient as complete, and average the bucket that it fills.

        Raises RuntimeError for a parameter that is ready already, or whose gradient doesn't fit its bucket.
        """
        if index in self._ready:
            raise RuntimeError(errors.marked_twice(self._communicator.names[index]))
        self._ready[index] = None
        bucket = self._bucket_of.get(index)
        if bucket is None:
            param = self._params[index]
            expected = expected_gradient(param, is_sparse=True)
            check_gradient(param.grad, expected, self._communicator.names[index])
        else:
            bucket.num_pending -= 1
            if bucket.num_pending:
                return  # no bucket can start yet, nor is the step over
            self._start_full_buckets()
        if self.is_over:
            self._usage.exchange()

    def _start_full_buckets(self) -> None:
        """Start averaging full buckets in the order of their indices, which is the same on every rank."""
        buckets = self._communicator.buckets
        while self._next_bucket < len(buckets) and not buckets[self._next_bucket].num_pending:
            index = self._next_bucket
            if not self._skippable.issuperset(buckets[index].indices):
                self._averages[index] = self._communicator.start(index)
            self._next_bucket += 1

    def write_back(self, group: dist.ProcessGroup) -> None:
        """Wait for the averages, and make them the gradients of the parameters that a rank has used."""
        kept = self._usage.unused_by_all_ranks()
        for index, pending in self._averages.items():
            self._communicator.finish(index, pending, kept, self._gradients_before)
        for index in kept.intersection(self._gradients_before):
            self._params[index].grad.copy_(self._gradients_before[index])  # type: ignore[union-attr]
        for index in sorted(self._sparse - kept):
            self._params[index].grad = average_rows(self._params[index], group)
