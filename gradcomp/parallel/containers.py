"""Tensors in nested containers: a forward's inputs, moved to the device, and its outputs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors in tuples, lists and dicts on the device; containers keep their types."""
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
    """A copy, which may be changed in place. Outputs that the loss leaves out pass an undefined gradient on, and their
    parameters count as ready, without a gradient.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients


def through_sink(outputs: Any) -> Any:
    """The outputs, with all of their parameters within reach of any one of them."""
    leaves, structure = tree_flatten(outputs)
    places = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    ]
    if not places:
        return outputs
    passed = _Sink.apply(*(leaves[i] for i in places))  # type: ignore[no-untyped-call]
    for place, tensor in zip(places, passed, strict=True):
        leaves[place] = tensor
    return tree_unflatten(leaves, structure)
