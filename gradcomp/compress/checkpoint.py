"""The contents of a checkpoint, the rank that its errors belong to, and the checks before loading.

A state_dict is checked as a whole before any of it is used. It may come from an untrusted file, from another
version, or from a container that has changed it. For example, torch.distributed.checkpoint turns integer keys
into strings, and fills only entries that the target already has.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ..comm.consistency import first_of
from ..comm.process_group import joined_group
from ..rules import COUNT, RANK, SCALE
from .compressor import Compressor
from .parameter_states import Entries, Entry
from .settings import SETTINGS, Settings, as_dict, changes, fields_of


def owner_of(process_group: Any) -> dict[str, Any] | None:
    """Return the owner of the errors of a state in this process group: {"rank", "world_size"}.

    Returns None if this process has no such group. Elsewhere, a "rank" of None marks the mean of all ranks'
    errors.
    """
    group = joined_group(process_group)
    return None if group is None else {"rank": group.rank(), "world_size": group.size()}


VERSION = 1
PROGRESS = dict.fromkeys(
    ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report"), COUNT
)
NOT_THROUGH_DCP = (
    "torch.distributed.checkpoint can't save a state's state_dict: save per_rank_state_dict(state), and load "
    "it with load_from_dcp"
)
_KEYS = (
    *("version", "algorithm", "options", *SETTINGS, *PROGRESS),
    *("gradient_scale", "errors_of", "num_parameters", "parameters"),
)


def replaced(own: Settings, checked: dict[str, Any], default: Settings) -> list[str]:
    """Name the settings and options of a state that loading changes, except from their defaults.

    checked: the state_dict to load.
    default: a new state's settings.

    Returns the texts of `changes`.
    """
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
    """Check a state_dict, and return it in plain types.

    algorithm, compressor, options_class: the state's.

    Raises TypeError for anything but a state_dict; KeyError for missing and unknown keys; ValueError for
    another version, another algorithm, or any other value that doesn't fit.
    """
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
        **{name: rule(name, state_dict[name]) for name, rule in PROGRESS.items()},
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
