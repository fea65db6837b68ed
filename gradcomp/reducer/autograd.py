"""Autograd: hooks on parameters and outputs, the end of a backward, parameters reached or changed by it."""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradcomp.comm.consistency import first_of
from gradcomp.comm.torch_private import (
    current_autograd_node,
    current_graph_task_id,
    has_hooks_in_backward,
    not_compiled,
    queue_callback,
)

# Types whose attributes hold no tensors of a forward: modules hold parameters there.
_CODE: tuple[type, ...] = (nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_NOT_OUTPUTS = (*_CODE, str, bytes, int, float)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and dataclasses, and tensors with a graph in other objects.

    For example in a distribution, which computes samples and likelihoods from its attributes on request.
    """
    waiting, seen = [(value, False)], {id(value): value}
    while waiting:
        item, is_attribute = waiting.pop()
        if isinstance(item, torch.Tensor):
            if item.grad_fn is not None or not is_attribute:
                yield item
            continue
        for inner, is_within in _held_by(item, is_attribute):
            if id(inner) not in seen:
                seen[id(inner)] = inner
                waiting.append((inner, is_within))


def _held_by(item: Any, is_attribute: bool) -> list[tuple[Any, bool]]:
    """Return an output's parts, each with whether it is an object's attribute, or within one."""
    if item is None or isinstance(item, _NOT_OUTPUTS):
        return []
    if isinstance(item, Mapping):
        held: Iterable[Any] = item.values()
    elif isinstance(item, tuple | list | set | frozenset | deque):
        held = item
    elif dataclasses.is_dataclass(item):
        held = [getattr(item, field.name, None) for field in dataclasses.fields(item)]
    else:
        slots = [base.__dict__.get("__slots__", ()) for base in type(item).__mro__]
        names = chain.from_iterable((each,) if isinstance(each, str) else each for each in slots)
        held = [*getattr(item, "__dict__", {}).values(), *(getattr(item, name, None) for name in names)]
        is_attribute = True
    return [(each, is_attribute) for each in held]


class AccumulateGradHooks:
    """Hooks on the parameters' AccumulateGrad nodes.

    on_ready(owner's weakref, index, ...): called when a parameter's gradient is in its .grad, or is known to
        be undefined.
    nodes: one per parameter, kept alive here: autograd makes another Python object for a node when no
        reference to the last one exists.

    Hooks before the nodes find parameters that a hook of an optimizer changed in backward, before the ranks'
    mean was there: one of register_post_accumulate_grad_hook, or of torch's _apply_optimizer_in_backward.
    Only parameters with such hooks cost time. A hook that only reads is no error.

    watched: handles of these parameters' hooks, by index.
    num_hooks: RemovableHandle.next_id, the number of the process's hooks, when watch() last asked every
        parameter, which takes a hundredth of a step.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], names: Sequence[str], owner: Any, on_ready: Callable[..., None]
    ):
        self._params, self._names = params, names
        self.nodes = _nodes_of(params)
        hook = partial(on_ready, weakref.ref(owner))
        self._handles = [node.register_hook(partial(hook, i)) for i, node in enumerate(self.nodes)]
        self.watched: dict[int, Any] = {}
        self._task = self.num_hooks = -1
        # Of parameters, just before a backward accumulated their gradients.
        self._versions_before: dict[int, int] = {}
        self.watch()

    # Under the name that torch's DDP has in a profiler.
    @torch.autograd.profiler.record_function("torch.distributed.ddp.reducer::search_unused_parameters")
    def out_of_reach(self, outputs: Any) -> set[int]:
        """Return the indices of the parameters that a backward from these outputs won't reach."""
        waiting = _nodes_of([tensor for tensor in tensors_in(outputs) if tensor.requires_grad])
        seen = set(waiting)
        while waiting:
            for following, _ in waiting.pop().next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return {index for index, node in enumerate(self.nodes) if node not in seen}

    def require_attached(self, indices: Iterable[int]) -> None:
        """Raise RuntimeError if one of these parameters has lost its hook.

        A parameter that is moved or converted gets another AccumulateGrad node, without the hook. A frozen
        parameter has no node, and passes.
        """
        indices = [index for index in indices if self._params[index].requires_grad]
        nodes = _nodes_of([self._params[index] for index in indices])
        lost = [index for index, node in zip(indices, nodes, strict=True) if node is not self.nodes[index]]
        if lost:
            raise RuntimeError(
                f"{listed([self._names[index] for index in lost])} no longer where gradients are averaged: "
                "autograd accumulates theirs elsewhere since they were moved or converted (.to(), .double(), "
                ".cuda(), other .data). Give the module its dtype and device before it is wrapped, and "
                "before a Reducer is constructed"
            )

    def watch(self) -> None:
        """Watch the parameters that have got hooks since the last call."""
        if self.num_hooks == RemovableHandle.next_id:
            return
        for index, param in enumerate(self._params):
            if index not in self.watched and has_hooks_in_backward(param):
                hook = partial(self._record, weakref.ref(self), index)  # weakly: this holds the node
                self.watched[index] = self.nodes[index].register_prehook(hook)
        self.num_hooks = RemovableHandle.next_id

    @staticmethod
    @not_compiled
    def _record(hooks: weakref.ref[AccumulateGradHooks], index: int, gradients: Sequence[Any]) -> None:
        """Note a parameter's version just before a backward accumulates its gradient."""
        self = hooks()
        if self is None or gradients[0] is None:
            return
        if (task := current_graph_task_id()) != self._task:
            self._task = task
            self._versions_before.clear()
        self._versions_before[index] = self._params[index]._version

    def require_no_steps(self) -> None:
        """Raise RuntimeError if the backward that ends has changed parameters or taken their gradients."""
        if self._task != current_graph_task_id():
            return
        before, self._versions_before = self._versions_before, {}
        stepped = [
            self._names[index]
            for index, version in before.items()
            if self._params[index]._version != version or self._params[index].grad is None
        ]
        if stepped:
            raise RuntimeError(
                f"{listed(stepped)} changed, or without a gradient, when backward ends, before the ranks' "
                "mean was there. Likely cause: an optimizer that steps in "
                "register_post_accumulate_grad_hook or in torch's _apply_optimizer_in_backward, with this "
                "rank's gradient. Step after backward(), when .grad is the mean; "
                "gradcomp.DistributedDataParallel steps optimizers of _apply_optimizer_in_backward at the "
                "right time, if they are attached before the forward"
            )

    def remove(self) -> None:
        for handle in (*self._handles, *self.watched.values()):
            handle.remove()


def _nodes_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the nodes of tensors that require gradients; a leaf's is its AccumulateGrad node."""
    with torch.enable_grad():
        return [each.grad_fn or each.view_as(each).grad_fn.next_functions[0][0] for each in tensors]  # type: ignore[union-attr]


def listed(names: Sequence[str]) -> str:
    """Return the subject of a sentence in an error: these parameters."""
    return f"parameters {first_of(names)} are"


def call_when_backward_starts(outputs: Any, hook: Callable[..., None]) -> bool:
    """Call the hook whenever a backward comes through one of these outputs.

    Returns False if no output has a graph. Hooks of nodes stay when an output is changed in place.
    """
    nodes: set[Any] = set()
    for tensor in tensors_in(outputs):
        nodes.add(tensor.grad_fn)
        # A view that is changed in place gets another node, but its base's node stays in the graph.
        nodes.add(None if tensor._base is None else tensor._base.grad_fn)
    nodes.discard(None)
    for node in nodes:
        node.register_prehook(hook)
    return bool(nodes)


def call_at_end_of_backward(function: Callable[[], None], tasks: set[int]) -> None:
    """Call function at the end of the backward that runs a node's hook here, once per graph task.

    tasks: the graph tasks that will call it already; a backward within another one is a task of its own.

    Raises RuntimeError in a compiled backward, which would not call the function.
    """
    task = current_graph_task_id()
    if task not in tasks:
        if current_autograd_node() is None:  # only autograd itself says in which node a hook runs
            raise RuntimeError(
                "compiled autograd (torch._dynamo.config.compiled_autograd) runs this backward, and does not "
                "tell a Reducer when it ends. Set torch._dynamo.config.compiled_autograd = False, or call "
                "backward() outside of the function that torch.compile compiles: forwards are compiled all "
                "the same. For a compiled backward use torch's DistributedDataParallel with "
                "torch._dynamo.config.optimize_ddp = 'python_reducer', where allreduce_hook, "
                "fp16_compress_hook and bf16_compress_hook of gradcomp run"
            )
        tasks.add(task)
        queue_callback(function)
