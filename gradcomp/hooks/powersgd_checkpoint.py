"""What a PowerSGD state's checkpoint holds, and the checks that a given one may be loaded.

The format is older than that of other states: it has options by torch's names, and directions in the order of
the layout's matrices.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from gradcomp.compress.checkpoint import (
    DTYPE,
    PROGRESS,
    VERSION,
    as_list,
    checked_error,
    checked_identity,
    checked_outline,
    checked_owner,
    checked_tensor,
    finite,
    indexed,
    progress_of,
    require_contents,
    require_keys,
    require_version,
)
from gradcomp.compress.memories import Memory
from gradcomp.compress.powersgd import LowRankOptions
from gradcomp.rules import BITS, EPSILON, FACTOR_DTYPE, FLAG, RANK, RATE, UNCOMPRESSED_DTYPE

from .powersgd_options import OPTIONS, checked_options, options_of

_PARTS = ("buckets", "from_torch")
_KEYS = ("version", *OPTIONS, *PROGRESS, "errors_of", "parameters", "contents", *_PARTS)
# What a bucket's "kind" holds: its dtype and its compressor's options.
_KIND_RULES = {
    "dtype": DTYPE,
    "square": FLAG,
    "rank": RANK,
    "min_compression_rate": RATE,
    "error_feedback": FLAG,
    "warm_start": FLAG,
    "epsilon": EPSILON,
    "factor_dtype": FACTOR_DTYPE,
    "uncompressed_dtype": UNCOMPRESSED_DTYPE,
    "start_bits": BITS,
}


def to_state_dict(
    state: Any,
    errors_of: dict[str, Any] | None,
    parameters: dict[str, Any],
    memories: Iterable[Memory],
    from_torch: dict[int, Any],
) -> dict[str, Any]:
    """Return the state_dict of a state with these memories. errors_of: see owner_of. parameters: see
    ParameterIdentity.of.
    """
    buckets = {index: _bucket_entry(memory) for index, memory in enumerate(memories)}
    values = {"version": VERSION} | options_of(state) | progress_of(state)
    return values | {
        "errors_of": errors_of,
        "parameters": parameters,
        # Shows what is missing: a container that fills only the target's own entries leaves the parts empty.
        "contents": {"buckets": list(buckets), "from_torch": list(from_torch)},
        "buckets": buckets,
        "from_torch": from_torch,
    }


def _bucket_entry(memory: Memory) -> dict[str, Any]:
    """Return a memory's entry in "buckets", with directions in the order of the layout's matrices."""
    saved, options = finite(memory.saved or {}), memory.options
    error, directions = saved.get("error"), saved.get("directions")
    if isinstance(directions, list):
        directions = [
            directions[tensor] for tensor in options.tensors_of_matrices(memory.shapes, memory.dtype)
        ]
        if any(direction is None for direction in directions):  # the memory was merged from several
            directions = None
    elif directions is not None:
        directions = [directions]
    elif error is not None and options.square and not sum(memory.numels):
        directions = []
    return {
        "kind": {"dtype": memory.dtype, **asdict(options)},
        "shapes": list(memory.shapes),
        "parameters": list(memory.parameter_indices),
        "error": error,
        "shard_error": saved.get("shard_error"),
        "directions": directions,
    }


def memories_of(state_dict: dict[str, Any]) -> list[Memory]:
    """Return the memories in a checked state_dict."""
    return [_memory_of(index, saved) for index, saved in state_dict["buckets"].items()]


def _options_of(kind: dict[str, Any]) -> LowRankOptions:
    """Return the options in a bucket's "kind"."""
    return LowRankOptions(**{name: value for name, value in kind.items() if name != "dtype"})


def _memory_of(index: int, saved: dict[str, Any]) -> Memory:
    """Return the memory that a checked entry of "buckets" describes."""
    options = _options_of(saved["kind"])
    memory = Memory(options, saved["kind"]["dtype"], index, list(saved["shapes"]), list(saved["parameters"]))
    if saved["error"] is None:
        return memory
    memory.saved = {name: saved[name] for name in ("error", "shard_error") if saved[name] is not None}
    directions = saved["directions"]
    if directions and options.square:
        memory.saved["directions"] = directions[0]
    elif directions is not None:
        by_tensor = dict(
            zip(options.tensors_of_matrices(memory.shapes, memory.dtype), directions, strict=True)
        )
        memory.saved["directions"] = [by_tensor.get(index) for index in range(len(memory.shapes))]
    return memory


def checked(state_dict: Any) -> dict[str, Any]:
    """Return a state_dict of this version, in plain types, from one of any known version.

    Raises TypeError for anything but a state_dict, KeyError for missing and unknown keys, ValueError for any
    other misfit.
    """
    require_version(state_dict)
    require_keys("the state_dict", state_dict, _KEYS)
    parts = {
        "buckets": {
            index: _bucket(f"bucket {index}", memory)
            for index, memory in indexed("buckets", state_dict["buckets"])
        },
        "from_torch": {
            index: _from_torch(f"torch's bucket {index}", memory)
            for index, memory in indexed("from_torch", state_dict["from_torch"])
        },
    }
    require_contents(state_dict, parts)
    return {
        "version": VERSION,
        **checked_options(state_dict),
        **{name: rule(name, state_dict[name]) for name, rule in PROGRESS.items()},
        "errors_of": checked_owner(state_dict["errors_of"]),
        "parameters": checked_identity(state_dict["parameters"], parts["buckets"]),
        "contents": {name: list(part) for name, part in parts.items()},
        **parts,
    }


def _bucket(what: str, memory: Any) -> dict[str, Any]:
    """Return one bucket's entry, whose error and directions fit its shapes."""
    require_keys(what, memory, ("kind", "shapes", "parameters", "error", "shard_error", "directions"))
    require_keys(f"{what}: kind", memory["kind"], _KIND_RULES)
    kind = {name: rule(f"{what}: {name}", memory["kind"][name]) for name, rule in _KIND_RULES.items()}
    shapes, parameters = checked_outline(what, memory)
    errors, directions = (
        {"error": memory["error"], "shard_error": memory["shard_error"]},
        memory["directions"],
    )
    if errors["error"] is None and (directions is not None or errors["shard_error"] is not None):
        raise ValueError(f"{what} has directions or a shard_error but no error")
    for name, error in errors.items():
        if error is not None:
            numel = sum(map(math.prod, shapes))
            errors[name] = checked_error(f"{what}: the {name}", error, numel, kind["dtype"])
    if directions is not None:
        options = _options_of(kind)
        given, matrices = (
            as_list(f"{what}: directions", directions),
            options.layout(shapes, kind["dtype"]).matrices,
        )
        if len(given) != len(matrices):
            raise ValueError(f"{what} has {len(given)} directions for {len(matrices)} matrices")
        wide = torch.promote_types(kind["dtype"], torch.float32)
        directions = [
            checked_tensor(f"{what}: a direction", each, (matrix.cols, matrix.rank), wide)
            for each, matrix in zip(given, matrices, strict=True)
        ]
    return {"kind": kind, "shapes": shapes, "parameters": parameters, **errors, "directions": directions}


def _from_torch(what: str, memory: Any) -> dict[str, Any]:
    """Return a memory of torch's hook, flat. Its sizes are checked when its bucket comes."""
    require_keys(what, memory, ("error", "directions"))
    return {
        name: None if each is None else checked_tensor(f"{what}: the {name}", each, None, None)
        for name, each in memory.items()
    }
