"""The Reducer: averages a module's gradients over a process group while backward is still running.

What happens in a step, with three buckets:

    backward  ──grad 7──grad 6──┬─grad 5──grad 4──┬─grad 3── … ──grad 0──┬────────── callback ─▶ returns
    bucket 0                    └ fill ─ average ─┼────▶                 │           wait, write back
    bucket 1                                      └ fill ─ average ──────┼──▶
    bucket 2                                                             └ fill ─ average ─▶

Buckets are averaged strictly in the order of their index, whichever is full first: all ranks issue the same
collectives in the same order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from gradcomp.comm.bucket import Hook, Hooked
from gradcomp.comm.exchange import has_delay
from gradcomp.comm.pipeline import drop
from gradcomp.comm.process_group import resolve_group
from gradcomp.comm.torch_private import current_autograd_node, not_compiled
from gradcomp.device import require_no_capture
from gradcomp.rules import RATE

from .autograd import AccumulateGradHooks, call_at_end_of_backward, call_when_backward_starts
from .bucket import BucketCommunicator, Pending, average_rows
from .parameters import Agreement, Sharing, agree_on_order, check_gradient, named_parameters
from .usage import FindUnused, StaticGraph, Usage


class Reducer:
    """Averages gradients over a process group: after ``loss.backward()``, ``.grad`` is the ranks' mean.

    params: parameters, or (name, parameter) pairs as from ``named_parameters()``, for names in errors. The
        same on every rank. Parameters that don't require gradients are left out; if they do later, and get a
        gradient, backward raises RuntimeError.
    process_group: None for the default one.
    bucket_cap_mb, first_bucket_cap_mb: MiB of a bucket, and of the first one of a dtype and device.
    gradient_as_bucket_view: gradients are views of the buckets, which saves their memory once. Keep them:
        with ``zero_grad(set_to_none=True)`` autograd makes new ones, which are copied into the buckets first.
    find_unused_parameters: outputs may leave parameters out; call prepare_for_backward(outputs) in every
        step. A parameter that no rank used keeps its .grad as it was.
    static_graph: every step uses the same parameters, any number of times each, as the first one.
    skip_all_reduce_unused_params: with find_unused_parameters or static_graph, leave out unused buckets.
    sparse_params: parameters with sparse gradients (``nn.Embedding(sparse=True)``); the hook never gets them.
    verify: compare parameters and options across ranks; without it, construction communicates nothing.

    Raises RuntimeError on every rank if the ranks have different parameters or options; ValueError if no
    parameter requires gradients, if they come from a wrapper that averages them itself, or for a cap that
    isn't a number; TypeError for a process_group that isn't one, or for params that are no iterable of plain
    tensors. The first step compares options and hooks.
    """

    # A wrapper's Reducer averages only backwards through prepared outputs, while others accumulate.
    _is_wrappers = False

    @torch.inference_mode(False)
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
        first_bucket_cap_mb = RATE("first_bucket_cap_mb", first_bucket_cap_mb)
        bucket_cap_mb = RATE("bucket_cap_mb", bucket_cap_mb)
        self._names, self._params, self._frozen = named_parameters(params)
        self.process_group = resolve_group("Reducer", process_group)
        sparse_ids = {id(param) for param in sparse_params}
        sparse = {index for index, param in enumerate(self._params) if id(param) in sparse_ids}
        self._sharing = Sharing(self._params, self._names, self.process_group)
        options = {
            "bucket_cap_mb": bucket_cap_mb,
            "first_bucket_cap_mb": first_bucket_cap_mb,
            "gradient_as_bucket_view": bool(gradient_as_bucket_view),
            "find_unused_parameters": bool(find_unused_parameters),
            "static_graph": bool(static_graph),
            "skip_all_reduce_unused_params": bool(skip_all_reduce_unused_params),
            "sparse parameters": [self._names[index] for index in sorted(sparse)],
            "number of other live Reducers with some of the parameters": len(self._sharing.others),
        }
        device = self._params[0].device
        self._agreement = Agreement(options, self.process_group, device)
        if verify:
            self._agreement.verify(self._names, self._params)
            has_delay(self._params[0], self.process_group)  # measured here, not in the first step
        caps_bytes = first_bucket_cap_mb * 2**20, bucket_cap_mb * 2**20
        self.communicator = BucketCommunicator(
            self._params, self._names, self.process_group, caps_bytes, gradient_as_bucket_view, sparse
        )
        self.communicator.as_view = gradient_as_bucket_view and not self._sharing.others
        self.communicator.build(reversed(range(len(self._params))))
        self._usage: Usage | None = None  # without one, every backward uses every parameter, once
        if static_graph or find_unused_parameters:
            regime = StaticGraph if static_graph else FindUnused
            self._usage = regime(self._names, device, self.process_group, skip_all_reduce_unused_params)
        # Buckets follow the order in which gradients become ready, if that is nearly the same on every rank.
        self._is_rebuilt = isinstance(self._usage, FindUnused)
        self._lock = threading.RLock()
        self._syncing = True
        self._is_prepared, self._stays_prepared, self._is_opaque = False, False, False
        self._out_of_reach: set[int] | None = None  # the parameters that the prepared backward won't reach
        self._step: Step | None = None
        self._tasks: set[int] = set()  # the graph tasks at whose end _finish is called
        self._hooks = AccumulateGradHooks(self._params, self._names, self, Reducer._on_gradient)
        self._sharing.open()

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Average buckets with hook(state, bucket): gradcomp's, torch's or yours. Once, before any backward.

        Raises TypeError if the hook can't be called, RuntimeError for a second one.
        """
        hooked = Hooked(hook, state)
        self._agreement.expect(hooked)
        self.communicator.register(hooked)
        hooked.tell("number_parameters", [*zip(self._names, self._params, strict=True), *self._frozen])

    def close(self) -> None:
        """Detach from the parameters: backward goes on without averaging."""
        self._hooks.remove()
        self._sharing.close()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate in backward passes inside; the next one outside averages what has accumulated."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def expect_finished(self) -> None:
        """Raise RuntimeError if the last backward did not reach all parameters, and forget its step."""
        if self._step is None:
            return
        message = self._step.unfinished(self.process_group.rank())
        self._forget_step()
        raise RuntimeError(message)

    @not_compiled
    def prepare_for_backward(self, outputs: Any, divisor: int | None = None) -> None:
        """Say what the next backward starts from; with find_unused_parameters, in every step.

        outputs: tensors in any nesting of tuples, lists, dicts and dataclasses. A backward that doesn't come
            through any outputs counts as the last call's.
        divisor: sums of gradients are divided by it if there is no hook; None for the number of ranks.

        Raises RuntimeError if the last backward did not reach all parameters.
        """
        self.expect_finished()
        if not self._syncing:
            return
        self.communicator.divisor = self.process_group.size() if divisor is None else divisor
        self._is_prepared = True
        if isinstance(self._usage, FindUnused):
            self._out_of_reach = self._hooks.out_of_reach(outputs)
        self._hooks.watch()
        # Weakly, as on the parameters: Python's garbage collector can't see through a node.
        hook = partial(Reducer._on_prepared_backward, weakref.ref(self), self._out_of_reach)
        can_tell = call_when_backward_starts(outputs, hook)
        self._hooks.num_hooks = RemovableHandle.next_id  # the outputs' hooks are on no parameter
        # If backwards from these outputs can't be told from others, all until the next call count as theirs.
        self._stays_prepared = self._is_opaque = not can_tell

    # --- called by autograd ---

    @staticmethod
    @not_compiled
    def _on_prepared_backward(reducer: weakref.ref[Reducer], out_of_reach: set[int] | None, *_: Any) -> None:
        """Note that a backward comes through prepared outputs, for the first time or again."""
        if (self := reducer()) is None:
            return
        with self._lock:
            if not self._syncing:
                return
            if self._step is None:
                self._is_prepared, self._out_of_reach = True, out_of_reach
            if torch.is_grad_enabled():
                # With create_graph, the graph of this backward needn't go through the outputs.
                self._stays_prepared = True
            # At the end of the outermost backward, even if other backwards run within it.
            call_at_end_of_backward(self._finish, self._tasks)

    @staticmethod
    @not_compiled
    def _on_gradient(reducer: weakref.ref[Reducer], index: int, *_: Any) -> None:
        """Note that a parameter's gradient has been accumulated, or is known to be undefined."""
        if (self := reducer()) is None:
            return
        with self._lock:
            usage = self._usage
            if usage is not None and self._params[index].grad is not None:
                usage.used.add(index)
            if not self._syncing:
                return
            if self._is_wrappers and not self._is_prepared:
                if isinstance(usage, StaticGraph):
                    usage.check_unaveraged(index)
                return
            try:
                call_at_end_of_backward(self._finish, self._tasks)
                step = self._step or self._begin()
                if usage is None or usage.is_complete(index):
                    step.mark_ready(index)
            except BaseException:
                self._forget_step()
                raise

    def _begin(self, unused: Iterable[int] = ()) -> Step:
        """Begin a step together with the other ranks.

        unused: the parameters that this rank doesn't use; () for those that the backward won't reach.
        """
        require_no_capture("the Reducer can't average gradients", self._params[0].device)
        self._hooks.watch()
        if self._usage is not None and not unused:
            unused = self._usage.unused_by_this_rank(self._out_of_reach)
            if not self._stays_prepared:
                self._out_of_reach = None
            self._hooks.require_attached(unused)
        if self._agreement.group is not self.communicator.hooked.group:
            self._agreement.require(self.communicator.hooked)
        if self._sharing.others:
            self._sharing.require_same_ranks()
        self.communicator.as_view = self.communicator.wants_views and not self._sharing.others
        self._sharing.is_stepping = True
        self._step = Step(self.communicator, self._usage, unused)
        return self._step

    @torch.no_grad()
    @not_compiled
    def _finish(self) -> None:
        """End a backward: if the step is over, wait for the averages, and write them to the gradients."""
        with self._lock:
            step, is_averaged = self._step, False
            is_inner = current_autograd_node() is not None  # within another backward
            try:
                self._hooks.require_no_steps()
                if step is not None and isinstance(self._usage, StaticGraph) and self._usage.is_learning:
                    order = self._usage.learn(is_inner, self._is_prepared)
                    self._hooks.require_attached(order)
                    for index in order:
                        if index not in step.ready:  # as all are on a rank without input, in join()
                            step.mark_ready(index)
                if step is not None and len(step.ready) == len(self._params):
                    step.write_back(self.process_group)
                    self._forget_step()
                    is_averaged = True
                    if not self._is_rebuilt:
                        # Once: from now on buckets follow the order in which rank 0's gradients became ready.
                        self._is_rebuilt, device = True, self._params[0].device
                        order = agree_on_order([*step.ready], device, self.process_group)
                        self.communicator.build(order)
                elif not is_inner:
                    everything = range(len(self._params))
                    self._hooks.require_attached(everything if step is None else step.missing())
                    if not self._is_wrappers:
                        self.expect_finished()
            except BaseException:
                self._forget_step()
                raise
            if is_averaged or not is_inner:
                self._after_backward(is_averaged)

    def _after_backward(self, is_averaged: bool) -> None:
        """Raise RuntimeError at the end of a backward for gradients that no Reducer averages."""
        unfrozen = [param for _, param in self._frozen if param.requires_grad and param.grad is not None]
        if unfrozen:
            self._sharing.require_averaged(map(id, unfrozen), self._frozen)

    def _forget_step(self) -> None:
        """End the step, complete or broken off: the next gradient begins another one."""
        if self._step is not None and self._step.averages:
            drop(self._step.averages.values())  # which may still write to the buckets
        self._step, self._is_prepared = None, self._stays_prepared
        self._sharing.is_stepping = False
        if self._usage is not None:
            self._usage.forget_step()
        self._tasks.clear()


class Step:
    """A step under way: which parameters are ready, and which buckets are being averaged.

    The constructor begins the step, on all ranks together.

    unused: parameters that this rank does not use in the step. They are ready from the beginning, and keep
        their gradients.
    ready: the parameters that are ready, in the order in which they became ready.
    averages: the averages under way, by bucket.
    """

    def __init__(self, communicator: BucketCommunicator, usage: Usage | None, unused: Iterable[int]):
        self._communicator, self._usage = communicator, usage
        self._params = communicator.params
        self.ready: dict[int, None] = {}
        self._num_pending = [len(bucket.indices) for bucket in communicator.buckets]  # not ready, by bucket
        self._next_bucket = 0
        self.averages: dict[int, Pending] = {}
        # Of unused parameters whose gradients are views, which the averages overwrite.
        self._gradients_before: dict[int, torch.Tensor] = {}
        skippable = set() if usage is None else usage.begin(unused)
        buckets = enumerate(communicator.buckets)
        self._averaged = [number for number, each in buckets if not skippable.issuperset(each.indices)]
        for index in sorted(unused):
            gradient = self._params[index].grad
            if communicator.as_view and gradient is not None:
                self._gradients_before[index] = gradient.detach().clone()
            self.mark_ready(index)

    def missing(self) -> list[int]:
        """Return the parameters that are not ready."""
        return [index for index in range(len(self._params)) if index not in self.ready]

    def unfinished(self, rank: int) -> str:
        """Return the message for a step whose backward has ended before all parameters were ready."""
        missing, names = self.missing(), self._communicator.names
        if missing and isinstance(self._usage, StaticGraph) and not self._usage.is_learning:
            return self._usage.graph_changed(missing[0])
        if not missing:
            return (
                "Expected to have finished reduction in the prior iteration before starting a new one. "
                "Backward reached all parameters, but did not come to its end: an exception broke it off"
            )
        return (
            "Expected to have finished reduction in the prior iteration before starting a new one. Backward "
            f"did not reach {len(missing)} parameters: {', '.join(names[index] for index in missing)}. "
            "Likely causes: the loss does not depend on all outputs, or not all `forward` function outputs "
            "participate in calculating loss; a branch left layers out; parameters were frozen or replaced "
            "after construction. If that is meant, enable unused parameter detection by passing the keyword "
            "argument `find_unused_parameters=True`. Parameter indices which did not receive grad for rank "
            f"{rank}: {' '.join(map(str, missing))}"
        )

    def mark_ready(self, index: int) -> None:
        """Take a parameter's gradient as complete. Start averaging the buckets that are full with it.

        Buckets start in the order of their indices, which is the same on every rank. Raises RuntimeError for
        a parameter that is ready already, or whose gradient doesn't fit its bucket.
        """
        communicator, pending = self._communicator, self._num_pending
        if index in self.ready:
            name = communicator.names[index]
            raise RuntimeError(
                f"Expected to mark a variable ready only once: parameter {name} became ready twice in one "
                "backward. Likely causes: the parameter is used outside of the forward that was prepared; "
                "several backward passes of one forward, each of which reaches a part of the model (add the "
                "losses up and call backward once, or let the wrapper have find_unused_parameters=True); "
                "several backward passes in one step (call all but the last in no_sync()); reentrant "
                "activation checkpointing of the same parameters; an exception that broke off the backward "
                "before this one, after which the next one starts at zero. If the graph is the same in every "
                "step, static_graph=True allows it"
            )
        self.ready[index] = None
        if index in communicator.sparse:
            param = self._params[index]
            expected = torch.sparse_coo, param.dtype, param.device
            check_gradient(param.grad, expected, param.shape, communicator.names[index])
        else:
            pending[communicator.bucket_of[index]] -= 1
        while self._next_bucket < len(pending) and not pending[self._next_bucket]:
            number = self._next_bucket
            if number in self._averaged:
                self.averages[number] = communicator.start(number, number == self._averaged[-1])
            self._next_bucket += 1
        if self._usage is not None and len(self.ready) == len(self._params):
            self._usage.exchange()

    def write_back(self, group: dist.ProcessGroup) -> None:
        """Wait for the averages, and make them the gradients of the parameters that any rank has used."""
        kept = set() if self._usage is None else self._usage.unused_by_all_ranks()
        for number, pending in self.averages.items():
            self._communicator.finish(number, pending, kept, self._gradients_before)
        for index in kept.intersection(self._gradients_before):
            self._params[index].grad.copy_(self._gradients_before[index])  # type: ignore[union-attr]
        self.averages.clear()
        for index in sorted(self._communicator.sparse - kept):
            self._params[index].grad = average_rows(self._params[index], group)
