"""Which parameters a step leaves out: a walk through the autograd graph, and what the ranks know together."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# What has no tensors of a forward in its attributes: modules have parameters there.
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
    """All tensors in any nesting of containers and dataclasses; in other objects' attributes, all that have a graph.

    Such an object may be a distribution, whose sample or likelihood is computed from its attributes when it is asked for.
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
    """What an output consists of, and whether it is an attribute of an object, or within one."""
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
    """The numbers of those gradient accumulators that lie behind the outputs.

    accumulators: a parameter's AccumulateGrad node -> its number. The nodes have to be kept alive by the caller:
    a node's Python object is the same for as long as somebody holds it.
    """
    found: set[int] = set()
    waiting = [tensor.grad_fn for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
    leaves = {id(tensor) for tensor in tensors_in(outputs) if tensor.grad_fn is None and tensor.requires_grad}
    for node, number in accumulators.items():
        if id(getattr(node, "variable", None)) in leaves:
            found.add(number)
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


class UsedMap:
    """How many ranks used each parameter in a step, all-reduced asynchronously.

    used: the numbers of those that this rank used.
    """

    def __init__(self, used: set[int], num_params: int, device: torch.device, group: dist.ProcessGroup):
        mine = torch.zeros(num_params, dtype=torch.int32)
        mine[sorted(used)] = 1
        if device.type == "cuda":
            mine = mine.pin_memory()
        self._uses_all = len(used) == num_params
        self._counts = mine.to(device, non_blocking=True)
        self._work: Any = dist.all_reduce(self._counts, group=group, async_op=True)

    def unused(self) -> set[int]:
        """The parameters that no rank used. Waits."""
        self._work.wait()
        if self._uses_all:
            return set()
        # Asks the device, and only on a rank that left parameters out: which gradients to leave alone is known nowhere else.
        return {number for number, count in enumerate(self._counts.tolist()) if not count}
