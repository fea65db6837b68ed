"""What a hook gives back, and the group it works in."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def group_or_default(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default one for None.

    Raises RuntimeError if there is none, TypeError for what is no group.
    """
    if process_group is None:
        process_group = dist.group.WORLD
    if process_group is None:
        raise RuntimeError(
            "there is no default process group: call torch.distributed.init_process_group first"
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group is {process_group!r}, but has to be a process group or None. Likely cause: new_group gives "
            "that to a rank that is not in the group"
        )
    return process_group


def checked_future(future: Any, hook: Any) -> torch.futures.Future[torch.Tensor]:
    """A hook's result. Raises RuntimeError if it isn't a Future."""
    if not isinstance(future, torch._C.Future):  # of which what a collective gives is one, too
        raise RuntimeError(
            f"the communication hook {_name_of(hook)} returned {type(future).__name__}, but has to return a "
            "torch.futures.Future that holds the averaged bucket"
        )
    return future  # type: ignore[return-value]


def result_of(future: Any, hook: Any, buffer: torch.Tensor) -> torch.Tensor:
    """Wait for a hook's future: the averaged bucket, 1-D, as long as the buffer. Raises RuntimeError if it isn't."""
    result: Any = checked_future(future, hook).wait()
    if isinstance(result, list | tuple) and len(result) == 1:
        (result,) = result
    if not isinstance(result, torch.Tensor) or result.numel() != buffer.numel():
        found = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise RuntimeError(
            f"the future of the communication hook {_name_of(hook)} holds {found}, but a bucket of "
            f"{buffer.numel()} elements has to come back"
        )
    return result.view(-1)


def _name_of(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", hook))
