"""Hooks in autograd: on parameters, on a forward's outputs, and at the end of a backward."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch._C import _current_graph_task_id

from . import errors
from .autograd_graph import reached, tensors_in
from .not_compiled import not_compiled

Owner = TypeVar("Owner")


class AccumulateGradHooks:
    """Hooks on the parameters' AccumulateGrad nodes.

    on_ready(owner, index) is called when a parameter's gradient is in its .grad, or is known to be undefined.
    The owner is held weakly; the nodes are held, which keeps them alive: nodes, one per parameter.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        owner: Owner,
        on_ready: Callable[[Owner, int], None],
    ):
        self._params, self._names = params, names
        self.nodes = _accumulators(params)
        living = weakref.ref(owner)
        self._handles = [
            node.register_hook(_hook(living, on_ready, index)) for index, node in enumerate(self.nodes)
        ]

    def out_of_reach(self, outputs: Any) -> set[int]:
        """Return the indices of the parameters that a backward from these outputs won't reach."""
        indices = {node: index for index, node in enumerate(self.nodes)}
        return set(range(len(self.nodes))) - reached(outputs, indices)

    def require_attached(self, indices: Iterable[int]) -> None:
        """Raise RuntimeError if autograd accumulates the gradient of one of these parameters past its hook.

        A parameter that is moved or converted gets another AccumulateGrad node. One that is frozen has none
        to miss.
        """
        indices = [index for index in indices if self._params[index].requires_grad]
        nodes = _accumulators([self._params[index] for index in indices])
        lost = [
            self._names[index]
            for index, node in zip(indices, nodes, strict=True)
            if node is not self.nodes[index]
        ]
        if lost:
            raise RuntimeError(errors.converted(lost))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Join(torch.autograd.Function):
    """Makes a node whose next functions are the inputs' nodes, which are so found at once."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)


def _accumulators(params: Sequence[torch.Tensor]) -> list[Any]:
    """Return the AccumulateGrad nodes of leaves that require gradients."""
    if not params:
        return []
    with torch.enable_grad():
        joined = _Join.apply(*params)  # type: ignore[no-untyped-call]
    return [node for node, _ in joined.grad_fn.next_functions]


def _hook(
    owner: weakref.ref[Owner], on_ready: Callable[[Owner, int], None], index: int
) -> Callable[..., None]:
    # The node must not keep the owner alive: Python's garbage collector can't see through it.
    @not_compiled
    def hook(*_: Any) -> None:
        living = owner()
        if living is not None:
            on_ready(living, index)

    return hook


def call_when_backward_starts(
    outputs: Any, owner: Owner, function: Callable[[Owner, Any], None], argument: Any
) -> bool:
    """Call function(owner, argument) whenever a backward comes through one of these outputs.

    Returns False if no output has a graph. The owner is held weakly. The hooks are on nodes, not on tensors,
    so they stay when an output is changed in place.
    """
    nodes: set[Any] = set()
    for tensor in tensors_in(outputs):
        nodes.add(tensor.grad_fn)
        # A view that is changed in place gets another node, behind which its base's is left.
        nodes.add(None if tensor._base is None else tensor._base.grad_fn)
    nodes.discard(None)
    living = weakref.ref(owner)

    @not_compiled
    def hook(*_: Any) -> None:
        owner = living()
        if owner is not None:
            function(owner, argument)

    for node in nodes:
        node.register_prehook(hook)
    return bool(nodes)


def call_at_end_of_backward(function: Callable[[], None], tasks: set[int]) -> None:
    """Call function at the end of the running backward, once per graph task.

    tasks: the tasks that have the call already. A backward within another one (reentrant checkpointing) is a
    task of its own. Raises RuntimeError in a compiled backward, which would not call the function.
    """
    task = _current_graph_task_id()
    if task not in tasks:
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if getattr(compiled, "in_compiled_autograd_region", False):
            raise RuntimeError(errors.COMPILED_AUTOGRAD)
        tasks.add(task)
        torch.autograd.Variable._execution_engine.queue_callback(function)


def is_within_another_backward() -> bool:
    """Return, in a function that call_at_end_of_backward calls, whether the backward that ends is within
    another one."""
    return torch._C._current_autograd_node() is not None
