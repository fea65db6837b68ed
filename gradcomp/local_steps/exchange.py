"""An exchange of local steps that is under way."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..comm.bucket import Hooked
from ..comm.consistency import difference
from ..comm.process_group import ExplainedError, ranks_of
from ..comm.reduced_values import ReducedValues
from ..reducer.average import Averaging
from .weights import Tensors


@dataclass
class Exchange:
    """An average of pseudo-gradients, with numbers of ranks. It begins when it is made.

    keys: the tensors by which the hook's state knows the weights.
    indices: see Averaging.
    moved: the pseudo-gradients, which become their averages.
    begun: the weights when it began; empty without a delay.
    counts: the numbers of ranks that mean to give something in the next exchange, and that do in this one;
        then every rank's number of exchanges.
    factor: see `average`.
    num_steps: the number of local steps since it began.
    """

    hooked: Hooked
    group: dist.ProcessGroup
    keys: Tensors
    indices: tuple[int, int]
    moved: Tensors
    begun: Tensors
    counts: ReducedValues
    factor: float
    num_steps: int = 0

    def __post_init__(self) -> None:
        self._hooks_step = self.hooked.step  # if it counts
        try:
            self.averaging = self.average(self.moved, self.factor)
        except BaseException:
            self.hooked.undo(self._hooks_step, all_know=True)  # by the exchanges' numbers
            raise

    def average(self, moved: Tensors, factor: float) -> Averaging:
        """Multiply pseudo-gradients, and begin to average them over the group.

        factor: makes the average one over the ranks that count. Those that have joined give zeros. Errors, of
            earlier exchanges, count as ever.
        """
        torch._foreach_mul_(list(moved.values()), factor)
        sent = {name: each for name, each in moved.items() if each.numel()}
        return Averaging(
            list(sent.values()),
            self.hooked,
            parameters=[self.keys[name] for name in sent],
            indices=self.indices,
            waits_at_once=not self.begun,
        )

    def wait(self) -> tuple[int, int]:
        """Wait for the averages. Return the numbers of ranks that give something in the next and in this one.

        Raises ExplainedError on every rank if the ranks have completed different numbers of exchanges.
        """
        try:
            self.averaging.wait()
            num_active, num_gave, *numbers = map(round, self.counts.wait())
            if text := difference("the number of completed exchanges", numbers, ranks_of(self.group)):
                raise ExplainedError(
                    f"LocalSteps can't average: {text}, so their common weights differ. Likely cause: an "
                    "exchange failed on some ranks alone, which went on. Call regroup() on every rank"
                )
        except BaseException:
            self.hooked.undo(self._hooks_step, all_know=True)
            raise
        return num_active, num_gave
