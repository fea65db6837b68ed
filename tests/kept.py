"""What a state, or a state_dict, keeps of parameters: errors and directions, flat and in order."""

import torch

from gradcomp.compress.powersgd import PowerSGDOptions


def entries_in(kept):
    return kept["parameters"] if isinstance(kept, dict) else kept.state


def error_in(kept):
    """Return all parameters' errors, [numel], in the order of buckets; None without errors."""
    errors = [entry["error"].reshape(-1) for entry in entries_in(kept).values() if "error" in entry]
    return torch.cat(errors) if errors else None


def directions_in(kept):
    """Return PowerSGD's directions of one bucket, in the order of its layout; None without directions."""
    entries = list(entries_in(kept).values())
    if square := [entry["square_direction"] for entry in entries if "square_direction" in entry]:
        return square
    if not any("direction" in entry for entry in entries):
        return None
    options = PowerSGDOptions(**kept["options"]) if isinstance(kept, dict) else kept.options
    errors = [entry["error"] for entry in entries]
    layout = options.layout([error.shape for error in errors], errors[0].dtype)
    return [entries[matrix.tensor]["direction"] for matrix in layout.matrices]


def entry_of(state, parameter):
    """Return what a state keeps of a parameter; None if it doesn't know it."""
    return state.state.get(state._states.keys.get(parameter))
