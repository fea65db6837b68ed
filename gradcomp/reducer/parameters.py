"""The reducer's parameters: which they are, that all ranks have the same, and what gradients they may have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def named_parameters(
    params: Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
) -> tuple[list[str], list[torch.Tensor]]:
    """Names and tensors of those that require gradients, each once. Raises ValueError if there are none."""
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    seen: set[int] = set()
    for number, item in enumerate(params):
        name, param = item if isinstance(item, tuple) else (f"number {number}", item)
        if not isinstance(param, torch.Tensor):
            raise TypeError(
                f"Reducer takes parameters, or (name, parameter) pairs, got {type(param).__name__}"
            )
        if param.requires_grad and id(param) not in seen:
            seen.add(id(param))
            names.append(name)
            tensors.append(param)
    if not tensors:
        raise ValueError("Reducer got no parameter that requires gradients")
    return names, tensors


def verify_parameters(
    parameters: Sequence[torch.Tensor], names: Sequence[str], group: dist.ProcessGroup
) -> None:
    """Raise RuntimeError on every rank unless all have parameters of the same number, names, shapes and dtypes."""
    mine = [(name, tuple(p.shape), str(p.dtype)) for name, p in zip(names, parameters, strict=True)]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        if len(theirs) != len(first):
            raise RuntimeError(
                f"the ranks have different models: rank 0 has {len(first)} parameters that require gradients, "
                f"rank {rank} has {len(theirs)}. Build the same model on every rank"
            )
        for number, (ours, other) in enumerate(zip(first, theirs, strict=True)):
            if ours != other:
                raise RuntimeError(
                    f"the ranks have different models: parameter {number} is {ours[0]}, {list(ours[1])} in "
                    f"{ours[2]}, on rank 0, but {other[0]}, {list(other[1])} in {other[2]}, on rank {rank}. Build "
                    "the same model on every rank"
                )


Kind = tuple[torch.layout, torch.dtype, torch.device]


def kind_of_gradient(param: torch.Tensor, is_sparse: bool = False) -> Kind:
    return torch.sparse_coo if is_sparse else torch.strided, param.dtype, param.device


def check_gradient(gradient: torch.Tensor | None, expected: Kind, name: str) -> None:
    """Raise RuntimeError for a gradient of another layout, dtype or device than its parameter had at construction."""
    if gradient is None or (gradient.layout, gradient.dtype, gradient.device) == expected:
        return
    if gradient.layout != expected[0]:
        raise RuntimeError(
            f"parameter {name} has a {'dense' if gradient.layout == torch.strided else 'sparse'} gradient: name "
            "parameters with sparse gradients, and only those, in Reducer(sparse_params=...)"
        )
    raise RuntimeError(
        f"the gradient of parameter {name} is {gradient.dtype} on {gradient.device}, but its bucket has {expected[1]} "
        f"on {expected[2]}. Likely cause: a hook has converted or moved the gradient"
    )
