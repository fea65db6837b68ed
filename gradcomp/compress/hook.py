"""The type of a communication hook, and the checks of its bucket and its result."""

from collections.abc import Callable
from typing import Any

import torch

from .operation import ExplainedError

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.

# Any: hooks that are written for torch say that they take torch.distributed.GradBucket.
Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


def require_dense_floats(hook_name: str, buffer: torch.Tensor) -> None:
    """Raise TypeError for a bucket that is not floating-point, or not dense."""
    if not buffer.is_floating_point():
        raise TypeError(f"{hook_name} compresses floating-point buckets, got {buffer.dtype}")
    if buffer.layout != torch.strided:
        raise TypeError(
            f"{hook_name} compresses dense buckets, got {buffer.layout}. Likely cause: "
            "nn.Embedding(sparse=True), for which torch's DDP makes a sparse bucket; gradcomp's averages it "
            "apart from the hook"
        )


def checked_future(future: Any, hook: Any) -> torch.futures.Future[torch.Tensor]:
    """Return the result of a hook. Raises RuntimeError if it isn't a Future."""
    if not isinstance(future, torch._C.Future):  # a collective's future is one, too
        raise ExplainedError(
            f"the communication hook {name_of(hook)} returned {type(future).__name__}, but has to return a "
            "torch.futures.Future that holds the averaged bucket"
        )
    return future  # type: ignore[return-value]


def result_of(future: Any, hook: Any, buffer: torch.Tensor) -> torch.Tensor:
    """Wait for a hook's future. Returns the averaged bucket, 1-D.

    Raises RuntimeError if the future doesn't hold one tensor of as many elements as the buffer.
    """
    result: Any = checked_future(future, hook).wait()
    if isinstance(result, list | tuple) and len(result) == 1:
        (result,) = result
    if not isinstance(result, torch.Tensor) or result.numel() != buffer.numel():
        found = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise ExplainedError(
            f"the future of the communication hook {name_of(hook)} holds {found}, but a bucket of "
            f"{buffer.numel()} elements has to come back"
        )
    return result.view(-1)


def name_of(hook: Any) -> str:
    """Return a hook's name in messages."""
    return str(getattr(hook, "__qualname__", hook))
