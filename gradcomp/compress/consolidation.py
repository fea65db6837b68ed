"""Checkpoints for another number of ranks, and for torch.distributed.checkpoint."""

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from ..comm.consistency import require_all_ranks, require_same_on_all_ranks
from ..comm.process_group import Explaining, device_for, resolve_group
from ..comm.torch_private import tree_map_only
from .saved_state import SavedState

SAVE_ON_ALL_RANKS = (
    "Saving averages the errors of all ranks. Likely cause: a save on some ranks only, under `if "
    "is_main_process` say. Call accelerator.save_state, CommHook.state_dict or consolidated_state_dict on "
    "every rank, and only write the file on one"
)


def average_errors(
    state_dicts: Iterable[dict[str, Any]], checked: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    """Merge the state_dicts of all ranks into one; powerSGD_hook.average_errors explains it.

    checked: the method CompressorState.checked of a state, which checks a state_dict.
    """
    merged: dict[str, Any] = {}
    dtypes, num_ranks = [], 0
    for rank, given in enumerate(state_dicts):
        state_dict, num_ranks = _on_cpu(checked(given)), rank + 1
        if not merged:
            merged, dtypes = state_dict, [error.dtype for error in _errors(state_dict)]
        elif (expected := _outline(merged)) != (found := _outline(state_dict)):
            raise ValueError(
                f"average_errors takes what all ranks saved in one step, but number 0 has {expected} and "
                f"number {rank} has {found}"
            )
        for entry, error in zip(_with_errors(merged), _errors(state_dict), strict=True):
            entry["error"] = error.double() + (entry["error"] if rank else 0)
    if not merged:
        raise ValueError("average_errors takes the state_dicts of all ranks, got none")
    for entry, dtype in zip(_with_errors(merged), dtypes, strict=True):
        entry["error"] = (entry["error"] / num_ranks).to(dtype)
    return merged | {"errors_of": {"rank": None, "world_size": num_ranks}}


def consolidated_state_dict(state: Any) -> dict[str, Any]:
    """Return a state_dict with the mean of all ranks' errors, on the CPU. A run of any size can load it.

    A collective: every rank of the state's process group must call it, after the same step. All ranks get the
    same result. It averages one parameter after another, in float64; powerSGD_hook.average_errors explains
    the mean.

    Raises RuntimeError if there is no process group. Raises RuntimeError on every rank if the ranks' steps or
    parameters differ.

    Example::

        state_dict = consolidated_state_dict(state)
        if dist.get_rank() == 0:
            torch.save(state_dict, path)
        ...
        state.load_state_dict(torch.load(path))
    """
    group = _group(consolidated_state_dict, state)
    operation = Explaining.of(f"save the state of {state.algorithm}", group)
    require_all_ranks("consolidated_state_dict", operation.what, group, SAVE_ON_ALL_RANKS)
    mine = state.state_dict()
    merged: dict[str, Any] = _on_cpu(mine)
    device = device_for(group, _errors(mine))
    advice = "Call consolidated_state_dict on every rank, after the same step."
    require_same_on_all_ranks(f"{state.algorithm}'s state", _outline(merged), group, device, advice)
    for entry in _with_errors(merged):
        total = entry["error"].to(device, torch.float64, copy=True)
        with operation:
            dist.all_reduce(total, group=group)
        entry["error"] = (total / group.size()).to("cpu", entry["error"].dtype)
    return merged | {"errors_of": {"rank": None, "world_size": group.size()}}


def per_rank_state_dict(state: Any) -> dict[str, Any]:
    """Return this rank's state_dict for torch.distributed.checkpoint: {"rank 0 of 2": (the state_dict,)}.

    The state_dict's tensors are on the CPU. Every rank's entry has its own name, because
    torch.distributed.checkpoint keeps only one rank's entry of each name. The state_dict is in a tuple,
    because torch.distributed.checkpoint splits dicts and lists, turns their keys into strings, and loads only
    entries that the target already has. If several process groups have states, save each state under its own
    key.

    Example::

        dcp.save({"model": model.state_dict(), "powersgd": per_rank_state_dict(state)}, checkpoint_id=path)
    """
    group = _group(per_rank_state_dict, state)
    return {_name(group.rank(), group.size()): (_on_cpu(state.state_dict()),)}


def load_from_dcp(
    state: Any, checkpoint_id: str | os.PathLike[str], key: str = "powersgd", *, storage_reader: Any = None
) -> None:
    """Load a state that torch.distributed.checkpoint has saved from per_rank_state_dict.

    A collective: every rank must call it. If the number of ranks is unchanged, each rank gets its own errors.
    Otherwise all ranks get the mean of the saved errors, which are read one rank after another.

    state: the state to load into.
    checkpoint_id: the checkpoint's folder.
    key: the key of the saved entry, including the keys around it: "app.powersgd", for example.
    storage_reader: the checkpoint's reader; None for torch's FileSystemReader.

    Only load files you trust: torch.distributed.checkpoint unpickles without torch.load's safe default.

    Raises KeyError if the checkpoint has no such entry, and the errors of load_state_dict.
    """
    import torch.distributed.checkpoint as dcp  # takes half a second

    group = _group(load_from_dcp, state)
    require_all_ranks("load_from_dcp", f"load the state of {state.algorithm}", group, "Call it on every rank")
    reader = storage_reader or dcp.FileSystemReader(checkpoint_id)
    names = list(reader.read_metadata().state_dict_metadata)
    pattern = re.compile(re.escape(key) + r"\.rank \d+ of (\d+)")
    saved = [found for found in map(pattern.fullmatch, names) if found]
    if not saved:
        raise KeyError(
            f"the checkpoint {checkpoint_id} has no '{key}.{_name(0, group.size())}': save "
            f"{{{key!r}: per_rank_state_dict(state)}} with torch.distributed.checkpoint. It has "
            f"{', '.join(names[:8])}"
        )

    world_size = int(saved[0][1])

    def read(rank: int) -> Any:
        name = f"{key}.{_name(rank, world_size)}"
        target: dict[str, Any] = {name: None}
        dcp.load(target, storage_reader=reader, process_group=state.process_group)
        return target[name][0]

    if world_size == group.size():
        state.load_state_dict(read(group.rank()))
    else:
        state.load_state_dict(average_errors(map(read, range(world_size)), state.checked))


def _name(rank: int, world_size: int) -> str:
    return f"rank {rank} of {world_size}"


def _group(function: Any, state: Any) -> dist.ProcessGroup:
    if not isinstance(state, SavedState):
        raise TypeError(
            f"{function.__name__} takes the state of a compressing hook, got {type(state).__name__}"
        )
    return resolve_group(function.__name__, state.process_group, "state.process_group")


def _with_errors(state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries that have an error, in the same order on all ranks."""
    entries = sorted(state_dict["parameters"].items(), key=lambda pair: str(pair[0]))
    return [entry for _, entry in entries if "error" in entry]


def _errors(state_dict: dict[str, Any]) -> list[torch.Tensor]:
    return [entry["error"] for entry in _with_errors(state_dict)]


def _outline(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the values that must be equal on all ranks before their errors are averaged."""
    return {
        "step": state_dict["iter"],
        "gradient_scale": state_dict["gradient_scale"],
        "parameters": {
            str(key): {name: list(value.shape) for name, value in sorted(entry.items())}
            for key, entry in state_dict["parameters"].items()
        },
    }


def _on_cpu(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Copy nested dicts and lists, and move their tensors to the CPU, where every rank can load them."""
    found: dict[str, Any] = tree_map_only(torch.Tensor, torch.Tensor.cpu, state_dict)
    return found
