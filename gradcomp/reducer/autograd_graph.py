"""A walk through the autograd graph: which parameters a backward from a forward's outputs reaches."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

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
    """Yield the tensors in nested containers and dataclasses, and those with a graph in other objects'
    attributes.

    Such an object may be a distribution, which computes a sample or a likelihood from its attributes on
    request.
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
    """Yield what an output consists of, each with whether it is an attribute of an object, or within one."""
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

    accumulators: a parameter's AccumulateGrad node -> its index. The caller keeps the nodes alive: a node's
    Python object is the same only for as long as a reference to it exists.
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
