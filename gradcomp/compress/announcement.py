"""What a state says of bytes, and of a checkpoint's entries."""

from collections.abc import Sequence

from ..comm.consistency import first_of
from .settings import ConfiguredState, logger_of

UNCLAIMED = (
    "the checkpoint has errors of parameters that the first step did not bring: %s. They wait for these. "
    "Likely cause: another model, or the runs differ in bucket_cap_mb, find_unused_parameters or wrapper, "
    "and one has no names of parameters: call state.number_parameters(model.named_parameters()) in both"
)


def saved_bytes(gradient_bytes: int, sent_bytes: int) -> str:
    """Say how many bytes are sent, and how many times fewer these are."""
    if sent_bytes < gradient_bytes:
        rate = f"{gradient_bytes / sent_bytes:.1f} times fewer bytes" if sent_bytes else "no bytes"
    else:
        rate = f"{sent_bytes / gradient_bytes:.2f} times as many bytes"
    return f"{rate}, {shown_bytes(sent_bytes)} of {shown_bytes(gradient_bytes)}"


def shown_bytes(num_bytes: float) -> str:
    """Return a number of bytes with its unit."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def warn_of_keys(state: ConfiguredState, text: str, keys: Sequence[str]) -> None:
    """Log a text with the first of these keys in the place of %s, if there are any."""
    if keys:
        logger_of(state).warning("%s: %s.", state.algorithm, text % first_of(keys))
