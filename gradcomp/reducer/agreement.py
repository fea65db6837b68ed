"""What the ranks agree on: rank 0's order of buckets, and equal parameters, options and hooks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.compress.consistency import require_same_on_all_ranks
from gradcomp.compress.operation import Operation

from . import errors
from .parameters import shapes_of

# The hooks for which the state None means the default group. Another hook may have its group from elsewhere.
_ALL_REDUCE_HOOKS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")

_UNNAMED = re.compile(r"(functools\.partial\(|<[\w.]+ object at ).*(?=\))")


def agree_on_order(order: Sequence[int], device: torch.device, group: dist.ProcessGroup) -> list[int]:
    """Return rank 0's order, on every rank."""
    agreed = torch.tensor(order, dtype=torch.int64, device=device)
    with Operation.of("get rank 0's order of buckets", group):
        dist.broadcast(agreed, src=dist.get_global_rank(group, 0), group=group)
    # Waits for the device, once in a Reducer's life: the host cuts the buckets.
    result: list[int] = agreed.tolist()
    return result


class Agreement:
    """Compares the ranks' parameters and options at construction, and their options and hooks in the first
    step.

    options: their names and values, the same on every rank. device: the device of the parameters.
    """

    def __init__(self, options: dict[str, Any], group: dist.ProcessGroup, device: torch.device):
        self._options, self._group, self._device = options, group, device
        self._is_reached = False

    def verify(self, names: Sequence[str], params: Sequence[torch.Tensor]) -> None:
        """Raise RuntimeError on every rank unless all have the same parameters and options."""
        parameters = {"parameters that require gradients": shapes_of(names, params)}
        whose = "the ranks have different models: what they average"
        self._require_same(whose, parameters, "Build the same model on every rank")
        self._require_same("what the Reducer was given", self._options, "Give every rank the same options")

    def renew(self) -> None:
        """Compare again in the next step."""
        self._is_reached = False

    def require(self, state: Any, hook: Any) -> None:
        """Raise RuntimeError on every rank unless all have the same hook, options and groups. Checked
        once."""
        if self._is_reached:
            return
        group = _group_of(state, hook)
        is_group = state is None or isinstance(state, dist.ProcessGroup)
        values = self._options | {
            "hook": None if hook is None else _name_of(hook),
            "the state's type": None if is_group else _name_of(type(state)),
            "the state's process group": None
            if group is None
            else f"ranks {dist.get_process_group_ranks(group)}",
        }
        advice = "Register the same hook on every rank, with the same options"
        self._require_same("what the Reducer averages with", values, advice)
        if group is not None and group is not self._group:
            ranks, others = dist.get_process_group_ranks(self._group), dist.get_process_group_ranks(group)
            if sorted(ranks) != sorted(others):
                raise RuntimeError(errors.other_group(_name_of(hook), others, ranks))
        self._is_reached = True

    def _require_same(self, whose: str, values: dict[str, Any], advice: str) -> None:
        require_same_on_all_ranks(whose, values, self._group, self._device, advice)


def _group_of(state: Any, hook: Any) -> dist.ProcessGroup | None:
    """Return the process group that the hook averages over, as far as its state tells."""
    if hook is None:
        return None
    if isinstance(state, dist.ProcessGroup):
        return state
    if state is None:
        tells = _name_of(hook).endswith(_ALL_REDUCE_HOOKS) and "default_hooks" in _name_of(hook)
    else:
        tells = hasattr(state, "process_group")
    group = getattr(state, "process_group", None) or dist.group.WORLD
    return group if tells and isinstance(group, dist.ProcessGroup) else None


def _name_of(function: Any) -> str:
    """Return a name that is the same in all processes: without addresses, and without spawning's module
    names."""
    if isinstance(function, partial):
        return f"partial of {_name_of(function.func)}"
    name = getattr(function, "__qualname__", None)
    if not isinstance(name, str):
        return f"an instance of {_name_of(type(function))}"
    # A spawned process has what its parent calls __main__ under another name.
    module = "__main__" if function.__module__ == "__mp_main__" else function.__module__
    # Around a hook without a name, that of a compress wrapper has the hook's repr, with addresses.
    return f"{module}.{_UNNAMED.sub('...', name)}"
