"""What a PowerSGD state's checkpoint holds, and whether a given one may be loaded.

A state_dict is checked as a whole before anything of it is used. It may come from a file that anybody wrote, from another
version, or from a container that changes it on the way: torch.distributed.checkpoint makes strings of integer keys and
fills only what the target has already.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from gradcomp.compress.bucket_memory import Memory
from gradcomp.compress.powersgd import LowRankOptions

from .powersgd_options import (
    COUNT,
    EPSILON,
    FLAG,
    OPTIONS,
    PROGRESS,
    RANK,
    RATE,
    Rule,
    checked_options,
    options_of,
    progress_of,
)

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.

VERSION = 1
_PARTS = ("buckets", "from_torch")
_KEYS = ("version", *OPTIONS, *PROGRESS, "errors_of", "contents", *_PARTS)
# What the first checkpoints had, which no version was written to.
_KEYS_WITHOUT_VERSION = (*OPTIONS, *PROGRESS, *_PARTS)
_DTYPE = Rule(
    "a floating-point dtype", lambda value: isinstance(value, torch.dtype) and value.is_floating_point
)
_KIND = {
    "dtype": _DTYPE,
    "square": FLAG,
    "rank": RANK,
    "min_compression_rate": RATE,
    "error_feedback": FLAG,
    "warm_start": FLAG,
    "epsilon": EPSILON,
}
_NOT_THROUGH_DCP = (
    "torch.distributed.checkpoint can't save a state's state_dict: save per_rank_state_dict(state), and load it with "
    "load_from_dcp"
)


def to_state_dict(
    state: Any, errors_of: dict[str, Any] | None, memories: Iterable[Memory], from_torch: dict[int, Any]
) -> dict[str, Any]:
    """The state_dict of a state with these memories. errors_of: whose they are (see owner_of)."""
    buckets = {number: _of_memory(memory) for number, memory in enumerate(memories)}
    values = {"version": VERSION} | options_of(state) | progress_of(state)
    return values | {
        "errors_of": errors_of,
        # What has to be there: a container that fills only what the target has leaves the parts empty.
        "contents": {"buckets": list(buckets), "from_torch": list(from_torch)},
        "buckets": buckets,
        "from_torch": from_torch,
    }


def _of_memory(memory: Memory) -> dict[str, Any]:
    """What a state_dict has of a bucket: directions in the order of the layout's matrices."""
    saved, options = memory.saved or {}, memory.options
    error, directions = saved.get("error"), saved.get("directions")
    if error is not None:
        # The next step does so: an error that isn't finite counts as zero.
        error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    if isinstance(directions, list):
        directions = [directions[tensor] for tensor in options.tensors_of_matrices(memory.shapes)]
        if any(direction is None for direction in directions):  # of a memory that was put together
            directions = None
    elif directions is not None:
        directions = [directions]
    elif error is not None and options.square and not sum(memory.numels):
        directions = []
    return {
        "kind": {"dtype": memory.dtype, **asdict(options)},
        "shapes": list(memory.shapes),
        "parameters": list(memory.numbers),
        "error": error,
        "directions": directions,
    }


def memories_of(state_dict: dict[str, Any]) -> list[Memory]:
    """The memories that a checked state_dict has."""
    return [_memory_of(index, saved) for index, saved in state_dict["buckets"].items()]


def _memory_of(index: int, saved: dict[str, Any]) -> Memory:
    options = LowRankOptions(**{name: value for name, value in saved["kind"].items() if name != "dtype"})
    memory = Memory(options, saved["kind"]["dtype"], index, list(saved["shapes"]), list(saved["parameters"]))
    if saved["error"] is None:
        return memory
    memory.saved = {"error": saved["error"]}
    directions = saved["directions"]
    if directions and options.square:
        memory.saved["directions"] = directions[0]
    elif directions is not None:
        of_tensor = dict(zip(options.tensors_of_matrices(memory.shapes), directions, strict=True))
        memory.saved["directions"] = [of_tensor.get(index) for index in range(len(memory.shapes))]
    return memory


def has_errors(state_dict: dict[str, Any]) -> bool:
    return any(memory["error"] is not None for part in _PARTS for memory in state_dict[part].values())


def checked(state_dict: Any) -> dict[str, Any]:
    """A state_dict of this version, in plain types, from one of any version that is known.

    Raises TypeError for what is no state_dict, KeyError for missing and unknown keys, ValueError for whatever doesn't fit.
    """
    if not isinstance(state_dict, dict):
        raise TypeError(f"expected what state_dict() gives, got {type(state_dict).__name__}")
    if "version" in state_dict:
        if type(version := state_dict["version"]) is not int or version != VERSION:
            raise ValueError(
                f"the state_dict's version is {version!r}, but this gradcomp reads {VERSION}. Likely cause: a newer "
                "gradcomp saved it"
            )
        _require_keys("the state_dict", state_dict, _KEYS)
    else:
        _require_keys("the state_dict", state_dict, _KEYS_WITHOUT_VERSION)
    parts = {
        "buckets": {
            index: _bucket(f"bucket {index}", memory)
            for index, memory in _indexed("buckets", state_dict["buckets"])
        },
        "from_torch": {
            index: _from_torch(f"torch's bucket {index}", memory)
            for index, memory in _indexed("from_torch", state_dict["from_torch"])
        },
    }
    parameters = [number for memory in parts["buckets"].values() for number in memory["parameters"]]
    if len(parameters) != len(set(parameters)):
        raise ValueError(
            f"the state_dict has parameters in several places of its buckets: {sorted(parameters)}"
        )
    contents = {name: list(part) for name, part in parts.items()}
    if state_dict.get("contents", contents) != contents:
        raise ValueError(
            f"the state_dict should hold {state_dict['contents']}, but holds {contents}. Likely cause: {_NOT_THROUGH_DCP}"
        )
    return {
        "version": VERSION,
        **checked_options(state_dict),
        **{name: rule(name, state_dict[name]) for name, rule in PROGRESS.items()},
        "errors_of": _owner(state_dict.get("errors_of")),
        "contents": contents,
        **parts,
    }


def _require_keys(what: str, given: Any, expected: Iterable[str]) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"{what} is a {type(given).__name__}, but must be a dict")
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    if missing or unknown:
        found = [f"lacks {', '.join(missing)}"] if missing else []
        found += [f"has the unknown {', '.join(map(repr, unknown))}"] if unknown else []
        raise KeyError(f"{what} {' and '.join(found)}")


def _indexed(name: str, part: Any) -> list[tuple[int, Any]]:
    """The memories of one part of the state_dict, by the index of their bucket."""
    if not isinstance(part, dict):
        raise ValueError(f"{name} is a {type(part).__name__}, but must be a dict")
    for index in part:
        if type(index) is not int or index < 0:
            raise ValueError(
                f"{name} has the key {index!r}, but its keys must be ints. Likely cause: {_NOT_THROUGH_DCP}"
            )
    return list(part.items())


def _owner(errors_of: Any) -> dict[str, Any] | None:
    if errors_of is None:
        return None
    _require_keys("errors_of", errors_of, ("rank", "world_size"))
    rank, world_size = errors_of["rank"], RANK("errors_of['world_size']", errors_of["world_size"])
    if rank is not None and (rank := COUNT("errors_of['rank']", rank)) >= world_size:
        raise ValueError(f"errors_of is rank {rank} of a world size of {world_size}")
    return {"rank": rank, "world_size": world_size}


def _bucket(what: str, memory: Any) -> dict[str, Any]:
    """One bucket's memory, whose error and directions fit its shapes."""
    _require_keys(what, memory, ("kind", "shapes", "parameters", "error", "directions"))
    _require_keys(f"{what}: kind", memory["kind"], _KIND)
    kind = {name: rule(f"{what}: {name}", memory["kind"][name]) for name, rule in _KIND.items()}
    shapes = [
        tuple(_counts(f"{what}: a shape", shape)) for shape in _list(f"{what}: shapes", memory["shapes"])
    ]
    parameters = _counts(f"{what}: parameters", memory["parameters"])
    if len(parameters) != len(shapes):
        raise ValueError(f"{what} has {len(shapes)} shapes for {len(parameters)} parameters")
    error, directions = memory["error"], memory["directions"]
    if error is None and directions is not None:
        raise ValueError(f"{what} has directions but no error")
    if error is not None:
        error = _tensor(f"{what}: the error", error, (sum(map(math.prod, shapes)),), kind["dtype"])
    if directions is not None:
        options = LowRankOptions(**{name: value for name, value in kind.items() if name != "dtype"})
        given, matrices = _list(f"{what}: directions", directions), options.layout(shapes).matrices
        if len(given) != len(matrices):
            raise ValueError(f"{what} has {len(given)} directions for {len(matrices)} matrices")
        wide = torch.promote_types(kind["dtype"], torch.float32)
        directions = [
            _tensor(f"{what}: a direction", each, (matrix.cols, matrix.rank), wide)
            for each, matrix in zip(given, matrices, strict=True)
        ]
    checked = {"kind": kind, "shapes": shapes, "parameters": parameters}
    return checked | {"error": error, "directions": directions}


def _from_torch(what: str, memory: Any) -> dict[str, Any]:
    """A memory taken over from torch's hook, flat. Whether its sizes fit shows when its bucket comes."""
    _require_keys(what, memory, ("error", "directions"))
    return {
        name: None if each is None else _tensor(f"{what}: the {name}", each, None, None)
        for name, each in memory.items()
    }


def _list(what: str, given: Any) -> list[Any]:
    if not isinstance(given, list | tuple):
        raise ValueError(f"{what} is a {type(given).__name__}, but must be a list")
    return list(given)


def _counts(what: str, given: Any) -> list[int]:
    return [COUNT(what, each) for each in _list(what, given)]


def _tensor(what: str, given: Any, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> torch.Tensor:
    """The tensor, if it has this shape (None: flat), this dtype (None: any of floats) and finite values."""
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
    return given.detach()
