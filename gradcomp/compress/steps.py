"""Which bucket belongs to which step.

A bucket's index() and is_last() are hints only. In a static graph's first step, torch gives every bucket the
index 0 and calls no bucket the last. With skip_all_reduce_unused_params the last bucket may not come at all.
So a step ends in one of three ways:

    a bucket says that it is the last
    backward ends: the step is over, unless the next bucket brings parameters that are new in the step
        (several backwards of one forward; reentrant checkpoints, which have their own backwards)
    a bucket brings a parameter for the second time: the previous step has ended, and a new step begins
"""

from collections.abc import Iterable

import torch


class Steps:
    """The number of steps, and the buckets of the current one, identified by their parameters.

    num: the number of steps before the current one.
    is_over: True if backward has ended since the last bucket.
    num_buckets: the number of buckets so far.
    gradient_bytes: the bytes of the compressed buckets so far.
    sent_bytes: the bytes that a rank has sent for these buckets.
    """

    def __init__(self) -> None:
        self.num, self._backward = 0, -1
        self.end()

    def take(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Add a bucket, unless one of its parameters has come in this step already.

        Sets is_over at the end of the backward that brings the bucket.

        Returns whether the bucket was added.
        """
        new = set(map(id, parameters))
        if not self._parameters.isdisjoint(new):
            return False
        self._parameters |= new
        self.is_over = False
        self.num_buckets += 1
        backward = torch._C._current_graph_task_id()
        if backward not in (-1, self._backward):
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return True

    def end(self) -> None:
        """Begin the next step."""
        self.is_over = False
        self.num_buckets = self.gradient_bytes = self.sent_bytes = 0
        self._parameters: set[int] = set()

    def _end_backward(self) -> None:
        self._backward = -1
        self.is_over = self.num_buckets > 0
