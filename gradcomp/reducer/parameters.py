"""The reducer's parameters: their names, what the ranks compare of them, and which gradients fit them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn


def named_parameters(
    params: Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
) -> tuple[list[str], list[torch.Tensor]]:
    """Return names and tensors of the parameters that require gradients, each once.

    Raises TypeError for what is no iterable of parameters, or of (name, parameter) pairs; ValueError if there
    are none.
    """
    if isinstance(params, nn.Module | torch.Tensor | Mapping):
        raise TypeError(_near_miss(params))
    if not isinstance(params, Iterable):
        raise TypeError(
            f"Reducer takes parameters, or (name, parameter) pairs, got {type(params).__name__}: "
            "model.parameters() has parentheses"
        )
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    seen: set[int] = set()
    for index, item in enumerate(params):
        name, param = item if isinstance(item, tuple) and len(item) == 2 else (f"number {index}", item)
        if not isinstance(param, torch.Tensor):
            raise TypeError(
                f"Reducer takes parameters, or (name, parameter) pairs, got {type(param).__name__}"
            )
        require_plain(name, param)
        if param.requires_grad and id(param) not in seen:
            if not param.is_leaf:
                raise ValueError(
                    f"Reducer averages what backward accumulates, but {name} is computed from other tensors "
                    f"({param.grad_fn}) and has no .grad: pass the parameters that it is computed from"
                )
            seen.add(id(param))
            names.append(name)
            tensors.append(param)
    if not tensors:
        raise ValueError(
            "Reducer got no parameter that requires gradients. If it was given model.parameters(), that may "
            "have been used up by an optimizer: call it again"
        )
    return names, tensors


def _near_miss(params: Any) -> str:
    """Say what to pass instead of a module, a tensor or a dict."""
    if isinstance(params, nn.Module):
        return "Reducer takes model.parameters() or model.named_parameters(), got the module itself"
    if isinstance(params, torch.Tensor):
        return "Reducer takes several parameters, got one tensor: pass it in a list"
    return "Reducer takes parameters, or (name, parameter) pairs, got a dict: pass its items()"


def require_plain(name: str, tensor: torch.Tensor, what: str = "parameter") -> None:
    """Raise TypeError for a DTensor."""
    # Importing the module takes long, and a DTensor exists only where it has been imported.
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(tensor, module.DTensor):
        raise TypeError(
            f"{what} {name} is a DTensor. Models of FSDP2 (fully_shard) and tensor parallelism average their "
            "own gradients: leave DistributedDataParallel and the Reducer out, or shard such a model over a "
            "2-D mesh"
        )


def shapes_of(
    names: Sequence[str], tensors: Sequence[torch.Tensor]
) -> list[tuple[str, tuple[int, ...], str]]:
    """Return what the ranks compare of tensors: names, shapes, dtypes."""
    return [
        (name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in zip(names, tensors, strict=True)
    ]


Description = tuple[torch.layout, torch.dtype, torch.device]


def expected_gradient(param: torch.Tensor, is_sparse: bool = False) -> Description:
    """Return the layout, dtype and device of a parameter's gradient."""
    return torch.sparse_coo if is_sparse else torch.strided, param.dtype, param.device


def check_gradient(gradient: torch.Tensor | None, expected: Description, name: str) -> None:
    """Raise RuntimeError for a gradient of another layout, dtype or device than expected."""
    if gradient is None or (gradient.layout, gradient.dtype, gradient.device) == expected:
        return
    if gradient.layout != expected[0]:
        raise RuntimeError(
            f"parameter {name} has a {'dense' if gradient.layout == torch.strided else 'sparse'} gradient: "
            "name parameters with sparse gradients, and only those, in Reducer(sparse_params=...)"
        )
    raise RuntimeError(
        f"the gradient of parameter {name} is {gradient.dtype} on {gradient.device}, but its bucket has "
        f"{expected[1]} on {expected[2]}. Likely cause: a hook has converted or moved the gradient"
    )
