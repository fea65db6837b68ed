"""What a state says of its steps, of bytes, and of a checkpoint's entries."""

from collections.abc import Sequence
from typing import Any

from ..comm.announcement import say
from ..comm.consistency import first_of
from ..comm.process_group import joined_group
from .agreement import Place
from .settings import ConfiguredState, logger_of

# A state with more exact steps than this before compression says so in its first step.
LONG_START = 10

UNCLAIMED = (
    "the checkpoint has errors of parameters that the first step did not bring: %s. They wait for these. "
    "Likely cause: another model, or the runs differ in bucket_cap_mb, find_unused_parameters or wrapper, "
    "and one has no names of parameters: call state.number_parameters(model.named_parameters()) in both"
)


def announce_start(state: Any) -> None:
    """Announce that a state's first steps are exact."""
    state.announced.add("")
    group = joined_group(state.process_group)
    say(f"{state.algorithm}: exact averages until step {state.start_iter}", group)


def announce_phase(state: Any, name: str, place: Place, gradient_bytes: int, sent_bytes: int) -> None:
    """Announce a phase's first compressed step.

    name: the phase's.
    gradient_bytes: the bytes of the step's gradients.
    sent_bytes: the bytes that a rank has sent in the step; with nodes, a node.
    """
    state.announced.add(name)
    per = f"node, between {place.nodes}" if place.nodes else "rank"
    if sent_bytes < gradient_bytes:
        rate = f"{gradient_bytes / sent_bytes:.1f} times fewer bytes" if sent_bytes else "no bytes"
    else:
        rate = f"{sent_bytes / gradient_bytes:.2f} times as many bytes"
    saved = f"{rate}, {shown_bytes(sent_bytes)} of {shown_bytes(gradient_bytes)}"
    text = f"{name} compresses from step {state.iter} on: {saved} per step and {per}"
    if place.has_delay:
        text += f"; a message and its answer take {place.round_trip_s * 1e3:.0f} ms"
    if place.size == 1:
        text += "; one rank sends nothing: its results show what compression loses, not what it saves"
    say(text, joined_group(state.process_group))
    if sent_bytes >= gradient_bytes:
        logger_of(state).warning("%s saves no bytes%s.", name, state._why_nothing_is_saved())


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
