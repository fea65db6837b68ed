"""Which parameters a step of the Reducer uses, with find_unused_parameters or static_graph.

Without them a step uses every parameter, once. Parameters are known by their indices in the Reducer.
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


class _Usage:
    """The base class of two regimes, in which the ranks tell each other which parameters they use.

    device: where the group exchanges the used parameters.
    skips: leave out buckets with no used parameter.
    used: the parameters that have a gradient on this rank in the step, from backwards in no_sync(), too.

    A step calls, in this order: unused_by_this_rank(out_of_reach), for the parameters that it doesn't wait
    for; begin(unused), for the parameters that all ranks leave out; is_complete(index) with every gradient;
    exchange(), when all are complete; unused_by_all_ranks(), which waits for exchange(), for the parameters
    that keep their gradients.
    """

    _unused_in_step: Callable[[], set[int]] | None = None  # waits for what exchange() has begun

    def __init__(self, names: Sequence[str], device: torch.device, group: dist.ProcessGroup, skips: bool):
        self._names, self._device, self._group, self._skips = names, device, group, skips
        self.used: set[int] = set()

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
        return self._exchanged(set(range(len(self._names))).difference(unused) | self.used)()


class StaticGraph(_Usage):
    """The regime in which every step uses the parameters of the first step, each as often as it did."""

    def __init__(self, names: Sequence[str], device: torch.device, group: dist.ProcessGroup, skips: bool):
        super().__init__(names, device, group, skips)
        self.is_learning = True  # the running or next step is the first one, which later steps must equal
        self._num_uses: Counter[int] = Counter()  # in the running step
        self._expected: Counter[int] = Counter()  # in the first step, once that is over
        self._unused: set[int] | None = None  # by any rank

    def check_unaveraged(self, index: int) -> None:
        """Raise RuntimeError if a backward that only accumulates may not use this parameter."""
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
