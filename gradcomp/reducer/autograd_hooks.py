"""How a reducer learns from autograd: hooks on parameters and on outputs, and a call at the end of a backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from . import errors
from .unused import reached, tensors_in

Owner = TypeVar("Owner")


class AccumulateGradHooks:
    """Hooks on the parameters' AccumulateGrad nodes.

    on_ready(owner, number) is called when a parameter's gradient is in its .grad, or is known to be undefined. Holds the
    owner weakly, and the nodes, which live for as long as somebody does.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        owner: Owner,
        on_ready: Callable[[Owner, int], None],
    ):
        self._params, self._names = params, names
        self._nodes = _accumulators(params)
        living = weakref.ref(owner)
        self._handles = [
            node.register_hook(_hook(living, on_ready, number)) for number, node in enumerate(self._nodes)
        ]

    def out_of_reach(self, outputs: Any) -> set[int]:
        """The numbers of the parameters that a backward from these outputs won't reach."""
        numbers = {node: number for number, node in enumerate(self._nodes)}
        return set(range(len(self._nodes))) - reached(outputs, numbers)

    def require_attached(self, numbers: Iterable[int]) -> None:
        """Raise RuntimeError if autograd accumulates the gradient of one of these parameters past its hook.

        A parameter that is moved or converted gets another AccumulateGrad node. One that is frozen has none to miss.
        """
        numbers = [number for number in numbers if self._params[number].requires_grad]
        nodes = _accumulators([self._params[number] for number in numbers])
        lost = [
            self._names[number]
            for number, node in zip(numbers, nodes, strict=True)
            if node is not self._nodes[number]
        ]
        if lost:
            raise RuntimeError(errors.converted(lost))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Join(torch.autograd.Function):
    """A node behind which the inputs' nodes lie: to ask for all of them at once."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)


def _accumulators(params: Sequence[torch.Tensor]) -> list[Any]:
    """The AccumulateGrad nodes of leaves that require gradients."""
    if not params:
        return []
    with torch.enable_grad():
        joined = _Join.apply(*params)  # type: ignore[no-untyped-call]
    return [node for node, _ in joined.grad_fn.next_functions]


def _hook(
    owner: weakref.ref[Owner], on_ready: Callable[[Owner, int], None], number: int
) -> Callable[..., None]:
    # The node must not keep the owner alive: Python's garbage collector can't see through it.
    def hook(*_: Any) -> None:
        living = owner()
        if living is not None:
            on_ready(living, number)

    return hook


def call_when_backward_starts(
    outputs: Any, owner: Owner, function: Callable[[Owner, Any], None], argument: Any
) -> bool:
    """Call function(owner, argument) whenever a backward comes through one of these outputs. False if none has a graph.

    Holds the owner weakly. The hooks are the nodes', not the tensors': they stay where an output is changed in place.
    """
    nodes: set[Any] = set()
    for tensor in tensors_in(outputs):
        nodes.add(tensor.grad_fn)
        # A view that is changed in place gets another node, behind which its base's is left.
        nodes.add(None if tensor._base is None else tensor._base.grad_fn)
    nodes.discard(None)
    living = weakref.ref(owner)

    def hook(*_: Any) -> None:
        owner = living()
        if owner is not None:
            function(owner, argument)

    for node in nodes:
        node.register_prehook(hook)
    return bool(nodes)


def call_at_end_of_backward(function: Callable[[], None], tasks: set[int]) -> None:
    """Call function at the end of the running backward; tasks: those that have it already.

    A backward within another one (reentrant checkpointing) is a task of its own.
    """
    task = torch._C._current_graph_task_id()
    if task not in tasks:
        tasks.add(task)
        torch.autograd.Variable._execution_engine.queue_callback(function)


def is_within_another_backward() -> bool:
    """In a function that call_at_end_of_backward has called."""
    return torch._C._current_autograd_node() is not None
