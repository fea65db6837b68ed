"""Which parameters a backward pass from some outputs will reach: a walk through the autograd graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in any nesting of tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list | set | frozenset):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


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
