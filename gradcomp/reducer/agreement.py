"""What all ranks take from one of them, the order of the buckets, and what they must have in common: the hook."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from . import errors

# Those for which the state None means the default group. Another hook may find its group where it likes.
_ALL_REDUCE_HOOKS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")

_UNNAMED = re.compile(r"(functools\.partial\(|<[\w.]+ object at ).*(?=\))")


def agree_on_order(order: Sequence[int], device: torch.device, group: dist.ProcessGroup) -> list[int]:
    """Rank 0's order, on every rank."""
    agreed = torch.tensor(order, dtype=torch.int64, device=device)
    dist.broadcast(agreed, src=dist.get_global_rank(group, 0), group=group)
    # Waits for the device, once in a Reducer's life: the host cuts the buckets.
    result: list[int] = agreed.tolist()
    return result


def description_of(state: Any, hook: Any) -> dict[str, Any]:
    """What the ranks' registrations must have in common: the hook, the type of its state and the ranks of its group."""
    group = _group_of(state, hook)
    is_group = state is None or isinstance(state, dist.ProcessGroup)
    return {
        "hook": None if hook is None else _name_of(hook),
        "the state's type": None if is_group else _name_of(type(state)),
        "the state's process group": None
        if group is None
        else f"ranks {dist.get_process_group_ranks(group)}",
    }


def require_group(state: Any, hook: Any, group: dist.ProcessGroup) -> None:
    """Raise RuntimeError if the hook averages over other ranks than the group's."""
    other = _group_of(state, hook)
    if other is not None and other is not group:
        ranks, others = dist.get_process_group_ranks(group), dist.get_process_group_ranks(other)
        if ranks != others:
            raise RuntimeError(errors.other_group(_name_of(hook), others, ranks))


def _group_of(state: Any, hook: Any) -> dist.ProcessGroup | None:
    """The process group that the hook averages over, as far as its state tells."""
    if isinstance(state, dist.ProcessGroup):
        return state
    if state is None:
        tells = _name_of(hook).endswith(_ALL_REDUCE_HOOKS) and "default_hooks" in _name_of(hook)
    else:
        tells = hasattr(state, "process_group")
    group = getattr(state, "process_group", None) or dist.group.WORLD
    return group if tells and isinstance(group, dist.ProcessGroup) else None


def _name_of(function: Any) -> str:
    """A name that is the same in all processes: no address, and no difference between who started whom."""
    if isinstance(function, partial):
        return f"partial of {_name_of(function.func)}"
    if not hasattr(function, "__qualname__"):
        return f"an instance of {_name_of(type(function))}"
    # A spawned process has what its parent calls __main__ under another name.
    module = "__main__" if function.__module__ == "__mp_main__" else function.__module__
    # Around a hook without a name, that of a compress wrapper has the hook's repr, with addresses.
    return f"{module}.{_UNNAMED.sub('...', function.__qualname__)}"
