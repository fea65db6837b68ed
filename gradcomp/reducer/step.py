"""A step of the Reducer: which parameters it uses, which of them are ready, and which buckets are averaged.

A step uses every parameter, once, unless the Reducer has a `Usage`: with find_unused_parameters or
static_graph. Parameters are known by their indices in the Reducer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.comm.exchange import all_reduce, has_delay
from gradcomp.comm.pipeline import run_through
from gradcomp.comm.process_group import Explaining
from gradcomp.device import send

from .bucket import BucketCommunicator, Pending, average_rows
from .parameters import check_gradient


class _Usage:
    """The base class of two regimes, in which the ranks tell each other which parameters they use.

    device: where the group exchanges the used parameters.
    skips: leave out buckets with no used parameter.
    used: the parameters that have a gradient on this rank in the step, from backwards in no_sync(), too.
    is_learning: whether the running or next step is the first one, which later steps must equal.

    A step calls, in this order: unused_by_this_rank(out_of_reach), for the parameters that it doesn't wait
    for; begin(unused), for the parameters that all ranks leave out; is_complete(index) with every gradient;
    exchange(), when all are complete; unused_by_all_ranks(), which waits for exchange(), for the parameters
    that keep their gradients.
    """

    is_learning = False
    _unused_in_step: Callable[[], set[int]] | None = None  # waits for what exchange() has begun

    def __init__(self, names: Sequence[str], device: torch.device, group: dist.ProcessGroup, skips: bool):
        self._names, self._device, self._group, self._skips = names, device, group, skips
        self.used: set[int] = set()

    def check_unaveraged(self, index: int) -> None:
        """Raise RuntimeError if a backward that only accumulates may not use this parameter."""

    def is_complete(self, index: int) -> bool:
        """Count a use of the parameter. Return whether the step's gradient is complete with it."""
        return True

    def exchange(self) -> None:
        self._unused_in_step = self._exchanged(self.used)

    def unused_by_all_ranks(self) -> set[int]:
        return set() if self._unused_in_step is None else self._unused_in_step()

    def forget_step(self) -> None:
        """Forget the step, complete or broken off."""
        self.used.clear()
        self._unused_in_step = None

    def _exchanged(self, used: set[int]) -> Callable[[], set[int]]:
        """All-reduce how many ranks use each parameter, asynchronously.

        Returns a function that waits, and returns the parameters that no rank uses.
        """
        mine = torch.zeros(len(self._names), dtype=torch.int32, device="cpu")
        mine[sorted(used)] = 1
        uses_all, counts = len(used) == len(mine), send(mine, self._device)
        operation = Explaining.of("exchange which parameters the step has used", self._group)
        with operation:
            stages = all_reduce(counts, self._group, has_delay=has_delay(counts, self._group))
            work: Any = next(stages)

        def unused() -> set[int]:
            with operation:
                work.wait()
                run_through(stages)
            # The host waits for the device only on a rank that left parameters out: it must know which
            # gradients to leave alone.
            return set() if uses_all else {i for i, count in enumerate(counts.tolist()) if not count}

        return unused


class FindUnused(_Usage):
    """The regime in which a backward uses the parameters that its outputs depend on; ranks may differ."""

    def unused_by_this_rank(self, out_of_reach: set[int] | None) -> set[int]:
        if out_of_reach is None:
            raise RuntimeError(
                "find_unused_parameters=True, but prepare_for_backward(outputs) was not called: call it with "
                "the forward's outputs before every backward"
            )
        return out_of_reach

    def begin(self, unused: Iterable[int]) -> set[int]:
        if not self._skips:
            return set()
        # The ranks agree first: a collective that only some ranks issue never completes.
        may_use = set(range(len(self._names))).difference(unused) | self.used
        return self._exchanged(may_use)()


class StaticGraph(_Usage):
    """The regime in which every step uses the parameters of the first step, each as often as it did."""

    def __init__(self, names: Sequence[str], device: torch.device, group: dist.ProcessGroup, skips: bool):
        super().__init__(names, device, group, skips)
        self.is_learning = True
        self._num_uses: Counter[int] = Counter()  # in the running step
        self._expected: Counter[int] = Counter()  # in the first step, once that is over
        self._unused: set[int] | None = None  # by any rank

    def check_unaveraged(self, index: int) -> None:
        if not self.is_learning and not self._expected[index]:
            raise RuntimeError(self.graph_changed(index))

    def unused_by_this_rank(self, out_of_reach: set[int] | None) -> set[int]:
        return set() if self.is_learning else self._without_uses()

    def begin(self, unused: Iterable[int]) -> set[int]:
        return (self._unused or set()) if self._skips else set()

    def is_complete(self, index: int) -> bool:
        self._num_uses[index] += 1
        if self.is_learning:
            return False  # the number of uses is unknown until the first step is over
        if self._num_uses[index] > self._expected[index]:
            raise RuntimeError(self.graph_changed(index))
        return self._num_uses[index] == self._expected[index]

    def learn(self, is_inner: bool, is_prepared: bool) -> list[int]:
        """End the first step. Return the parameters in its order, the unused ones last; inner backwards none.

        Raises RuntimeError for a backward within another one that wasn't prepared.
        """
        if is_inner and not is_prepared:
            raise RuntimeError(
                "static_graph=True and a backward within another one (reentrant activation checkpointing), "
                "but prepare_for_backward(outputs) was not called: call it with the forward's outputs before "
                "the first backward, or use checkpoint(..., use_reentrant=False)"
            )
        if is_inner:
            return []
        self.is_learning = False
        self._expected, self._num_uses = self._num_uses, Counter()
        return [*self._expected, *sorted(self._without_uses())]

    def exchange(self) -> None:
        if self._unused is None:
            super().exchange()

    def unused_by_all_ranks(self) -> set[int]:
        if self._unused is None:
            self._unused = super().unused_by_all_ranks()
        return self._unused

    def graph_changed(self, index: int) -> str:
        """Return the message for a parameter that the first step used another number of times."""
        return (
            f"Your training graph has changed in this iteration: parameter {self._names[index]} was used "
            f"{self._expected[index]} times in the first one. With static_graph=True every iteration must "
            "use the same parameters as often"
        )

    def forget_step(self) -> None:
        super().forget_step()
        self._num_uses = Counter()

    def _without_uses(self) -> set[int]:
        return {index for index in range(len(self._names)) if not self._expected[index]}


Usage = FindUnused | StaticGraph


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
