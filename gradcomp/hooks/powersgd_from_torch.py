"""Conversion of the errors and factors that torch's PowerSGD hook keeps."""

import math
from typing import Any

import torch

from gradcomp.compress.checkpoint import checked_tensor, require_keys
from gradcomp.compress.memories import Memory
from gradcomp.layout.matrices import is_compressed


def memories_of(state: Any) -> dict[int, dict[str, Any]]:
    """Return {bucket index: {"error": tensor, "directions": tensor}} of torch's PowerSGDState.

    The tensors are 1-D like torch's. They are copies, because torch continues to write to its own. An entry
    that torch lacks is None. Values that aren't finite become zero.
    """
    theirs = {"error": state.error_dict, "directions": state.q_memory_dict}
    return {
        index: {
            name: each[index].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) if index in each else None
            for name, each in theirs.items()
        }
        for index in sorted({*state.error_dict, *state.q_memory_dict})
    }


def checked(what: str, memory: Any) -> dict[str, Any]:
    """Check and copy one entry of memories_of from a checkpoint. Its sizes are checked when its bucket comes.

    what: the entry's name in messages.

    Raises KeyError for missing and unknown keys, ValueError for any other invalid entry.
    """
    require_keys(what, memory, ("error", "directions"))
    return {
        name: None if each is None else checked_tensor(f"{what}: the {name}", each, None, None)
        for name, each in memory.items()
    }


def load(compressor: Any, memory: Memory, theirs: dict[str, Any]) -> bool:
    """Load a bucket's entry of memories_of into the bucket's compressor.

    theirs: the entry.

    Returns False, and loads nothing, if the sizes don't fit.
    """
    plan = compressor.plan
    error = plan.error() if theirs["error"] is None else theirs["error"]
    directions = plan.directions()
    if theirs["directions"] is not None:
        directions = _split(theirs["directions"], memory)
    expected = [(matrix.cols, matrix.rank) for matrix in plan.layout.matrices]
    fits = error.numel() == plan.layout.numel and [tuple(each.shape) for each in directions] == expected
    if fits:
        plan.load(error, directions)
    return fits


def _split(flat: torch.Tensor, memory: Memory) -> list[torch.Tensor]:
    """Split a bucket's entry of torch's q_memory_dict into one Q [cols, rank] per matrix.

    torch also compresses vectors, as matrices of one column, where min_compression_rate allows; their Q are
    left out. Returns an empty list if the entry's size doesn't fit the bucket.
    """
    groups: dict[tuple[int, int], list[tuple[int, int, bool]]] = {}
    max_rank = memory.options.matrix_approximation_rank
    for shape in memory.shapes:
        rows, cols = (shape[0], math.prod(shape[1:])) if shape else (0, 0)
        if is_compressed((rows, cols), max_rank, memory.options.min_compression_rate):
            rank = min(rows, cols, max_rank)
            groups.setdefault((rows, cols), []).append((cols, rank, len(shape) > 1))
    theirs = [each for group in groups.values() for each in group]
    numels = [cols * rank for cols, rank, _ in theirs]
    if sum(numels) != flat.numel():
        return []
    parts = zip(flat.split(numels), theirs, strict=True)
    return [part.view(cols, rank) for part, (cols, rank, is_matrix) in parts if is_matrix]
