"""How buckets are averaged: assigned, filled, sent through a hook or an all-reduce, written back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.compress.grad_bucket import GradBucket, as_real
from gradcomp.compress.hook import Hook, checked_future, name_of, result_of
from gradcomp.compress.operation import Operation

from .bucket import Bucket, assign_buckets

Pending = torch.futures.Future[torch.Tensor] | dist.Work  # what a hook returns; what an all-reduce returns


class BucketCommunicator:
    """Assigns parameters to buckets, and averages the buckets.

    Parameters are known by their indices. caps_bytes: the caps of the first bucket of a dtype and device, and
    of its others. as_view: gradients are views of the buckets. divisor: what a sum of the ranks' gradients is
    divided by where there is no hook; at first the group's size.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        group: dist.ProcessGroup,
        caps_bytes: tuple[float, float],
        as_view: bool,
    ):
        self.params, self.names = params, names
        self._group, self.caps_bytes, self.as_view = group, caps_bytes, as_view
        self.hook: tuple[Any, Hook] | None = None
        self.divisor = group.size()
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[int, Bucket] = {}
        self._apart: set[int] = set()

    def keep_apart(self, indices: set[int]) -> None:
        """Leave these parameters' gradients in memory of their own, whatever as_view says."""
        if indices != self._apart:
            self._apart = indices
            for bucket in self.buckets:
                bucket.keep_apart(indices)

    @torch.no_grad()
    def build(self, order: Iterable[int]) -> None:
        """Assign the parameters, in this order, to new buckets. Gradients that are views move along."""
        indices = list(order)
        params = [self.params[index] for index in indices]
        sizes = [param.numel() * param.element_size() for param in params]
        keys = [(param.dtype, param.device) for param in params]
        self.buckets = []
        for positions in assign_buckets(sizes, keys, self.caps_bytes):
            chosen = [indices[position] for position in positions]
            members = [self.params[index] for index in chosen]
            names = [self.names[index] for index in chosen]
            self.buckets.append(Bucket(chosen, members, names, self.as_view))
        for bucket in self.buckets:
            bucket.keep_apart(self._apart)
        self.bucket_of = {index: bucket for bucket in self.buckets for index in bucket.indices}
        if self.as_view:
            for bucket in self.buckets:
                bucket.fill(1.0)

    def register(self, state: Any, hook: Hook) -> None:
        """Average with hook(state, bucket). A state that has number_parameters gets the parameters' names.

        Raises TypeError if the hook isn't callable, RuntimeError for a second one.
        """
        require_callable(state, hook)
        if self.hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self.hook = (state, hook)
        number_parameters = getattr(state, "number_parameters", None)
        if number_parameters is not None:
            number_parameters(zip(self.names, self.params, strict=True))

    def begin(self) -> None:
        """Begin a step: no parameter is ready."""
        for bucket in self.buckets:
            bucket.begin()

    @torch.no_grad()
    def start(self, index: int) -> Pending:
        """Fill a bucket and start its averaging.

        Raises RuntimeError for a gradient that doesn't fit it, and if the averaging can't start.
        """
        bucket = self.buckets[index]
        if self.hook is None:
            # The division comes first: the sum may not fit the dtype where the mean does.
            bucket.fill(1 / self.divisor)
            # Not dist.all_reduce: after a large copy its Python, cold by then, takes longer than the rest of
            # this.
            with self._averaging(index):
                return self._group.allreduce([bucket.buffer])
        bucket.fill(1.0)
        state, hook = self.hook
        is_last = index == len(self.buckets) - 1
        with self._averaging(index):
            future = hook(state, GradBucket(index, bucket.buffer, bucket.parameters, is_last))
        return checked_future(future, hook)

    def finish(
        self, index: int, pending: Pending, kept: set[int], gradients_before: Mapping[int, torch.Tensor]
    ) -> None:
        """Wait for a bucket's average, and write it to the gradients of all its parameters but those kept.

        Where the hook's state has a method take_back(parameter, flat), it gets the averages of those kept,
        less what this rank had put into the bucket: gradients_before, where that was in the bucket's own
        memory. Raises RuntimeError if the bucket could not be averaged.
        """
        bucket = self.buckets[index]
        with self._averaging(index):
            self._wait(bucket, pending)
        left_out = {position for position, member in enumerate(bucket.indices) if member in kept}
        take_back = getattr(self.hook[0], "take_back", None) if self.hook else None
        if take_back is not None:
            for position in sorted(left_out):
                parameter = bucket.parameters[position]
                before = None if self.as_view else parameter.grad
                before = gradients_before.get(bucket.indices[position], before)
                take_back(parameter, bucket.average_beyond(position, before))
        bucket.write_back(left_out)

    def _averaging(self, index: int) -> Operation:
        return Operation.averaging(
            index, "an all-reduce" if self.hook is None else name_of(self.hook[1]), self._group
        )

    def _wait(self, bucket: Bucket, pending: Pending) -> None:
        """Wait for the average, and copy it into the bucket's buffer where it is elsewhere."""
        if self.hook is None:
            pending.wait()  # averaged in place
            return
        buffer = as_real(bucket.buffer)
        result = result_of(pending, self.hook[1], buffer)
        if result.data_ptr() != buffer.data_ptr():
            buffer.copy_(result)


def require_callable(state: Any, hook: Any) -> None:
    """Raise TypeError for a hook that can't be called."""
    if not callable(hook):
        swapped = "" if not callable(state) else " register_comm_hook takes (state, hook), got them swapped."
        raise TypeError(f"Communication hook must be callable.{swapped}")
