"""Tensors in nested containers: a forward's inputs, moved to the device, and its outputs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


def to_device(value: Any, device: torch.device) -> Any:
    """Return the value with tensors in tuples, lists and dicts on the device; containers keep their types."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(to_device(item, device) for item in value)
    if isinstance(value, Mapping):
        moved = {key: to_device(item, device) for key, item in value.items()}
        return moved if isinstance(value, dict) and type(value) is dict else type(value)(moved)  # type: ignore[call-arg]
    return value


class _Sink(torch.autograd.Function):
    """Copies tensors, so that users may change them in place.

    A tensor that the loss leaves out passes an undefined gradient on, with which its parameters become ready.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients


def through_sink(outputs: Any) -> Any:
    """Return the outputs such that a backward from any one of them reaches all of their parameters."""
    leaves, structure = tree_flatten(outputs)
    positions = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    ]
    if not positions:
        return outputs
    passed = _Sink.apply(*(leaves[i] for i in positions))  # type: ignore[no-untyped-call]
    for position, tensor in zip(positions, passed, strict=True):
        leaves[position] = tensor
    return tree_unflatten(leaves, structure)
