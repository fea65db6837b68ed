"""The contents of a checkpoint, the rank that its errors belong to, and the checks before loading.

A state_dict is checked as a whole before any of it is used. It may come from an untrusted file, from another
version, or from a container that has changed it. For example, torch.distributed.checkpoint turns integer keys
into strings, and fills only entries that the target already has.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..comm.process_group import joined_group
from ..rules import COUNT, FREQUENCY, RANK, SEED, WHOLE, Rule, check_fields, checked_field
from .compressor import Compressor, errors_in
from .memories import BucketMemories, Memory


def owner_of(process_group: Any) -> dict[str, Any] | None:
    """Return the owner of the errors of a state in this process group: {"rank", "world_size"}.

    Returns None if this process has no such group. Elsewhere, a "rank" of None marks the mean of all ranks'
    errors.
    """
    group = joined_group(process_group)
    return None if group is None else {"rank": group.rank(), "world_size": group.size()}


def another_ranks_errors(
    algorithm: str, errors_of: dict[str, Any] | None, group: dist.ProcessGroup
) -> str | None:
    """Return a warning if another rank saved the loaded errors, else None.

    errors_of: the owner of the loaded errors; see owner_of.
    """
    here = owner_of(group)
    if here is None or errors_of is None or errors_of["rank"] is None or errors_of == here:
        return None
    saved, now = (f"rank {each['rank']} of {each['world_size']}" for each in (errors_of, here))
    return (
        f"{algorithm}: the errors loaded on {now} belong to {saved}. If several ranks load the same "
        "errors, these count several times, and the other ranks' errors are lost. Save one checkpoint per "
        "rank; or one for all, or for another world size, with consolidated_state_dict(state)."
    )


VERSION = 1
PROGRESS = dict.fromkeys(
    ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report"), COUNT
)
DTYPE = Rule(
    "a floating-point dtype", lambda value: isinstance(value, torch.dtype) and value.is_floating_point
)
NOT_THROUGH_DCP = (
    "torch.distributed.checkpoint can't save a state's state_dict: save per_rank_state_dict(state), and load "
    "it with load_from_dcp"
)


@dataclass(frozen=True)
class Settings:
    """The settings that every state has, whatever its compressor.

    start_iter: steps of plain all-reduce before compression starts.
    random_seed: the seed for random choices, the same on all ranks.
    compression_stats_logging_frequency: steps between log lines with statistics.

    Raises ValueError for an invalid value.
    """

    start_iter: int = checked_field(2, WHOLE)
    random_seed: int = checked_field(0, SEED)
    compression_stats_logging_frequency: int = checked_field(10_000, FREQUENCY)

    def __post_init__(self) -> None:
        check_fields(self)


_SETTINGS = [each.name for each in fields(Settings)]
_KEYS = (
    *("version", "algorithm", "options", *_SETTINGS, *PROGRESS),
    *("errors_of", "parameters", "contents", "buckets"),
)
# "kind" holds a bucket's dtype and its compressor's options.
_BUCKET_KEYS = ("kind", "shapes", "parameters")


def progress_of(state: Any) -> dict[str, int]:
    """Return a state's progress: the step's number, and the statistics."""
    return {name: getattr(state, name) for name in PROGRESS}


def to_state_dict(
    algorithm: str, options: Any, settings: Settings, progress: Mapping[str, int], memories: BucketMemories
) -> dict[str, Any]:
    """Return a state_dict without the entry "errors_of".

    progress: see progress_of.
    """
    parameters, saved = memories.saved()
    buckets = {index: _bucket_entry(memory) for index, memory in enumerate(saved)}
    return {
        "version": VERSION,
        "algorithm": algorithm,
        "options": as_dict(options),
        **asdict(settings),
        **progress,
        "parameters": parameters,
        # Shows missing buckets: a container that fills only the target's entries leaves "buckets" empty.
        "contents": {"buckets": list(buckets)},
        "buckets": buckets,
    }


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return texts such as "bits from 8 to 4" for the values that differ."""
    return [
        f"{name} from {value!r} to {after[name]!r}" for name, value in before.items() if after[name] != value
    ]


def as_dict(options: Any) -> dict[str, Any]:
    """Return a compressor's options by name; an empty dict for None."""
    return asdict(options) if is_dataclass(options) and not isinstance(options, type) else {}


def compared(options: Any) -> dict[str, Any]:
    """Return the options that must be equal on all ranks, by name."""
    return {each.name: getattr(options, each.name) for each in _fields(type(options)) if each.compare}


def _fields(options_class: type) -> tuple[Any, ...]:
    return fields(options_class) if is_dataclass(options_class) else ()


def replaced(options: Any, settings: Settings, checked_dict: dict[str, Any], default: Settings) -> list[str]:
    """Name the options and settings of a state that a checked state_dict changes, except from their defaults.

    default: a new state's settings.

    Returns the texts of `changes`.
    """
    defaults = asdict(default)
    with suppress(TypeError, ValueError):  # options may have no default
        defaults |= as_dict(type(options)())
    own = {**as_dict(options), **asdict(settings)}
    given = {name: value for name, value in own.items() if name not in defaults or defaults[name] != value}
    return changes(given, {**checked_dict["options"], **asdict(settings_of(checked_dict))})


def settings_of(state_dict: dict[str, Any]) -> Settings:
    """Return a state_dict's settings."""
    return Settings(**{name: state_dict[name] for name in _SETTINGS})


def options_from(what: str, given: Any, options_class: type) -> Any:
    """Make a compressor's options from a dict.

    what: the dict's place in the state_dict, for messages; may be "".
    options_class: a dataclass, or NoneType for a compressor without options.

    An option that was added later has its default if it is missing. Raises KeyError for other missing and for
    unknown options; ValueError for invalid options, or for anything but a dict.
    """
    if isinstance(given, dict):
        optional = [each for each in _fields(options_class) if each.metadata.get("is_optional")]
        given = {**{each.name: each.default for each in optional}, **given}
    require_keys(what or "options", given, [each.name for each in _fields(options_class)])
    try:
        return options_class(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}" if what else str(error)) from error


def _bucket_entry(memory: Memory) -> dict[str, Any]:
    """Return a memory's entry in "buckets"."""
    return {
        "kind": {"dtype": memory.dtype, **as_dict(memory.options)},
        "shapes": list(memory.shapes),
        "parameters": list(memory.parameter_indices),
        **finite(memory.saved or {}),
    }


def finite(saved: dict[str, Any]) -> dict[str, Any]:
    """Replace errors that aren't finite by zeros, in place, because the next step treats them as zeros."""
    for error in errors_in(saved).values():
        error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return saved


def memories_of(state_dict: dict[str, Any], options_class: type) -> list[Memory]:
    """Return the memories in a checked state_dict."""
    memories = []
    for index, saved in state_dict["buckets"].items():
        options = dict(saved["kind"])
        dtype = options.pop("dtype")
        options = options_from(f"bucket {index}", options, options_class)
        memory = Memory(options, dtype, index, list(saved["shapes"]), list(saved["parameters"]))
        memory.saved = {name: value for name, value in saved.items() if name not in _BUCKET_KEYS} or None
        memories.append(memory)
    return memories


def has_errors(state_dict: dict[str, Any]) -> bool:
    """Return whether any memory in the state_dict has an error."""
    return any(
        memory.get("error") is not None
        for part in state_dict["contents"]
        for memory in state_dict[part].values()
    )


def checked(
    state_dict: Any, algorithm: str, compressor: type[Compressor], options_class: type
) -> dict[str, Any]:
    """Check a state_dict, and return it in plain types.

    algorithm, compressor: the state's algorithm and the class of its compressors.
    options_class: see options_from.

    Raises TypeError for anything but a state_dict; KeyError for missing and unknown keys; ValueError for
    another version, another algorithm, or any other value that doesn't fit.
    """
    require_version(state_dict)
    # First: another hook's file has other keys. A state may have had its compressor's name once.
    if state_dict.get("algorithm", algorithm) not in (algorithm, compressor.__name__):
        raise ValueError(
            f"the state_dict is of {state_dict['algorithm']!r}, but this state is of {algorithm!r}: load it "
            "into a state of the hook that saved it"
        )
    require_keys("the state_dict", state_dict, _KEYS)
    buckets = {
        index: _bucket(f"bucket {index}", memory, compressor, options_class)
        for index, memory in indexed("buckets", state_dict["buckets"])
    }
    parameters = [i for memory in buckets.values() for i in memory["parameters"]]
    if len(parameters) != len(set(parameters)):
        raise ValueError(
            f"the state_dict has parameters in several places of its buckets: {sorted(parameters)}"
        )
    return {
        **state_dict,
        "algorithm": algorithm,
        "options": as_dict(options_from("", state_dict["options"], options_class)),
        **asdict(settings_of(state_dict)),
        **{name: rule(name, state_dict[name]) for name, rule in PROGRESS.items()},
        "errors_of": checked_owner(state_dict["errors_of"]),
        "parameters": checked_identity(state_dict["parameters"], buckets),
        "contents": checked_contents(state_dict["contents"], "buckets", buckets),
        "buckets": buckets,
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


def checked_contents(contents: Any, name: str, memories: dict[int, Any]) -> dict[str, list[int]]:
    """Check "contents" for one dict of memories. Raises ValueError if it lists other indices.

    name: the dict's key in the state_dict.
    """
    found = {name: list(memories)}
    if not isinstance(contents, dict) or contents.get(name) != found[name]:
        raise ValueError(
            f"the state_dict should hold {contents}, but holds {found}. Likely cause: {NOT_THROUGH_DCP}"
        )
    return found


def _bucket(what: str, memory: Any, compressor: type[Compressor], options_class: type) -> dict[str, Any]:
    """Check one bucket's entry, and return it in plain types and copied tensors."""
    if not isinstance(memory, dict):
        raise ValueError(f"{what} is a {type(memory).__name__}, but must be a dict")
    state = {name: value for name, value in memory.items() if name not in _BUCKET_KEYS}
    require_keys(what, {name: memory[name] for name in memory if name in _BUCKET_KEYS}, _BUCKET_KEYS)
    kind, (shapes, parameters) = memory["kind"], checked_outline(what, memory)
    if not isinstance(kind, dict) or "dtype" not in kind:
        raise ValueError(f"{what}: kind is {kind!r}, but must be a dict with a dtype")
    dtype = DTYPE(f"{what}: dtype", kind["dtype"])
    options = {name: value for name, value in kind.items() if name != "dtype"}
    options = options_from(f"{what}: kind", options, options_class)
    if (error := state.pop("error", None)) is not None:
        error = checked_error(f"{what}: the error", error, shapes, dtype)
    for name, value in state.items():
        if isinstance(value, list) and len(value) != len(shapes):
            raise ValueError(f"{what}: {name} has {len(value)} entries for {len(shapes)} tensors")
        entries = [
            _entry(f"{what}: {name}", each) for each in (value if isinstance(value, list) else [value])
        ]
        state[name] = entries if isinstance(value, list) else entries[0]
    state |= {} if error is None else {"error": error}
    try:
        compressor.check_state(state, shapes, dtype, options)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    kind = {"dtype": dtype, **as_dict(options)}
    return {"kind": kind, "shapes": shapes, "parameters": parameters, **state}


def _entry(what: str, given: Any) -> torch.Tensor | None:
    """Check and copy a tensor of a compressor's state: any shape and dtype, but floats must be finite."""
    if given is None:
        return None
    if isinstance(given, torch.Tensor) and not given.is_floating_point():
        return given.detach().clone()
    return checked_tensor(what, given, getattr(given, "shape", None), None)


def require_error(state: dict[str, Any], known: Sequence[str]) -> None:
    """Raise ValueError for a compressor's state with unknown entries, or with entries but no "error".

    known: the names of the known entries.
    """
    if unknown := [name for name in state if name not in known]:
        raise ValueError(f"has the unknown {', '.join(map(repr, unknown))}")
    if state and "error" not in state:
        raise ValueError(f"has {' and '.join(state)} but no error")


def checked_outline(what: str, memory: dict[str, Any]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Check a bucket's shapes and parameters. Returns (shapes, parameters)."""
    shapes = [
        tuple(counts(f"{what}: a shape", shape)) for shape in as_list(f"{what}: shapes", memory["shapes"])
    ]
    parameters = counts(f"{what}: parameters", memory["parameters"])
    if len(parameters) != len(shapes):
        raise ValueError(f"{what} has {len(shapes)} shapes for {len(parameters)} parameters")
    return shapes, parameters


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


def indexed(name: str, part: Any) -> list[tuple[int, Any]]:
    """Return the (bucket index, memory) pairs of one dict of memories. Raises ValueError for other keys.

    name: the dict's key in the state_dict.
    """
    if not isinstance(part, dict):
        raise ValueError(f"{name} is a {type(part).__name__}, but must be a dict")
    for index in part:
        if type(index) is not int or index < 0:
            raise ValueError(
                f"{name} has the key {index!r}, but its keys must be ints. Likely cause: {NOT_THROUGH_DCP}"
            )
    return list(part.items())


def checked_owner(errors_of: Any) -> dict[str, Any] | None:
    """Check "errors_of", and return it in plain types. Raises ValueError for a rank ≥ the world size."""
    if errors_of is None:
        return None
    require_keys("errors_of", errors_of, ("rank", "world_size"))
    rank, world_size = errors_of["rank"], RANK("errors_of['world_size']", errors_of["world_size"])
    if rank is not None and (rank := COUNT("errors_of['rank']", rank)) >= world_size:
        raise ValueError(f"errors_of is rank {rank} of a world size of {world_size}")
    return {"rank": rank, "world_size": world_size}


def checked_identity(parameters: Any, buckets: Mapping[int, Any]) -> dict[str, Any]:
    """Check "parameters", and return it in plain types. It must identify every parameter of the buckets."""
    require_keys("parameters", parameters, ("names", "first_buckets"))
    names = dict(indexed("names", parameters["names"]))
    if not all(isinstance(name, str) for name in names.values()) or len(set(names.values())) < len(names):
        raise ValueError(f"names has {list(names.values())}, but must have a different str for every index")
    first_buckets: list[dict[str, Any]] = []
    for bucket in as_list("first_buckets", parameters["first_buckets"]):
        require_keys("a first bucket", bucket, ("parameters", "shapes"))
        shapes, indices = checked_outline("a first bucket", bucket)
        first_buckets.append({"parameters": indices, "shapes": shapes})
    known = [*names, *(i for each in first_buckets for i in each["parameters"])]
    used = [i for memory in buckets.values() for i in memory["parameters"]]
    if len(set(known)) < len(known) or not set(used) <= set(known):
        raise ValueError(
            f"the buckets have the parameters {sorted(used)}, but names and first_buckets identify "
            f"{sorted(known)}: each must be there once"
        )
    return {"names": names, "first_buckets": tuple(first_buckets)}


def as_list(what: str, given: Any) -> list[Any]:
    """Return a list or tuple as a list. Raises ValueError for anything else."""
    if not isinstance(given, list | tuple):
        raise ValueError(f"{what} is a {type(given).__name__}, but must be a list")
    return list(given)


def counts(what: str, given: Any) -> list[int]:
    """Return a list of whole numbers of at least 0. Raises ValueError for anything else."""
    return [COUNT(what, each) for each in as_list(what, given)]


def checked_error(what: str, given: Any, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a bucket's error, [numel], in the bucket's dtype or a wider one."""
    error = checked_tensor(what, given, (sum(map(math.prod, shapes)),), None)
    if torch.promote_types(error.dtype, dtype) != error.dtype:
        raise ValueError(f"{what} is of {error.dtype}, but must be of {dtype} or a wider dtype")
    return error


def checked_tensor(
    what: str, given: Any, shape: tuple[int, ...] | None, dtype: torch.dtype | None
) -> torch.Tensor:
    """Check a tensor, and return a copy. Raises ValueError unless it is dense, finite and fits.

    shape: the expected shape; None: any 1-D shape.
    dtype: the expected dtype; None: any floating-point dtype.
    """
    if not isinstance(given, torch.Tensor):
        raise ValueError(f"{what} is a {type(given).__name__}, but must be a tensor")
    if given.layout != torch.strided or given.is_meta:
        raise ValueError(f"{what} is {given.layout} on {given.device}, but must be dense and have values")
    dtype_fits = given.dtype == dtype if dtype else given.is_floating_point()
    if given.shape != (given.shape[:1] if shape is None else shape) or not dtype_fits:
        raise ValueError(
            f"{what} is {list(given.shape)} of {given.dtype}, but must be {list(shape or ['any length'])} of "
            f"{dtype or 'a floating-point dtype'}"
        )
    if not given.isfinite().all():
        raise ValueError(f"{what} has values that aren't finite")
    return given.detach().clone()
