"""Optimizers that step in a parameter's hook, with this rank's gradient, before it is averaged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _current_graph_task_id
from torch.utils.hooks import RemovableHandle

from . import errors
from .autograd import not_compiled


class StepsInBackward:
    """Finds parameters that were changed, or lost their gradients, in a hook of theirs during a backward.

    Only parameters with hooks of register_post_accumulate_grad_hook, or with optimizers of torch's
    _apply_optimizer_in_backward, can be such, and only they cost time. Hooks that read are left alone.

    nodes: the parameters' AccumulateGrad nodes.
    """

    def __init__(self, params: Sequence[torch.Tensor], names: Sequence[str], nodes: Sequence[Any]):
        self._params, self._names, self._nodes = params, names, nodes
        self._handles: dict[int, Any] = {}
        self._task, self._versions_before = -1, dict[int, int]()
        self._num_hooks = -1
        self.look()

    def look(self) -> None:
        """Watch the parameters that have got hooks since the last call."""
        # How many hooks there have been in the process: to ask every parameter takes a hundredth of a step.
        if self._num_hooks == RemovableHandle.next_id:
            return
        for index, param in enumerate(self._params):
            has_hooks = param._post_accumulate_grad_hooks or "_in_backward_optimizers" in param.__dict__
            if has_hooks and index not in self._handles:
                self._handles[index] = self._nodes[index].register_prehook(
                    _recorder(weakref.ref(self), index)
                )
        self.expect_hooks()

    def expect_hooks(self) -> None:
        """Take the hooks registered since the last look as known: they are on no parameter."""
        self._num_hooks = RemovableHandle.next_id

    def record(self, index: int) -> None:
        """Note how a parameter is just before a backward accumulates its gradient."""
        task = _current_graph_task_id()
        if task != self._task:
            self._task = task
            self._versions_before.clear()
        self._versions_before[index] = self._params[index]._version

    def require_none(self) -> None:
        """Raise RuntimeError if the backward that ends has changed parameters or taken their gradients."""
        if not self._versions_before or self._task != _current_graph_task_id():
            return
        before, params = self._versions_before, self._params
        found = [
            self._names[index]
            for index, version in before.items()
            if params[index]._version != version or params[index].grad is None
        ]
        before.clear()
        if found:
            raise RuntimeError(errors.stepped_in_backward(found))

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()


def _recorder(watcher: weakref.ref[StepsInBackward], index: int) -> Callable[[Sequence[Any]], None]:
    # The node must not keep the watcher alive, which holds the node.
    @not_compiled
    def hook(gradients: Sequence[Any]) -> None:
        living = watcher()
        if living is not None and gradients[0] is not None:
            living.record(index)

    return hook
