"""PowerSGD's memory from elsewhere: from torch's hook, and from a run with another number of ranks."""

import math
from typing import Any

import torch

from gradcomp import ops

from .powersgd_memory import Memory


def memories_of(state: Any) -> dict[int, dict[str, Any]]:
    """{index of a bucket: {"error", "directions"}} of torch's PowerSGDState, flat as it has them, or None."""
    return {
        index: {
            # Copies: torch goes on writing to its own.
            "error": state.error_dict[index].clone() if index in state.error_dict else None,
            "directions": state.q_memory_dict[index].clone() if index in state.q_memory_dict else None,
        }
        for index in {*state.error_dict, *state.q_memory_dict}
    }


def load(plan: "ops.LowRankPlan", memory: Memory, theirs: dict[str, Any]) -> bool:
    """Have the plan of a bucket's memory continue from what memories_of gave for it; False if it doesn't fit."""
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
    """torch's q_memory_dict of a bucket as our directions; none if it is of another bucket.

    torch has vectors in it too, as matrices of one column, where min_compression_rate lets it.
    """
    groups: dict[tuple[int, int], list[tuple[int, int, bool]]] = {}
    for shape in memory.shapes:
        rows, cols = (shape[0], math.prod(shape[1:])) if shape else (0, 0)
        rank = min(rows, cols, memory.kind["rank"])
        if (rows + cols) * rank * memory.kind["min_compression_rate"] < rows * cols:
            groups.setdefault((rows, cols), []).append((cols, rank, len(shape) > 1))
    theirs = [each for group in groups.values() for each in group]
    numels = [cols * rank for cols, rank, _ in theirs]
    if sum(numels) != flat.numel():
        return []
    parts = zip(flat.split(numels), theirs, strict=True)
    return [part.view(cols, rank) for part, (cols, rank, is_matrix) in parts if is_matrix]


def average_errors(state_dicts: list[dict[str, Any]]) -> dict[str, Any]:
    """One state_dict from those of all ranks of a run, for every rank of a run with any number of ranks.

    What the training still owes is the mean of the ranks' errors; with that mean on every rank, the new run's
    mean is the same. Raises ValueError for an empty list, for state_dicts of different steps or buckets, or for
    memories just taken over from torch; TypeError for states in place of their state_dicts.
    """
    if not state_dicts:
        raise ValueError("average_errors takes the state_dicts of all ranks, got none")
    for each in state_dicts:
        if not isinstance(each, dict):
            raise TypeError(f"average_errors takes what state_dict() gives, got {type(each).__name__}")
    if state_dicts[0]["from_torch"]:
        raise ValueError("average_errors: a state from from_torch has to make a compressed step first")
    saved = [(state_dict["iter"], sorted(state_dict["buckets"])) for state_dict in state_dicts]
    for rank, (step, buckets) in enumerate(saved):
        if (step, buckets) != saved[0]:
            raise ValueError(
                "average_errors takes what all ranks saved in one step, but number 0 is of step {}, with buckets {}, "
                "and number {} of step {}, with buckets {}".format(*saved[0], rank, step, buckets)
            )
    merged = {**state_dicts[0], "buckets": {}}
    for index, bucket in state_dicts[0]["buckets"].items():
        errors = [state_dict["buckets"][index]["error"] for state_dict in state_dicts]
        mean = errors[0]
        if mean is not None:
            mean = (sum(error.cpu().double() for error in errors) / len(errors)).to(mean)
        merged["buckets"][index] = {**bucket, "error": mean}
    return merged
