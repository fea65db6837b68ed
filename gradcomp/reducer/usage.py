"""The parameters that a step uses: all, some, or those of the first step.

The Reducer has one `Usage`, and asks it wherever these three regimes differ. Parameters are known by their
indices in the Reducer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.comm.exchange import all_reduce, has_delay
from gradcomp.comm.pipeline import run_through
from gradcomp.comm.process_group import Operation
from gradcomp.device import send

from . import errors


class Usage:
    """The regime in which every backward uses every parameter, once; the base class of the others.

    names: the parameters' names.
    device: the parameters' device, on which the group exchanges the used parameters.
    skips: leave out buckets with no used parameter.
    """

    # Whether uses are counted. If not, every gradient is complete when it comes.
    counts = False
    # Whether a step needs the outputs of its forward, to find the parameters that they depend on.
    needs_outputs = False
    # Whether gradients become ready in nearly the same order on every rank. Then buckets follow that order.
    has_typical_order = True

    def __init__(self, names: Sequence[str], device: torch.device, group: dist.ProcessGroup, skips: bool):
        self._names, self._device, self._group, self._skips = names, device, group, skips

    @property
    def is_learning(self) -> bool:
        """Whether the running or next step is the first one, which later steps must equal."""
        return False

    def note_gradient(self, index: int, param: torch.Tensor) -> None:
        """Note whether this rank has a gradient for the parameter. Called under no_sync(), too."""

    def check_unaveraged(self, index: int) -> None:
        """Raise RuntimeError if a backward that only accumulates may not use this parameter."""

    def unused_by_this_rank(self, out_of_reach: set[int] | None) -> set[int]:
        """Return the parameters that the beginning step does not wait for.

        out_of_reach: parameters that the forward's outputs do not depend on; None if unknown.
        """
        return set()

    def begin(self, unused: Iterable[int]) -> set[int]:
        """Begin a step without this rank's `unused`. Return the parameters to leave out on all ranks."""
        return set()

    def is_complete(self, index: int) -> bool:
        """Count a use of the parameter. Return whether the step's gradient is complete with it."""
        return True

    def learn(self) -> list[int]:
        """End the first step. Return the parameters in its order, the unused ones last."""
        return []

    def exchange(self) -> None:
        """Start telling the other ranks which parameters this rank has used in the complete step."""

    def unused_by_all_ranks(self) -> set[int]:
        """Wait for exchange(). Return the parameters that no rank has used: they keep their gradients."""
        return set()

    def unfinished(self, missing: Sequence[int]) -> str:
        """Return the message for a step that did not reach the parameters `missing`."""
        return errors.unfinished(self._names, missing, self._group.rank())

    def forget_step(self) -> None:
        """Forget the step, complete or broken off."""


class _CountedUsage(Usage):
    """The base class of the regimes in which the ranks tell each other which parameters they use."""

    counts = True

    def __init__(self, names: Sequence[str], device: torch.device, group: dist.ProcessGroup, skips: bool):
        super().__init__(names, device, group, skips)
        self._used: set[int] = set()

    def note_gradient(self, index: int, param: torch.Tensor) -> None:
        if param.grad is not None:
            self._used.add(index)

    def forget_step(self) -> None:
        self._used.clear()

    def _map(self, used: set[int]) -> UsedMap:
        return UsedMap(used, len(self._names), self._device, self._group)


class FindUnused(_CountedUsage):
    """The regime in which a backward uses the parameters that its outputs depend on; ranks may differ."""

    needs_outputs = True
    has_typical_order = False
    _map_of_step: UsedMap | None = None

    def unused_by_this_rank(self, out_of_reach: set[int] | None) -> set[int]:
        if out_of_reach is None:
            raise RuntimeError(errors.NOT_PREPARED)
        return out_of_reach

    def begin(self, unused: Iterable[int]) -> set[int]:
        if not self._skips:
            return set()
        # The ranks agree first: a collective that only some ranks issue never completes.
        may_use = set(range(len(self._names))).difference(unused) | self._used
        return self._map(may_use).unused()

    def exchange(self) -> None:
        self._map_of_step = self._map(self._used)

    def unused_by_all_ranks(self) -> set[int]:
        return self._map_of_step.unused() if self._map_of_step is not None else set()

    def forget_step(self) -> None:
        super().forget_step()
        self._map_of_step = None


class StaticGraph(_CountedUsage):
    """The regime in which every step uses the parameters of the first step, each as often as it did."""

    def __init__(self, names: Sequence[str], device: torch.device, group: dist.ProcessGroup, skips: bool):
        super().__init__(names, device, group, skips)
        self._num_uses: Counter[int] = Counter()  # in the running step
        self._expected: Counter[int] | None = None  # in the first step
        self._map_of_first_step: UsedMap | None = None
        self._unused: set[int] | None = None  # by any rank

    @property
    def is_learning(self) -> bool:
        return self._expected is None

    def check_unaveraged(self, index: int) -> None:
        if self._expected is not None and not self._expected[index]:
            raise RuntimeError(errors.graph_changed(self._names[index], 0))

    def unused_by_this_rank(self, out_of_reach: set[int] | None) -> set[int]:
        return set() if self._expected is None else self._without_uses(self._expected)

    def begin(self, unused: Iterable[int]) -> set[int]:
        return (self._unused or set()) if self._skips else set()

    def is_complete(self, index: int) -> bool:
        self._num_uses[index] += 1
        if self._expected is None:
            return False  # the number of uses is unknown until the first step is over
        if self._num_uses[index] > self._expected[index]:
            raise RuntimeError(errors.graph_changed(self._names[index], self._expected[index]))
        return self._num_uses[index] == self._expected[index]

    def learn(self) -> list[int]:
        if self._expected is None:
            self._expected, self._num_uses = self._num_uses, Counter()
        return [*self._expected, *sorted(self._without_uses(self._expected))]

    def exchange(self) -> None:
        if self._unused is None:
            self._map_of_first_step = self._map(self._used)

    def unused_by_all_ranks(self) -> set[int]:
        if self._unused is None and self._map_of_first_step is not None:
            self._unused, self._map_of_first_step = self._map_of_first_step.unused(), None
        return self._unused or set()

    def unfinished(self, missing: Sequence[int]) -> str:
        if self._expected is None or not missing:
            return super().unfinished(missing)
        return errors.graph_changed(self._names[missing[0]], self._expected[missing[0]])

    def forget_step(self) -> None:
        super().forget_step()
        self._num_uses = Counter()

    def _without_uses(self, num_uses: Counter[int]) -> set[int]:
        return {index for index in range(len(self._names)) if not num_uses[index]}


class UsedMap:
    """The number of ranks that used each parameter in a step, all-reduced asynchronously.

    used: the indices of the parameters that this rank used.
    """

    def __init__(self, used: set[int], num_params: int, device: torch.device, group: dist.ProcessGroup):
        mine = torch.zeros(num_params, dtype=torch.int32)
        mine[sorted(used)] = 1
        self._uses_all = len(used) == num_params
        self._counts = send(mine, device)
        self._operation = Operation.of("exchange which parameters the step has used", group)
        with self._operation:
            self._stages = all_reduce(self._counts, group, has_delay=has_delay(self._counts, group))
            self._work: Any = next(self._stages)

    def unused(self) -> set[int]:
        """Wait, and return the parameters that no rank used."""
        with self._operation:
            self._work.wait()
            run_through(self._stages)
        if self._uses_all:
            return set()
        # The host waits for the device only here, and only on a rank that left parameters out: it must know
        # which gradients to leave alone.
        return {index for index, count in enumerate(self._counts.tolist()) if not count}
