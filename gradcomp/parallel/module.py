"""The wrapped module: its parameters and buffers, its inputs and outputs, its compiled graphs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradcomp.comm.consistency import require_same_on_all_ranks


def named_parameters(module: nn.Module, ignored: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and parameters, without the ignored ones."""
    return ((name, param) for name, param in module.named_parameters() if name not in ignored)


def parameters_of(module: nn.Module) -> list[torch.Tensor]:
    """Return all parameters, without their names, which take most of Module.parameters()'s time."""
    return [param for each in module.modules() for param in each._parameters.values() if param is not None]


def buffers_of(module: nn.Module, ignored: set[str]) -> list[torch.Tensor]:
    """Return the buffers, without the ignored ones. Call it every time: a module may replace buffers."""
    if ignored:
        return [buffer for name, buffer in module.named_buffers() if name not in ignored]
    # Without their names, which take most of Module.buffers()'s time.
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
    """Return the value with its tensors, in tuples, lists and dicts too, on the device."""
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

    The gradient of an output that the loss leaves out is undefined. Its parameters become ready with it.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients


def through_sink(outputs: Any) -> Any:
    """Return copies of the outputs: a backward from any one reaches the parameters of all."""
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


@dataclass(frozen=True)
class _CompilersView:
    """The only attribute that torch.compile reads of the wrapper whose forward is running."""

    bucket_bytes_cap: int


@contextmanager
def graphs_end_with_buckets(cap_bytes: float) -> Iterator[None]:
    """Within the context torch.compile cuts graphs where a bucket of this cap is full.

    A compiled graph is one node of autograd: all its gradients come when its backward ends. So torch.compile
    cuts graphs in the forward of torch's wrapper (torch._dynamo.backends.distributed.DDPOptimizer). It finds
    the wrapper in a class attribute.
    """
    # The first graph's cap is torch's for the first bucket, and may not be larger than the others'.
    view = _CompilersView(max(int(cap_bytes), dist._DEFAULT_FIRST_BUCKET_BYTES))
    holder: Any = TorchDistributedDataParallel
    before = getattr(holder, "_active_ddp_module", None)  # of a wrapper around this one
    holder._active_ddp_module = view
    try:
        yield
    finally:
        holder._active_ddp_module = before
