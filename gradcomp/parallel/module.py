"""The wrapped module: its parameters and buffers, and the tensors in its inputs and outputs."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradcomp.comm.consistency import require_same_on_all_ranks


def named_parameters(module: nn.Module, ignored: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and their names, without those ignored."""
    return ((name, param) for name, param in module.named_parameters() if name not in ignored)


def buffers_of(module: nn.Module, ignored: set[str]) -> list[torch.Tensor]:
    """Return the buffers, without those ignored. To be asked every time: a module may have replaced some."""
    if ignored:
        return [buffer for name, buffer in module.named_buffers() if name not in ignored]
    # Without their names, which take most of the time that Module.buffers() takes.
    unique = {id(buffer): buffer for each in module.modules() for buffer in each._buffers.values()}
    return [buffer for buffer in unique.values() if buffer is not None]


def sparse_weights(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters that have sparse gradients."""
    layers = (layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag))
    return [layer.weight for layer in layers if layer.sparse]


def require_same_buffers(
    module: nn.Module,
    ignored: set[str],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    in_forward: bool,
    at_construction: bool,
) -> None:
    """Raise RuntimeError on every rank unless all ranks synchronize the same buffers at the same times."""
    named = [each for each in module.named_buffers() if each[0] not in ignored]
    described: list[Any] = [(name, tuple(buffer.shape), buffer.dtype) for name, buffer in named]
    require_same_on_all_ranks(
        "what DistributedDataParallel was given",
        {
            "forward_sync_buffers (broadcast_buffers)": in_forward,
            "synchronizing buffers at construction": at_construction,
            "buffers": described if in_forward or at_construction else [],
        },
        group,
        device,
        "Build the same model on every rank, and wrap it with the same options",
    )


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
