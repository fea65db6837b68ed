"""The contents of a checkpoint, the checks before loading, and checkpoints for another number of ranks.

A state_dict is checked as a whole before any of it is used. It may come from an untrusted file, from another
version, or from a container that has changed it. For example, torch.distributed.checkpoint turns integer keys
into strings, and fills only entries that the target already has.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from ..comm.consistency import first_of, require_all_ranks, require_same_on_all_ranks
from ..comm.process_group import Explaining, device_for, joined_group, resolve_group
from ..comm.torch_private import tree_map_only
from ..rules import COUNT, RANK, SCALE
from .compressor import Compressor
from .parameter_states import Entries, Entry
from .settings import SETTINGS, ConfiguredState, Settings, as_dict, changes, fields_of


def owner_of(process_group: Any) -> dict[str, Any] | None:
    """Return the owner of the errors of a state in this process group: {"rank", "world_size"}.

    Returns None if this process has no such group. Elsewhere, a "rank" of None marks the ranks' mean error.
    """
    group = joined_group(process_group)
    return None if group is None else {"rank": group.rank(), "world_size": group.size()}


VERSION = 1
PROGRESS = "iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report"
NOT_THROUGH_DCP = (
    "torch.distributed.checkpoint can't save a state's state_dict: save per_rank_state_dict(state), and load "
    "it with load_from_dcp"
)
_KEYS = (
    *("version", "algorithm", "options", *SETTINGS, *PROGRESS),
    *("gradient_scale", "errors_of", "num_parameters", "parameters"),
)


def replaced(own: Settings, checked: dict[str, Any], default: Settings) -> list[str]:
    """Return texts of what loading a checked state_dict changes, except from a new state's settings."""
    defaults = default.common()
    with suppress(TypeError, ValueError):  # options may have no default
        defaults |= as_dict(type(own.options)())
    before = own.by_name()
    given = {name: each for name, each in before.items() if name not in defaults or defaults[name] != each}
    return changes(given, {**checked, **checked["options"]})


def settings_of(checked: dict[str, Any], options_class: type) -> Settings:
    """Return a checked state_dict's settings. options_class: NoneType for a compressor without options."""
    return Settings(options_class(**checked["options"]), **{name: checked[name] for name in SETTINGS})


def checked(
    state_dict: Any, algorithm: str, compressor: type[Compressor], options_class: type
) -> dict[str, Any]:
    """Check a state_dict, and return it in plain types. Raises the errors of SavedState.load_state_dict."""
    require_version(state_dict)
    if not {"algorithm", "parameters"}.intersection(state_dict):
        raise KeyError(
            f"the state_dict lacks all that a hook's state saves; it has {first_of(list(state_dict))}. "
            "Likely cause: it is a whole checkpoint: load the entry that state.state_dict() gave"
        )
    # First: another hook's file has other keys. A state may have had its compressor's name once.
    if state_dict.get("algorithm", algorithm) not in (algorithm, compressor.__name__):
        raise ValueError(
            f"the state_dict is of {state_dict['algorithm']!r}, but this state is of {algorithm!r}: load it "
            "into a state of the hook that saved it"
        )
    state_dict = {"gradient_scale": None, **state_dict}  # which earlier commits left out
    require_keys("the state_dict", state_dict, _KEYS)
    scale = state_dict["gradient_scale"]
    options, names = state_dict["options"], [each.name for each in fields_of(options_class)]
    if isinstance(options, dict):  # of an earlier commit, maybe, which had within_dtype
        options = {name: options[name] for name in options if name != "within_dtype" or name in names}
    require_keys("options", options, names)
    try:
        settings = settings_of({**state_dict, "options": options}, options_class)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return {
        **state_dict,
        "algorithm": algorithm,
        "options": as_dict(settings.options),
        **settings.common(),
        **{name: COUNT(name, state_dict[name]) for name in PROGRESS},
        "gradient_scale": None if scale is None else SCALE("gradient_scale", scale),
        "errors_of": _checked_owner(state_dict["errors_of"]),
        "parameters": _checked_entries(state_dict["parameters"], state_dict["num_parameters"], compressor),
    }


def require_version(state_dict: Any) -> None:
    """Raise TypeError for anything but a state_dict, ValueError for another version."""
    if not isinstance(state_dict, dict):
        raise TypeError(f"expected what state_dict() gives, got {type(state_dict).__name__}")
    version = state_dict.get("version", VERSION)
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"the state_dict's version is {version!r}, but this gradcomp reads {VERSION}. Likely cause: a "
            "newer gradcomp saved it"
        )


def _checked_entries(entries: Any, expected: Any, compressor: type[Compressor]) -> Entries:
    """Check "parameters", and return it with copied tensors. expected: "num_parameters"."""
    if not isinstance(entries, dict):
        raise ValueError(f"parameters is a {type(entries).__name__}, but must be a dict")
    if type(expected) is not int or len(entries) != expected:
        raise ValueError(
            f"the state_dict should hold {expected!r} parameters, but holds {len(entries)}. Likely cause: "
            f"{NOT_THROUGH_DCP}"
        )
    return {key: _checked_entry(key, entry, compressor) for key, entry in entries.items()}


def _checked_entry(key: Any, entry: Any, compressor: type[Compressor]) -> Entry:
    """Check what is kept of one parameter, or of a bucket's parameters: dense tensors, finite if floats."""
    is_key = isinstance(key, str) or (isinstance(key, tuple) and all(isinstance(each, str) for each in key))
    if not is_key:
        raise ValueError(f"parameters has the key {key!r}, but its keys must be names. {NOT_THROUGH_DCP}")
    what = f"the parameter {key}"
    if not isinstance(entry, dict):
        raise ValueError(f"{what} has a {type(entry).__name__}, but must have a dict")
    of_bucket = isinstance(key, tuple)
    if of_bucket and "error" in entry:
        raise ValueError(f"{what} has an error, but errors belong to one parameter each")
    tensors: Entry = {}
    for name, given in entry.items():
        tensors[name] = _checked_tensor(f"{what}: {name}", given)
        if name == "error" and not given.is_floating_point():
            raise ValueError(f"{what}: error is of {given.dtype}, but must be of a floating-point dtype")
    try:
        compressor.check_entry(tensors, of_bucket=of_bucket)
    except ValueError as error:
        raise ValueError(f"{what} {error}") from error
    return tensors


def require_names(entry: Entry, known: Sequence[str]) -> None:
    """Raise ValueError for an entry with other names than the known ones."""
    if unknown := [name for name in entry if name not in known]:
        raise ValueError(f"has the unknown {', '.join(map(repr, unknown))}")


def require_keys(what: str, given: Any, expected: Iterable[str]) -> None:
    """Raise ValueError for anything but a dict, KeyError for missing and unknown keys."""
    if not isinstance(given, dict):
        raise ValueError(f"{what} is a {type(given).__name__}, but must be a dict")
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    if missing or unknown:
        found = [f"lacks {', '.join(missing)}"] if missing else []
        found += [f"has the unknown {', '.join(map(repr, unknown))}"] if unknown else []
        raise KeyError(f"{what} {' and '.join(found)}")


def _checked_owner(errors_of: Any) -> dict[str, Any] | None:
    """Check "errors_of", and return it in plain types. Raises ValueError for a rank ≥ the world size."""
    if errors_of is None:
        return None
    require_keys("errors_of", errors_of, ("rank", "world_size"))
    rank, world_size = errors_of["rank"], RANK("errors_of['world_size']", errors_of["world_size"])
    if rank is not None and (rank := COUNT("errors_of['rank']", rank)) >= world_size:
        raise ValueError(f"errors_of is rank {rank} of a world size of {world_size}")
    return {"rank": rank, "world_size": world_size}


def _checked_tensor(what: str, given: Any) -> torch.Tensor:
    """Check a tensor, and return a copy. Raises ValueError unless it is dense, and finite if it has floats.

    A copy of a tensor that repeats elements would be larger than its file: such a tensor isn't dense, either.
    Zeros that repeat one element are what shared_state_dict gives, and stay one element here.
    """
    if not isinstance(given, torch.Tensor):
        raise ValueError(f"{what} is a {type(given).__name__}, but must be a tensor")
    if given.layout != torch.strided or given.is_meta:
        raise ValueError(f"{what} is {given.layout} on {given.device}, but must be dense and have values")
    if given.untyped_storage().nbytes() < given.nbytes:
        if not any(given.stride()) and given[(0,) * given.dim()] == 0:
            return given.new_zeros(()).expand(given.shape)
        raise ValueError(
            f"{what} {list(given.shape)} takes {given.nbytes} bytes, but its storage has "
            f"{given.untyped_storage().nbytes()}: it must not repeat elements, as expanded tensors do"
        )
    if given.is_floating_point() and not given.isfinite().all():
        raise ValueError(f"{what} has values that aren't finite")
    return given.detach().clone()


# --- another number of ranks, and torch.distributed.checkpoint ---

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
    given = map(_on_cpu, map(checked, state_dicts))  # one rank's at a time
    if (merged := next(given, None)) is None:
        raise ValueError("average_errors takes the state_dicts of all ranks, got none")
    totals, num_ranks = [error.to(torch.float64, copy=True) for error in _errors(merged)], 1
    for state_dict in given:
        if (expected := _outline(merged)) != (found := _outline(state_dict)):
            raise ValueError(
                f"average_errors takes what all ranks saved in one step, but number 0 has {expected} and "
                f"number {num_ranks} has {found}"
            )
        for total, error in zip(totals, _errors(state_dict), strict=True):
            total += error
        num_ranks += 1
    for entry, total in zip(_with_errors(merged), totals, strict=True):
        entry["error"] = (total / num_ranks).to(entry["error"].dtype)
    return merged | {"errors_of": {"rank": None, "world_size": num_ranks}}


def consolidated_state_dict(state: Any) -> dict[str, Any]:
    """Return a state_dict with the mean of all ranks' errors, on the CPU. A run of any size can load it.

    A collective: all ranks of the state's process group must call it after the same step, and get the same
    result. It averages one parameter after another, in float64: see powerSGD_hook.average_errors.

    Raises RuntimeError without a process group, and on every rank if the ranks' steps or parameters differ.

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
        total = entry["error"].to(device, torch.float64, copy=True).contiguous()  # strides may differ
        with operation:
            dist.all_reduce(total, group=group)
        entry["error"] = (total / group.size()).to("cpu", entry["error"].dtype)
    return merged | {"errors_of": {"rank": None, "world_size": group.size()}}


def per_rank_state_dict(state: Any) -> dict[str, Any]:
    """Return this rank's state_dict for torch.distributed.checkpoint: {"rank 0 of 2": (the state_dict,)}.

    The state_dict's tensors are on the CPU. Every rank's entry has its own name, because
    torch.distributed.checkpoint keeps only one rank's entry of each name. The state_dict is in a tuple,
    because torch.distributed.checkpoint splits dicts and lists, turns their keys into strings, and loads only
    entries that the target already has. With several process groups, save each state under its own key.

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
    if not isinstance(state, ConfiguredState):
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
