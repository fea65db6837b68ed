"""How a reducer learns from autograd: hooks on parameters, and a call at the end of a backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from .unused import reached

Owner = TypeVar("Owner")


class AccumulateGradHooks:
    """Hooks on the parameters' AccumulateGrad nodes.

    on_ready(owner, number) is called when a parameter's gradient is in its .grad, or is known to be undefined. Holds the
    owner weakly, and the nodes, which live for as long as somebody does.
    """

    def __init__(self, params: Sequence[torch.Tensor], owner: Owner, on_ready: Callable[[Owner, int], None]):
        self._nodes = [torch.autograd.graph.get_gradient_edge(param).node for param in params]
        living = weakref.ref(owner)
        self._handles = [
            node.register_hook(_hook(living, on_ready, number)) for number, node in enumerate(self._nodes)
        ]

    def out_of_reach(self, outputs: Any) -> set[int]:
        """The numbers of the parameters that a backward from these outputs won't reach."""
        numbers = {node: number for number, node in enumerate(self._nodes)}
        return set(range(len(self._nodes))) - reached(outputs, numbers)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _hook(
    owner: weakref.ref[Owner], on_ready: Callable[[Owner, int], None], number: int
) -> Callable[..., None]:
    # The node must not keep the owner alive: Python's garbage collector can't see through it.
    def hook(*_: Any) -> None:
        living = owner()
        if living is not None:
            on_ready(living, number)

    return hook


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
