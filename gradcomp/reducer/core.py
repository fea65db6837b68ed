"""The Reducer: averages a module's gradients over a process group while backward is still running.

What happens in a step, with three buckets:

    backward    ──grad 7──grad 6──┬─grad 5──grad 4──┬─grad 3── … ──grad 0──┬──────────── callback ──▶ backward returns
    bucket 0                      └ fill ─ average ─────▶                  │             wait, write back
    bucket 1                                        └ fill ─ average ──────┼───▶
    bucket 2                                                               └ fill ─ average ─▶

Buckets are averaged strictly in the order of their index, whichever is full first: all ranks issue the same
collectives in the same order.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from . import errors
from .agreement import agree_on_order, verify_parameters
from .bucket import Bucket, GradBucket, assign_buckets
from .exchange import checked_future, group_or_default, result_of
from .graph import reached, tensors_in
from .sparse import average_rows

MIB = 1 << 20
Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


@dataclass
class Step:
    """What a backward pass has done so far."""

    pending: list[int]  # of every bucket, parameters that are not ready
    ready: dict[int, None] = field(default_factory=dict)  # parameters, in the order in which they became so
    hits: Counter[int] = field(default_factory=Counter)  # with static_graph
    used: set[int] = field(default_factory=set)  # where that matters
    callbacks: set[int] = field(default_factory=set)  # the graph tasks at whose end _finish is called
    next_bucket: int = 0
    futures: dict[int, torch.futures.Future[torch.Tensor]] = field(default_factory=dict)
    used_map: tuple[torch.Tensor, dist.Work] | None = None


class Reducer:
    """Averages gradients over a process group: construct it, call ``loss.backward()``, and ``.grad`` is the mean.

    params: parameters, or (name, parameter) pairs as from ``named_parameters()``, whose names errors then tell;
        the same on every rank. Those that don't require gradients are left out.
    process_group: None for the default one.
    bucket_cap_mb, first_bucket_cap_mb: MiB of a bucket, and of the first one of a dtype and device.
    gradient_as_bucket_view: gradients are views of the buckets, which saves their memory once. Keep them: with
        ``zero_grad(set_to_none=True)`` autograd makes new ones, which are gathered into the buckets first.
    find_unused_parameters: outputs may leave parameters out; call prepare_for_backward(outputs) in every step.
        A parameter that no rank used keeps its .grad as it was.
    static_graph: the same parameters are used in every step, any number of times each; learnt in the first one.
    skip_all_reduce_unused_params: leave out buckets of which no parameter is used, on all ranks alike.
    sparse_params: those with sparse gradients (``nn.Embedding(sparse=True)``); averaged apart, without the hook.
    verify: compare the parameters across ranks; without it, construction communicates nothing.

    Raises RuntimeError on every rank if the ranks have different parameters; ValueError without any that
    requires gradients.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        process_group: dist.ProcessGroup | None = None,
        *,
        bucket_cap_mb: float = 25,
        first_bucket_cap_mb: float = 1,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        skip_all_reduce_unused_params: bool = False,
        sparse_params: Iterable[torch.Tensor] = (),
        verify: bool = True,
    ):
        self._names, self._params = _named(params)
        self.process_group = group_or_default(process_group)
        self._caps = (first_bucket_cap_mb * MIB, bucket_cap_mb * MIB)
        self._as_view, self._find_unused = gradient_as_bucket_view, find_unused_parameters
        self._static, self._skip_unused = static_graph, skip_all_reduce_unused_params
        self._notes_use = find_unused_parameters or static_graph or skip_all_reduce_unused_params
        sparse = {id(param) for param in sparse_params}
        self._sparse = [number for number, param in enumerate(self._params) if id(param) in sparse]
        if verify:
            verify_parameters(self._params, self._names, self.process_group)
        self._lock = threading.RLock()
        self._hook: tuple[Any, Hook] | None = None
        self._syncing = True
        # For DistributedDataParallel, whose forward decides: only a prepared backward is averaged, and it may come in
        # several calls.
        self._only_prepared, self._is_prepared = False, False
        self._divisor = self.process_group.size()
        self._after_step: Callable[[], None] | None = None
        self._step: Step | None = None
        self._prepared: set[int] | None = None  # the parameters that the prepared backward won't reach
        self._static_hits: Counter[int] | None = None
        self._rebuilt = find_unused_parameters and not static_graph
        self._build(range(len(self._params) - 1, -1, -1))
        self._nodes = [torch.autograd.graph.get_gradient_edge(param).node for param in self._params]
        me = weakref.ref(self)
        self._handles = [
            node.register_hook(_when_ready(me, number)) for number, node in enumerate(self._nodes)
        ]

    # --- set up ---

    def _build(self, order: Iterable[int]) -> None:
        dense = [number for number in order if number not in set(self._sparse)]
        params = [self._params[number] for number in dense]
        sizes = [param.numel() * param.element_size() for param in params]
        kinds = [(param.dtype, param.device) for param in params]
        self._buckets = []
        for places in assign_buckets(sizes, kinds, self._caps):
            numbers = [dense[place] for place in places]
            self._buckets.append(Bucket(numbers, [self._params[number] for number in numbers]))
        self._bucket_of = {n: i for i, bucket in enumerate(self._buckets) for n in bucket.numbers}

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Average buckets with hook(state, bucket): any of ours or torch's. Once, before the first backward.

        Raises TypeError if the hook can't be called, RuntimeError for a second one.
        """
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        if self._hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._hook = (state, hook)

    def close(self) -> None:
        """Detach from the parameters: backward goes on without averaging."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the next one outside averages what has accumulated."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    # --- a step ---

    def prepare_for_backward(self, outputs: Any) -> None:
        """Say what the next backward starts from; with find_unused_parameters, in every step.

        outputs: tensors in any nesting of tuples, lists, dicts and dataclasses. Raises RuntimeError if the last
        backward did not reach all parameters.
        """
        if self._step is not None:
            self._raise_unfinished()
        if not self._syncing:
            return
        self._is_prepared = True
        if self._static and self._static_hits is None:
            # The outermost backward starts here, whatever backwards are called within it.
            for tensor in tensors_in(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._when_backward_starts)
        elif self._find_unused and not self._static:
            numbers = {node: number for number, node in enumerate(self._nodes)}
            self._prepared = set(range(len(self._params))) - reached(outputs, numbers)

    def _when_backward_starts(self, _: torch.Tensor) -> None:
        with self._lock:
            if self._syncing:
                self._call_at_end(self._step or self._begin())

    def _on_ready(self, number: int) -> None:
        with self._lock:
            if not self._syncing or (self._only_prepared and not self._is_prepared):
                return
            step = self._step or self._begin()
            self._call_at_end(step)
            if self._notes_use and self._params[number].grad is not None:
                step.used.add(number)
            if self._static:
                step.hits[number] += 1
                if self._static_hits is None or step.hits[number] < self._static_hits[number]:
                    return  # the first step is averaged when it is over
                if step.hits[number] > self._static_hits[number]:
                    self._fail(errors.graph_changed(self._names[number], self._static_hits[number]))
            self._mark_ready(number)

    def _begin(self) -> Step:
        if self._find_unused and self._prepared is None and not self._static:
            self._fail(errors.NOT_PREPARED)
        self._step = step = Step([len(bucket.numbers) for bucket in self._buckets])
        if self._static_hits is not None:
            unused = [n for n in range(len(self._params)) if not self._static_hits[n]]
        else:
            unused = sorted(self._prepared or ())
        self._prepared = None
        for number in unused:
            self._mark_ready(number)
        return step

    def _call_at_end(self, step: Step) -> None:
        """Of the running backward; a backward within it (reentrant checkpointing) ends by itself."""
        task = torch._C._current_graph_task_id()
        if task not in step.callbacks:
            step.callbacks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _mark_ready(self, number: int) -> None:
        step = self._step
        assert step is not None
        if number in step.ready:
            self._fail(errors.marked_twice(self._names[number]))
        step.ready[number] = None
        index = self._bucket_of.get(number)
        if index is None:
            self._check_gradients([number])
        else:
            step.pending[index] -= 1
            if step.pending[index]:
                return  # no bucket can start yet, nor is the step over
            while step.next_bucket < len(self._buckets) and not step.pending[step.next_bucket]:
                self._average(step.next_bucket)
                step.next_bucket += 1
        if (self._find_unused or self._static) and len(step.ready) == len(self._params):
            step.used_map = self._start_used_map(step)

    def _average(self, index: int) -> None:
        step, bucket = self._step, self._buckets[index]
        assert step is not None
        if self._skip_unused and not step.used.intersection(bucket.numbers):
            return
        self._check_gradients(bucket.numbers)
        try:
            with torch.no_grad():
                step.futures[index] = self._start(index, bucket)
        except BaseException:
            self._step = None
            raise

    def _start(self, index: int, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        if self._hook is None:
            # The division comes first: the sum may not fit the dtype where the mean does.
            self._fill(bucket, 1 / self._divisor)
            work: Any = dist.all_reduce(bucket.buffer, group=self.process_group, async_op=True)
            future: torch.futures.Future[torch.Tensor] = work.get_future()
            return future
        self._fill(bucket, 1.0)
        state, hook = self._hook
        is_last = index == len(self._buckets) - 1
        return checked_future(hook(state, GradBucket(index, bucket.buffer, bucket.parameters, is_last)), hook)

    def _fill(self, bucket: Bucket, scale: float) -> None:
        bucket.fill(scale)
        if self._as_view:
            # At once: the memory of gradients that autograd has made anew is free before the next bucket's are.
            bucket.alias(i for i, param in enumerate(bucket.parameters) if param.grad is not None)

    # --- the end of a step ---

    @torch.no_grad()
    def _finish(self) -> None:
        """At the end of a backward: if it is the step's, wait, write the averages to the gradients, and reset."""
        with self._lock:
            step = self._step
            if step is None:
                return  # it is over, or an error has surfaced already
            is_within_another = torch._C._current_autograd_node() is not None
            if self._static and self._static_hits is None and not is_within_another:
                self._static_hits = step.hits
                unused = [number for number in range(len(self._params)) if number not in step.hits]
                for number in [*step.hits, *unused]:
                    self._mark_ready(number)
            if len(step.ready) == len(self._params):
                self._complete(step)
            elif not is_within_another and not self._only_prepared:
                self._raise_unfinished()

    def _complete(self, step: Step) -> None:
        try:
            self._write_back(step)
        finally:
            self._step, self._is_prepared = None, False
        if not self._rebuilt:
            self._rebuild(list(step.ready))
        if self._after_step is not None:
            self._after_step()

    @torch.no_grad()
    def take_part(self) -> None:
        """Take part in a step of the other ranks with gradients of zero: for a rank that has no more input.

        This rank's gradients are what they were afterwards.
        """
        with self._lock:
            kept = [param.grad for param in self._params]
            for param in self._params:
                param.grad = None
            self._step = step = Step([len(bucket.numbers) for bucket in self._buckets])
            if self._static and self._static_hits is None:
                self._static_hits = Counter()
            for number in range(len(self._params)):
                self._mark_ready(number)
            self._complete(step)
            for param, gradient in zip(self._params, kept, strict=True):
                param.grad = gradient

    def _write_back(self, step: Step) -> None:
        kept = self._globally_unused(step)
        for index, future in step.futures.items():
            bucket = self._buckets[index]
            try:
                self._take(bucket, future)
            except RuntimeError as error:
                raise RuntimeError(errors.not_averaged(index, self.process_group.rank(), error)) from error
            chosen: Iterable[int] = range(len(bucket.numbers))
            if kept:
                chosen = [i for i in chosen if bucket.numbers[i] not in kept]
            if self._as_view:
                bucket.alias(chosen)
            else:
                bucket.give(chosen)
        for number in self._sparse:
            if number not in kept:
                self._params[number].grad = average_rows(self._params[number], self.process_group)

    def _take(self, bucket: Bucket, future: torch.futures.Future[torch.Tensor]) -> None:
        """Bring a hook's result into the buffer."""
        if self._hook is None:
            future.wait()  # averaged in place
            return
        result = result_of(future, self._hook[1], bucket.buffer)
        if result.data_ptr() != bucket.buffer.data_ptr():
            bucket.buffer.copy_(result)

    def _start_used_map(self, step: Step) -> tuple[torch.Tensor, dist.Work]:
        """All-reduce, asynchronously, how many ranks have used each parameter in this step."""
        device = self._params[0].device
        mine = torch.zeros(len(self._params), dtype=torch.int32)
        mine[sorted(step.used)] = 1
        if device.type == "cuda":
            mine = mine.pin_memory()
        used = mine.to(device, non_blocking=True)
        return used, dist.all_reduce(used, group=self.process_group, async_op=True)

    def _globally_unused(self, step: Step) -> set[int]:
        """The parameters that no rank used in this step."""
        if step.used_map is None:
            return set()
        used, work = step.used_map
        work.wait()
        if len(step.used) == len(self._params):
            return set()
        # Asks the device, and only on a rank that left parameters out: which gradients to leave alone is known nowhere else.
        return {number for number, count in enumerate(used.tolist()) if not count}

    def _rebuild(self, order: list[int]) -> None:
        """Once: buckets in the order in which gradients became ready, rank 0's."""
        self._rebuilt = True
        self._build(agree_on_order(order, self._params[0].device, self.process_group))
        if self._as_view:
            for bucket in self._buckets:
                self._fill(bucket, 1.0)

    # --- what can be wrong ---

    def _check_gradients(self, numbers: Iterable[int]) -> None:
        """Of parameters that share a bucket, or of one with sparse gradients."""
        for number in numbers:
            wrong = errors.wrong_gradient(
                self._params[number], self._names[number], number not in self._bucket_of
            )
            if wrong:
                self._fail(wrong)

    def _fail(self, message: str) -> NoReturn:
        """End the step; the next one starts afresh."""
        self._step, self._is_prepared = None, False
        raise RuntimeError(message)

    def _raise_unfinished(self) -> NoReturn:
        assert self._step is not None
        missing = [number for number in range(len(self._params)) if number not in self._step.ready]
        if self._static_hits is not None:
            self._fail(errors.graph_changed(self._names[missing[0]], self._static_hits[missing[0]]))
        self._fail(errors.unfinished(self._names, missing, self.process_group.rank()))


def _when_ready(reducer: weakref.ref[Reducer], number: int) -> Callable[..., None]:
    # The node must not keep the reducer alive: Python's garbage collector can't see through it.
    def hook(*_: Any) -> None:
        living = reducer()
        if living is not None:
            living._on_ready(number)

    return hook


def _named(
    params: Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
) -> tuple[list[str], list[torch.Tensor]]:
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    for number, item in enumerate(params):
        name, param = item if isinstance(item, tuple) else (f"number {number}", item)
        if not isinstance(param, torch.Tensor):
            raise TypeError(
                f"Reducer takes parameters, or (name, parameter) pairs, got {type(param).__name__}"
            )
        if param.requires_grad and not any(param is other for other in tensors):
            names.append(name)
            tensors.append(param)
    if not tensors:
        raise ValueError("Reducer got no parameter that requires gradients")
    return names, tensors
