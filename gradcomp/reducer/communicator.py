"""How a reducer's buckets are averaged: assigned, gathered, sent through a communication hook, given back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.compress.grad_bucket import GradBucket, as_real
from gradcomp.compress.hook import Hook, checked_future, result_of

from . import errors
from .bucket import Bucket, assign_buckets

Pending = torch.futures.Future[torch.Tensor] | dist.Work  # of a hook; of an all-reduce


class BucketCommunicator:
    """The buckets of some parameters, and the averaging of each.

    caps_bytes: of the first bucket of a dtype and device, and of its others. as_view: gradients are views of the
    buckets. divisor: what a sum of the ranks' gradients is divided by without a hook, from the beginning the group's
    size.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        group: dist.ProcessGroup,
        caps_bytes: tuple[float, float],
        as_view: bool,
    ):
        self._params, self._names = params, names
        self._group, self._caps, self._as_view = group, caps_bytes, as_view
        self.hook: tuple[Any, Hook] | None = None
        self.divisor = group.size()
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[int, Bucket] = {}

    @torch.no_grad()
    def build(self, order: Iterable[int]) -> None:
        """Assign the parameters to new buckets in this order of their numbers. Gradients that are views move along."""
        numbers = list(order)
        params = [self._params[number] for number in numbers]
        sizes = [param.numel() * param.element_size() for param in params]
        kinds = [(param.dtype, param.device) for param in params]
        self.buckets = []
        for places in assign_buckets(sizes, kinds, self._caps):
            chosen = [numbers[place] for place in places]
            members = [self._params[number] for number in chosen]
            names = [self._names[number] for number in chosen]
            self.buckets.append(Bucket(chosen, members, names, self._as_view))
        self.bucket_of = {number: bucket for bucket in self.buckets for number in bucket.numbers}
        if self._as_view:
            for bucket in self.buckets:
                bucket.fill(1.0)

    def register(self, state: Any, hook: Hook) -> None:
        require_callable(state, hook)
        if self.hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self.hook = (state, hook)

    def begin(self) -> None:
        """Begin a step: no parameter is ready."""
        for bucket in self.buckets:
            bucket.begin()

    @torch.no_grad()
    def start(self, index: int) -> Pending:
        """Fill a bucket and start its averaging. Raises RuntimeError for a gradient that doesn't fit it."""
        bucket = self.buckets[index]
        if self.hook is None:
            # The division comes first: the sum may not fit the dtype where the mean does.
            bucket.fill(1 / self.divisor)
            # Not dist.all_reduce: after a large copy its Python, cold by then, takes longer than the rest of this.
            return self._group.allreduce([bucket.buffer])
        bucket.fill(1.0)
        state, hook = self.hook
        is_last = index == len(self.buckets) - 1
        return checked_future(hook(state, GradBucket(index, bucket.buffer, bucket.parameters, is_last)), hook)

    def finish(
        self, index: int, pending: Pending, kept: set[int], gradients_before: Mapping[int, torch.Tensor]
    ) -> None:
        """Wait for a bucket's average and make it the gradients of its parameters, but for those kept.

        The averages of those kept go back to the hook's state if it has a method take_back(parameter, flat), less what
        this rank had put into the bucket: gradients_before, where that was in the bucket's own memory.
        Raises RuntimeError if it could not be averaged.
        """
        bucket = self.buckets[index]
        try:
            self._take(bucket, pending)
        except RuntimeError as error:
            raise RuntimeError(errors.not_averaged(index, self._group.rank(), error)) from error
        take_back = getattr(self.hook[0], "take_back", None) if self.hook else None
        for place, number in enumerate(bucket.numbers):
            if take_back is not None and number in kept:
                parameter = bucket.parameters[place]
                before = gradients_before.get(number, None if self._as_view else parameter.grad)
                take_back(parameter, bucket.average_beyond(place, before))
        bucket.give(place for place, number in enumerate(bucket.numbers) if number not in kept)

    def _take(self, bucket: Bucket, pending: Pending) -> None:
        """Bring the average into the buffer."""
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
