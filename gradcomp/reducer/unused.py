"""Which parameters a step leaves out: a walk through the autograd graph, and what the ranks know together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist


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
