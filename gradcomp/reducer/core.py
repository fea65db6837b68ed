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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.compress.hook import Hook
from gradcomp.compress.process_group import resolve_group

from . import errors
from .agreement import Agreement, agree_on_order
from .autograd_hooks import (
    AccumulateGradHooks,
    call_at_end_of_backward,
    call_when_backward_starts,
    is_within_another_backward,
)
from .communicator import BucketCommunicator, Pending
from .parameters import check_gradient, kind_of_gradient, named_parameters
from .sparse import average_rows
from .unused import UsedMap

MIB = 1 << 20


@dataclass
class Step:
    """What a backward pass has done so far."""

    ready: dict[int, None] = field(default_factory=dict)  # parameters, in the order in which they became so
    hits: Counter[int] = field(default_factory=Counter)  # with static_graph
    skipped: set[int] = field(
        default_factory=set
    )  # parameters that no rank uses, whose buckets may be left out
    next_bucket: int = 0
    averages: dict[int, Pending] = field(default_factory=dict)  # by bucket
    used_map: UsedMap | None = None
    unused_before: dict[int, torch.Tensor] = field(default_factory=dict)  # gradients to put back


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
    skip_all_reduce_unused_params: with one of these two, leave out buckets of which no rank uses a parameter.
    sparse_params: those with sparse gradients (``nn.Embedding(sparse=True)``); averaged apart, without the hook.
    verify: compare the parameters and these options across ranks; without it, construction communicates nothing.

    Raises RuntimeError on every rank if the ranks have different parameters or options; ValueError without any that
    requires gradients, or for a cap that isn't a number; TypeError for a process_group that isn't one, or for params
    that are no iterable of plain tensors. The first step that is averaged compares options and hooks, and raises alike.
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
        for cap in (bucket_cap_mb, first_bucket_cap_mb):
            if not isinstance(cap, int | float) or not cap >= 0:
                raise ValueError(f"a bucket's cap is a number of MiB, 0 or more, got {cap!r}")
        self._names, self._params = named_parameters(params)
        self.process_group = resolve_group("Reducer", process_group)
        self._as_view, self._static = gradient_as_bucket_view, static_graph
        self._find_unused = find_unused_parameters and not static_graph
        self._skip_unused = skip_all_reduce_unused_params
        self._notes_use = find_unused_parameters or static_graph or skip_all_reduce_unused_params
        sparse = {id(param) for param in sparse_params}
        self._sparse = {number for number, param in enumerate(self._params) if id(param) in sparse}
        options = {
            "bucket_cap_mb": float(bucket_cap_mb),
            "first_bucket_cap_mb": float(first_bucket_cap_mb),
            "gradient_as_bucket_view": bool(gradient_as_bucket_view),
            "find_unused_parameters": bool(find_unused_parameters),
            "static_graph": bool(static_graph),
            "skip_all_reduce_unused_params": bool(skip_all_reduce_unused_params),
            "sparse parameters": [self._names[number] for number in sorted(self._sparse)],
            "world size": self.process_group.size(),
        }
        self._agreement = Agreement(options, self.process_group, self._params[0].device)
        if verify:
            self._agreement.verify(self._names, self._params)
        caps_bytes = first_bucket_cap_mb * MIB, bucket_cap_mb * MIB
        self.communicator = BucketCommunicator(
            self._params, self._names, self.process_group, caps_bytes, self._as_view
        )
        self._build(range(len(self._params) - 1, -1, -1))
        self._rebuilt = self._find_unused
        self._lock = threading.RLock()
        self._syncing = True
        # For DistributedDataParallel, whose forward decides: only a backward through a prepared forward's outputs is
        # averaged, and it may come in several calls. at_end is called when one ends, with whether it has been averaged.
        self.only_prepared = False
        self.at_end: Callable[[bool], None] | None = None
        self._is_prepared, self._stays_prepared, self._is_opaque = False, False, False
        self._step: Step | None = None
        self._tasks: set[int] = set()  # the graph tasks at whose end _finish is called
        self._used: set[int] = set()  # where that matters, since the last step: under no_sync(), too
        self._prepared: set[int] | None = None  # the parameters that the prepared backward won't reach
        self._static_hits: Counter[int] | None = None
        self._static_unused: set[int] | None = None  # by any rank
        self._hooks = AccumulateGradHooks(self._params, self._names, self, Reducer._on_ready)

    def _build(self, order: Iterable[int]) -> None:
        self.communicator.build(number for number in order if number not in self._sparse)

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Average buckets with hook(state, bucket): any of ours or torch's. Once, before the first backward.

        Raises TypeError if the hook can't be called, RuntimeError for a second one.
        """
        self.communicator.register(state, hook)
        self._agreement.renew()

    def close(self) -> None:
        """Detach from the parameters: backward goes on without averaging."""
        self._hooks.remove()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the next one outside averages what has accumulated."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    # --- a step ---

    def expect_finished(self) -> None:
        """Raise RuntimeError if the last backward has not reached all parameters; the next step starts afresh."""
        if self._step is None:
            return
        missing = self._missing()
        self._forget_step()
        if self._static_hits is not None and missing:
            raise RuntimeError(errors.graph_changed(self._names[missing[0]], self._static_hits[missing[0]]))
        raise RuntimeError(errors.unfinished(self._names, missing, self.process_group.rank()))

    def prepare_for_backward(self, outputs: Any) -> None:
        """Say what the next backward starts from; with find_unused_parameters, in every step.

        outputs: tensors in any nesting of tuples, lists, dicts and dataclasses. A backward that doesn't come through any
        of the outputs counts as the last call's. Raises RuntimeError if the last backward did not reach all parameters.
        """
        self.expect_finished()
        if not self._syncing:
            return
        self._is_prepared = True
        if self._find_unused:
            self._prepared = self._hooks.out_of_reach(outputs)
        can_tell = call_when_backward_starts(outputs, self, Reducer._when_backward_starts, self._prepared)
        # Where backwards from these outputs can't be told from others, all are taken for theirs until the next call.
        self._stays_prepared = self._is_opaque = not can_tell

    def expect_accumulation(self) -> None:
        """Say that the next backward only accumulates, unless it comes through outputs that were prepared."""
        if not self._is_opaque:
            self._is_prepared = self._stays_prepared = False

    def _when_backward_starts(self, out_of_reach: set[int] | None) -> None:
        """A backward comes through outputs that were prepared: the first one, or another one of the same forward."""
        with self._lock:
            if not self._syncing:
                return
            if self._step is None:
                self._is_prepared, self._prepared = True, out_of_reach
            if (
                torch.is_grad_enabled()
            ):  # create_graph: the graph of this backward needn't go through the outputs
                self._stays_prepared = True
            # At the end of the outermost backward, whatever backwards are called within it.
            call_at_end_of_backward(self._finish, self._tasks)

    def _on_ready(self, number: int) -> None:
        """A parameter's gradient has been accumulated, or is known to be undefined."""
        with self._lock:
            if self._notes_use and self._params[number].grad is not None:
                self._used.add(number)
            if not self._syncing:
                return
            hits = self._static_hits
            if self.only_prepared and not self._is_prepared:
                if hits is not None and not hits[number]:
                    raise RuntimeError(errors.graph_changed(self._names[number], 0))
                return
            try:
                step = self._step or self._begin()
                call_at_end_of_backward(self._finish, self._tasks)
                if self._static:
                    step.hits[number] += 1
                    if hits is None or step.hits[number] < hits[number]:
                        return  # the first step is averaged when it is over
                    if step.hits[number] > hits[number]:
                        raise RuntimeError(errors.graph_changed(self._names[number], hits[number]))
                self._mark_ready(step, number)
            except BaseException:
                self._forget_step()
                raise

    def _begin(self) -> Step:
        if self._find_unused and self._prepared is None:
            raise RuntimeError(errors.NOT_PREPARED)
        unused = self._prepared or set()
        if self._static_hits is not None:
            unused = {number for number in range(len(self._params)) if not self._static_hits[number]}
        if not self._stays_prepared:
            self._prepared = None
        self._hooks.require_attached(unused)
        step = self._open(set(range(len(self._params))) - (unused - self._used))
        for number in sorted(unused):
            gradient = self._params[number].grad
            if self._as_view and gradient is not None:
                step.unused_before[number] = gradient.detach().clone()
            self._mark_ready(step, number)
        return step

    def _open(self, may_use: set[int]) -> Step:
        """Open a step together with the other ranks. may_use: the parameters that this rank may use in it."""
        self._agreement.require(*(self.communicator.hook or (None, None)))
        self.communicator.begin()
        self._step = step = Step()
        if self._skip_unused and self._find_unused:
            # Before anything is left out: what one rank leaves out and another one sends, never arrives.
            device = self._params[0].device
            step.skipped = UsedMap(may_use, len(self._params), device, self.process_group).unused()
        elif self._skip_unused:
            step.skipped = self._static_unused or set()
        return step

    def _mark_ready(self, step: Step, number: int) -> None:
        if number in step.ready:
            raise RuntimeError(errors.marked_twice(self._names[number]))
        step.ready[number] = None
        bucket = self.communicator.bucket_of.get(number)
        if bucket is None:
            param = self._params[number]
            check_gradient(param.grad, kind_of_gradient(param, is_sparse=True), self._names[number])
        else:
            bucket.num_pending -= 1
            if bucket.num_pending:
                return  # no bucket can start yet, nor is the step over
            self._start_buckets(step)
        is_over = len(step.ready) == len(self._params)
        if is_over and (self._find_unused or (self._static and self._static_unused is None)):
            device = self._params[0].device
            step.used_map = UsedMap(self._used, len(self._params), device, self.process_group)

    def _start_buckets(self, step: Step) -> None:
        """Those whose turn it is."""
        buckets = self.communicator.buckets
        while step.next_bucket < len(buckets) and not buckets[step.next_bucket].num_pending:
            index = step.next_bucket
            if not step.skipped.issuperset(buckets[index].numbers):
                step.averages[index] = self.communicator.start(index)
            step.next_bucket += 1

    # --- the end of a step ---

    @torch.no_grad()
    def _finish(self) -> None:
        """At the end of a backward: if it is the step's, wait, write the averages to the gradients, and reset."""
        with self._lock:
            step = self._step
            is_inner = is_within_another_backward()
            try:
                if step is not None and self._static and self._static_hits is None:
                    self._learn(step, is_inner)
                is_averaged = step is not None and len(step.ready) == len(self._params)
                if step is not None and is_averaged:
                    self._complete(step)
                elif not is_inner:
                    self._hooks.require_attached(self._missing())
                    if not self.only_prepared:
                        self.expect_finished()
            except BaseException:
                self._forget_step()
                raise
            if self.at_end is not None and (is_averaged or not is_inner):
                self.at_end(is_averaged)

    def _learn(self, step: Step, is_inner: bool) -> None:
        """The static graph's first step is over, unless this is the end of a backward within it: average it."""
        if is_inner and not self._is_prepared:
            raise RuntimeError(errors.STATIC_NOT_PREPARED)
        if not is_inner:
            unused = [number for number in range(len(self._params)) if number not in step.hits]
            self._hooks.require_attached(unused)
            self._static_hits = step.hits
            for number in [*step.hits, *unused]:
                self._mark_ready(step, number)

    def _missing(self) -> list[int]:
        ready = self._step.ready if self._step is not None else ()
        return [number for number in range(len(self._params)) if number not in ready]

    def _complete(self, step: Step) -> None:
        self._write_back(step)
        self._forget_step()
        if not self._rebuilt:
            # Once: buckets in the order in which gradients became ready, rank 0's.
            self._rebuilt = True
            self._build(agree_on_order(list(step.ready), self._params[0].device, self.process_group))

    def _write_back(self, step: Step) -> None:
        kept = step.used_map.unused() if step.used_map is not None else self._static_unused or set()
        if self._static:
            self._static_unused = kept
        for index, pending in step.averages.items():
            self.communicator.finish(index, pending, kept, step.unused_before)
        for number in kept.intersection(step.unused_before):
            self._params[number].grad.copy_(step.unused_before[number])  # type: ignore[union-attr]
        for number in sorted(self._sparse - kept):
            self._params[number].grad = average_rows(self._params[number], self.process_group)

    @torch.no_grad()
    def take_part(self) -> None:
        """Take part in a step of the other ranks with gradients of zero: for a rank that has no more input.

        This rank's gradients are what they were afterwards.
        """
        with self._lock:
            kept = [param.grad for param in self._params]
            try:
                for param in self._params:
                    param.grad = None
                self._used.clear()
                step = self._open(set())
                if self._static and self._static_hits is None:
                    self._static_hits = Counter()
                for number in range(len(self._params)):
                    self._mark_ready(step, number)
                self._complete(step)
                if self.at_end is not None:
                    self.at_end(True)
            finally:
                self._forget_step()
                for param, gradient in zip(self._params, kept, strict=True):
                    param.grad = gradient

    def _forget_step(self) -> None:
        """The next one starts afresh."""
        self._step, self._is_prepared = None, self._stays_prepared
        self._used.clear()
        self._tasks.clear()
