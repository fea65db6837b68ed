"""What a wrapped module consists of: the parameters and buffers that all ranks have in common."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradcomp.compress.consistency import require_same_on_all_ranks


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
    """Raise RuntimeError on every rank unless all ranks synchronise the same buffers at the same times."""
    named = [each for each in module.named_buffers() if each[0] not in ignored]
    described: list[Any] = [(name, tuple(buffer.shape), buffer.dtype) for name, buffer in named]
    require_same_on_all_ranks(
        "what DistributedDataParallel was given",
        {
            "forward_sync_buffers (broadcast_buffers)": in_forward,
            "synchronising buffers at construction": at_construction,
            "buffers": described if in_forward or at_construction else [],
        },
        group,
        device,
        "Build the same model on every rank, and wrap it with the same options",
    )
