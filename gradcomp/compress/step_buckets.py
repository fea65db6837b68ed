"""When a state's step ends, told from the buckets that come.

A bucket's index() and is_last() are hints. In a static graph's first step torch gives every bucket the index
0 and calls none the last; with skip_all_reduce_unused_params the last bucket may not come at all. So a step
ends in one of three ways:

    a bucket says that it is the last
    backward ends: the step is over, unless its next bucket brings parameters that have not come yet
        (as in several backwards of one forward, and in reentrant checkpoints, which have their own backwards)
    a bucket brings a parameter for the second time: the step before has ended, and another one begins
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist


class StepBuckets:
    """The buckets of the current step, known by their parameters.

    is_over: True if backward has ended since the last bucket.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._parameters: set[int] = set()
        self._backward = -1

    @property
    def is_empty(self) -> bool:
        """True if no bucket has come yet."""
        return not self._parameters

    def has_any_of(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether one of a bucket's parameters has come in this step."""
        return not self._parameters.isdisjoint(map(id, parameters))

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note a bucket by its parameters, and when the backward that brings it ends."""
        self._parameters.update(map(id, parameters))
        self.is_over = False
        backward = torch._C._current_graph_task_id()
        if backward not in (-1, self._backward):
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def end(self) -> None:
        """Begin the next step."""
        self.is_over = False
        self._parameters = set()

    def _end_backward(self) -> None:
        self._backward = -1
        self.is_over = not self.is_empty


def is_waited_for_at_once(bucket: dist.GradBucket) -> bool:
    """Return whether this bucket's average is waited for before another bucket's hook is called.

    In a static graph's first step, torch's DDP calls all hooks at the end of backward, in a callback of the
    engine, and waits for their futures there: after it no hook and no callback comes that could complete one.
    """
    is_in_backward = torch._C._current_graph_task_id() != -1
    return isinstance(bucket, dist.GradBucket) and is_in_backward and not torch._C._current_autograd_node()
