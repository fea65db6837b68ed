"""Conversion of the memory that torch's PowerSGD hook keeps."""

import math
from typing import Any

import torch

from gradcomp.compress.checkpoint import checked_tensor, require_keys
from gradcomp.compress.memories import Memory
from gradcomp.layout.matrices import is_compressed


def memories_of(state: Any) -> dict[int, dict[str, Any]]:
    """Return {bucket index: {"error", "directions"}} of torch's PowerSGDState, flat as there, or None.

    They are copies, because torch goes on writing to its own. Values that aren't finite become zero.
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
    """Return an entry of memories_of that a checkpoint has, copied. Sizes are checked when its bucket comes.

    Raises ValueError and KeyError for a misfit; what: the entry, in messages.
    """
    require_keys(what, memory, ("error", "directions"))
    return {
        name: None if each is None else checked_tensor(f"{what}: the {name}", each, None, None)
        for name, each in memory.items()
    }


def load(compressor: Any, memory: Memory, theirs: dict[str, Any]) -> bool:
    """Load a bucket's entry of memories_of into its compressor. Returns False if it doesn't fit."""
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
    """Convert torch's q_memory_dict of a bucket to directions; an empty list if it is another bucket's.

    It also holds vectors, as matrices of one column, where min_compression_rate allows.
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
