"""Autograd: hooks on parameters and outputs, the end of a backward, parameters reached or changed by it."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C import _current_graph_task_id
from torch._C._dynamo import eval_frame
from torch.utils.hooks import RemovableHandle

from . import errors

Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled(function: Function, *, recursive: bool = True) -> Function:
    """Make torch.compile leave this function alone, and with recursive the functions that it calls, too.

    torch.compiler.disable(recursive=...) does this, but its imports take seconds. It is used only where torch
    has other private names.
    """
    try:
        action = eval_frame._FrameAction
        within = action.SKIP if recursive else action.DEFAULT
        strategy = eval_frame._FrameExecStrategy(action.SKIP, within)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except AttributeError:
        disabled: Function = torch.compiler.disable(function, recursive=recursive)
        return disabled
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


# Types whose attributes hold no tensors of a forward: modules hold parameters there.
_NOT_OUTPUTS = (
    nn.Module,
    type,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    str,
    bytes,
    int,
    float,
)


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


def _held_by(item: Any, is_attribute: bool) -> Iterator[tuple[Any, bool]]:
    """Yield an output's parts, each with whether it is an object's attribute, or within one."""
    if item is None or isinstance(item, _NOT_OUTPUTS):
        return
    if isinstance(item, Mapping):
        yield from ((each, is_attribute) for each in item.values())
    elif isinstance(item, tuple | list | set | frozenset | deque):
        yield from ((each, is_attribute) for each in item)
    elif dataclasses.is_dataclass(item):
        fields = dataclasses.fields(item)
        yield from ((getattr(item, field.name, None), is_attribute) for field in fields)
    else:
        slots = [name for base in type(item).__mro__ for name in _slots_of(base)]
        held = [*getattr(item, "__dict__", {}).values(), *(getattr(item, name, None) for name in slots)]
        yield from ((each, True) for each in held)


def _slots_of(base: type) -> tuple[str, ...]:
    slots = base.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def reached(outputs: Any, accumulators: Mapping[Any, int]) -> set[int]:
    """Return the indices of the parameters that the outputs depend on.

    accumulators: a parameter's AccumulateGrad node -> the parameter's index. The caller keeps the nodes
        alive: autograd makes another Python object for a node when no reference to the last one exists.
    """
    found: set[int] = set()
    waiting = [tensor.grad_fn for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
    leaves = {id(tensor) for tensor in tensors_in(outputs) if tensor.grad_fn is None and tensor.requires_grad}
    for node, index in accumulators.items():
        if id(getattr(node, "variable", None)) in leaves:
            found.add(index)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node in accumulators:
            found.add(accumulators[node])
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


Owner = TypeVar("Owner")


class AccumulateGradHooks:
    """Hooks on the parameters' AccumulateGrad nodes.

    on_ready(owner, index): called when a parameter's gradient is in its .grad, or is known to be undefined.
    owner: held weakly.
    nodes: one per parameter, kept alive here.
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
        """Raise RuntimeError if one of these parameters has lost its hook.

        A parameter that is moved or converted gets another AccumulateGrad node, without the hook. A frozen
        parameter has no node, and passes.
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
    """Makes one node that has the nodes of all inputs as its next functions."""

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

    Returns False if no output has a graph. The owner is held weakly. Nodes have the hooks, not tensors: so
    they stay when an output is changed in place.
    """
    nodes: set[Any] = set()
    for tensor in tensors_in(outputs):
        nodes.add(tensor.grad_fn)
        # A view that is changed in place gets another node, but its base's node stays in the graph.
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

    tasks: the graph tasks that will call it already. A backward within another one (reentrant checkpointing)
        is a task of its own.

    Raises RuntimeError in a compiled backward, which would not call the function.
    """
    task = _current_graph_task_id()
    if task not in tasks:
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if getattr(compiled, "in_compiled_autograd_region", False):
            raise RuntimeError(errors.COMPILED_AUTOGRAD)
        tasks.add(task)
        torch.autograd.Variable._execution_engine.queue_callback(function)


def is_within_another_backward() -> bool:
    """Return whether the backward that ends is within another one.

    Only for functions that call_at_end_of_backward calls.
    """
    return torch._C._current_autograd_node() is not None


class StepsInBackward:
    """Finds parameters that a hook of an optimizer changed in backward, before the ranks' mean was there.

    Such a hook is one of register_post_accumulate_grad_hook, or of torch's _apply_optimizer_in_backward. Only
    parameters with such hooks cost time. A hook that only reads is no error.

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
        # RemovableHandle counts the process's hooks. To ask every parameter takes a hundredth of a step.
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
        """Ignore the hooks registered since the last look: they are on no parameter."""
        self._num_hooks = RemovableHandle.next_id

    def record(self, index: int) -> None:
        """Note a parameter's version just before a backward accumulates its gradient."""
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
    # Weakly: the watcher holds the node.
    @not_compiled
    def hook(gradients: Sequence[Any]) -> None:
        living = watcher()
        if living is not None and gradients[0] is not None:
            living.record(index)

    return hook
