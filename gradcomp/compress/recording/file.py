"""A recorder's rows in a file: JSON lines after a header with the algorithm, the options and the rank.

Each recorder that appends to the file writes its own header first. Numbers that aren't finite are the strings
"nan", "inf" and "-inf", because JSON has no such numbers.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = "gradcomp recording"
_COUNTS = ("step", "bucket", "rank", "numel", "gradient_bytes", "sent_bytes")
_NUMBERS = (
    *("rate", "time_ms", "gradient_norm", "average_norm", "error_norm"),
    *("relative_error", "energy_kept", "mean_norm"),
)


@dataclass
class Recording:
    """The rows and choices that one rank has recorded with one state, and the header's entries."""

    algorithm: str
    options: dict[str, Any]
    rank: int
    world_size: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)


def header(algorithm: str, options: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Return the header that precedes a recorder's rows."""
    plain = (bool, int, float, str, type(None))  # a dtype has a name, for example
    shown = {name: value if isinstance(value, plain) else str(value) for name, value in options.items()}
    return {
        "format": FORMAT,
        "algorithm": algorithm,
        "options": shown,
        "rank": rank,
        "world_size": world_size,
    }


def append(path: Path, first: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a file, after a header. Raises OSError if the file can't be written.

    first: the header; None if the file has it already.
    """
    lines = [*([first] if first is not None else []), *rows]
    texts = []
    for line in lines:
        floats = {name: value for name, value in line.items() if isinstance(value, float)}
        odd = {name: str(value) for name, value in floats.items() if not math.isfinite(value)}
        texts.append(json.dumps({**line, **odd}))
    if texts:
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{text}\n" for text in texts))


def read(path: Path) -> list[Recording]:
    """Return the recordings in a file, one per header.

    Raises OSError if the file can't be read. Raises ValueError, naming the file and the line, for anything
    that `append` didn't write.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines:
        raise ValueError(f"{path} is empty. Likely cause: Recorder.save was not called")
    found: list[Recording] = []
    for number, line in enumerate(lines, 1):
        try:
            _add(found, json.loads(line))
        except (ValueError, TypeError, LookupError) as error:
            is_torn = 1 < number == len(lines) and isinstance(error, json.JSONDecodeError)
            cause = "the program ended while it wrote; remove the line" if is_torn else "another file"
            raise ValueError(
                f"{path}, line {number} is not what Recorder.save writes: {line[:60]!r}. "
                f"Likely cause: {cause}"
            ) from error
    return found


def _add(recordings: list[Recording], entry: dict[str, Any]) -> None:
    """Add a line of a file: a header, a choice or a row.

    Raises ValueError, TypeError, KeyError or IndexError for anything else.
    """
    if "format" in entry:
        options, counts = dict(entry["options"]), (int(entry["rank"]), int(entry["world_size"]))
        if entry["format"] != FORMAT:
            raise ValueError(entry["format"])
        recordings.append(Recording(str(entry["algorithm"]), options, *counts))
    elif "choice" in entry:
        candidates = [
            {**each, "ms": _number(each["ms"]), "sent_bytes": _number(each["sent_bytes"])}
            for each in entry["candidates"]
        ]
        if entry["choice"] not in [each["candidate"] for each in candidates]:
            raise ValueError(entry["choice"])
        recordings[-1].choices.append({**entry, "step": int(entry["step"]), "candidates": candidates})
    else:
        row: dict[str, Any] = {"compressed": entry["compressed"] is True}
        row |= {name: int(entry[name]) for name in _COUNTS}
        row |= {name: _number(entry[name]) for name in _NUMBERS}
        recordings[-1].rows.append(row)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
