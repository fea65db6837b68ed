"""What a logger is told of a step: a recorder's rows of its buckets, and of the step as a whole."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

PREFIX = "gradcomp"
_OF_BUCKETS = (
    *("rate", "relative_error", "energy_kept", "time_ms"),
    *("gradient_norm", "average_norm", "error_norm"),
)
_OF_STEP = ("gradient_norm", "average_norm", "error_norm")


def step_values(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, values by name) of every step in the rows, which are in order."""
    for step, of_step in groupby(rows, key=lambda row: int(row["step"])):
        buckets = list(of_step)
        values = {f"{PREFIX}/{name}": value for name, value in whole_step(buckets).items()}
        for row in buckets:
            values |= {f"{PREFIX}/bucket {row['bucket']}/{name}": row[name] for name in _OF_BUCKETS}
        yield step, {name: value for name, value in values.items() if value is not None}


def whole_step(buckets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a step's bytes, rate, norms and relative error, all of its buckets taken as one vector."""
    gradient_bytes = sum(row["gradient_bytes"] for row in buckets)
    sent_bytes = sum(row["sent_bytes"] for row in buckets)
    relative_error = _of_all_buckets(buckets)
    return {
        "gradient_bytes": gradient_bytes,
        "sent_bytes": sent_bytes,
        "rate": gradient_bytes / sent_bytes if sent_bytes else None,
        "relative_error": relative_error,
        "energy_kept": None if relative_error is None else 1.0 - relative_error * relative_error,
        **{name: _length([row[name] for row in buckets]) for name in _OF_STEP},
    }


def _of_all_buckets(buckets: Sequence[dict[str, Any]]) -> float | None:
    """Return the relative error of all buckets as one vector; None if one of them isn't known."""
    if not any(row["compressed"] for row in buckets):
        return 0.0
    whole = _length([row["mean_norm"] for row in buckets])
    if whole is None:
        return None
    error = math.hypot(*(row["relative_error"] * row["mean_norm"] for row in buckets if row["mean_norm"]))
    return error / whole if whole else 0.0


def _length(norms: Sequence[float | None]) -> float | None:
    """Return the norm of a vector whose parts have these norms; None if one isn't known."""
    known = [norm for norm in norms if norm is not None]
    return math.hypot(*known) if len(known) == len(norms) else None
