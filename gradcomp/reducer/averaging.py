"""One step of the Reducer: buckets are filled, averaged through a hook or an all-reduce, and written back."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.comm.all_reduce import average_in_place
from gradcomp.comm.bucket import GradBucket, Hook, TakesBack, as_real, checked_future, name_of, result_of
from gradcomp.comm.exchange import has_delay
from gradcomp.comm.process_group import Operation

from . import errors
from .bucket import Bucket, assign_buckets
from .parameters import check_gradient, expected_gradient
from .usage import Usage


def average_rows(parameter: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the mean over the ranks of a parameter's sparse gradient, coalesced; None counts as zeros.

    Gathers the rows that have a gradient, and their indices, padded to the longest list. Only gloo can
    all-reduce sparse tensors. Moves W · (longest list) rows. The host waits for the number of rows.
    """
    rows, values = _rows(parameter)
    count = torch.tensor([len(rows)], device=parameter.device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    with Operation.of(f"average a sparse gradient of shape {list(parameter.shape)}", group):
        dist.all_gather(counts, count, group=group)
        lengths = [int(each) for each in counts]
        longest = max(lengths)
        all_rows = _gather(rows, longest, lengths, group)
        all_values = _gather(values, longest, lengths, group)
    values, shape = all_values / group.size(), parameter.shape
    mean = torch.sparse_coo_tensor(all_rows[None], values, shape, check_invariants=False)
    return mean.coalesce()


def _rows(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of the rows that have a gradient, and the rows."""
    gradient = parameter.grad
    if gradient is None:
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return rows, torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    gradient = gradient.detach().coalesce()
    return gradient.indices()[0], gradient.values()


def _gather(mine: torch.Tensor, longest: int, lengths: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    padded = mine.new_zeros(longest, *mine.shape[1:])
    padded[: len(mine)] = mine
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded, group=group)
    return torch.cat([each[:length] for each, length in zip(everyone, lengths, strict=True)])


Pending = torch.futures.Future[torch.Tensor] | dist.Work  # of a hook or exchanges; of an all-reduce


class BucketCommunicator:
    """Assigns parameters to buckets, and averages the buckets.

    Parameters are known by their indices.
    caps_bytes: the cap of the first bucket of a dtype and device, and the cap of the others.
    as_view: gradients are views of the buckets.
    divisor: without a hook, sums of gradients are divided by it; at first the group's size.
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
        """Leave these parameters' gradients in memory of their own, with as_view, too."""
        if indices != self._apart:
            self._apart = indices
            for bucket in self.buckets:
                bucket.keep_apart(indices)

    @torch.no_grad()
    def build(self, order: Iterable[int]) -> None:
        """Assign the parameters, in this order, to new buckets. Gradients that are views move there."""
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
        """Average with hook(state, bucket). A state with number_parameters gets the parameters' names.

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

        Raises RuntimeError for a gradient that doesn't fit the bucket, and if the averaging can't start.
        """
        bucket = self.buckets[index]
        is_last = index == len(self.buckets) - 1
        if self.hook is None:
            # The division comes first: the sum may overflow where the mean does not.
            bucket.fill(1 / self.divisor)
            if has_delay(bucket.buffer, self._group):
                filled: Any = GradBucket(index, bucket.buffer, bucket.parameters, is_last)
                return average_in_place(filled, self._group, self._averaging(index), divisor=1)
            # Not dist.all_reduce: its Python is cold after a large copy, and takes longer than all the rest.
            with self._averaging(index):
                return self._group.allreduce([bucket.buffer])
        bucket.fill(1.0)
        state, hook = self.hook
        with self._averaging(index):
            future = hook(state, GradBucket(index, bucket.buffer, bucket.parameters, is_last))
        return checked_future(future, hook)

    def finish(
        self, index: int, pending: Pending, kept: set[int], gradients_before: Mapping[int, torch.Tensor]
    ) -> None:
        """Wait for a bucket's average, and write it to the gradients of its parameters.

        kept: unused parameters. A state that TakesBack gets their averages.
        gradients_before: gradients of unused parameters that were in the bucket's own memory.

        Raises RuntimeError if the bucket could not be averaged.
        """
        bucket = self.buckets[index]
        with self._averaging(index):
            self._wait(bucket, pending)
        left_out = {position for position, member in enumerate(bucket.indices) if member in kept}
        state = self.hook[0] if self.hook else None
        if left_out and isinstance(state, TakesBack):
            for position in sorted(left_out):
                parameter = bucket.parameters[position]
                before = None if self.as_view else parameter.grad
                before = gradients_before.get(bucket.indices[position], before)
                state.take_back(parameter, bucket.average_beyond(position, before))
        bucket.write_back(left_out)

    def _averaging(self, index: int) -> Operation:
        return Operation.averaging(
            index, "an all-reduce" if self.hook is None else name_of(self.hook[1]), self._group
        )

    def _wait(self, bucket: Bucket, pending: Pending) -> None:
        """Wait for the average, and copy it into the bucket's buffer if the hook returned another tensor."""
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


class Step:
    """A step under way: which parameters are ready, and which buckets are being averaged.

    The constructor begins the step, on all ranks together.

    Parameters are known by their indices.
    sparse: parameters with sparse gradients, which are in no bucket.
    unused: parameters that this rank does not use in the step. They are ready from the beginning, and keep
        their gradients.
    """

    def __init__(
        self, communicator: BucketCommunicator, usage: Usage, sparse: set[int], unused: Iterable[int] = ()
    ):
        self._communicator, self._usage, self._sparse = communicator, usage, sparse
        self._params, self._bucket_of = communicator.params, communicator.bucket_of
        self._ready: dict[int, None] = {}
        self._next_bucket = 0
        self._averages: dict[int, Pending] = {}  # by bucket
        # Of unused parameters whose gradients are views, which the averages overwrite.
        self._gradients_before: dict[int, torch.Tensor] = {}
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
        """The parameters that are ready, in the order in which they became ready."""
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
                return  # no bucket can start yet, and the step isn't over
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
        """Wait for the averages, and make them the gradients of the parameters that any rank has used."""
        kept = self._usage.unused_by_all_ranks()
        for index, pending in self._averages.items():
            self._communicator.finish(index, pending, kept, self._gradients_before)
        for index in kept.intersection(self._gradients_before):
            self._params[index].grad.copy_(self._gradients_before[index])  # type: ignore[union-attr]
        for index in sorted(self._sparse - kept):
            self._params[index].grad = average_rows(self._params[index], group)
