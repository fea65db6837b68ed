"""A recorder's rows in a file: JSON lines after a header that says which recorder's they are.

A recorder writes a header with every Recorder.save, because others may have appended to the file since.
Numbers that aren't finite are the strings "nan", "inf" and "-inf", because JSON has no such numbers.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = "gradcomp recording"
_COUNTS = ("step", "bucket", "rank", "numel", "gradient_bytes", "sent_bytes")
_NUMBERS = (
    *("rate", "time_ms", "gradient_norm", "average_norm", "error_norm"),
    *("relative_error", "energy_kept", "mean_norm"),
)


@dataclass(frozen=True)
class Header:
    """A header line: it names the recorder, the state and the rank of the rows after it.

    recorder: a name that no other recorder has.
    options: the state's options and settings.
    is_resumed: whether the state was loaded from a checkpoint, so that the rows may go on from others.
    """

    recorder: str
    algorithm: str
    options: dict[str, Any]
    rank: int
    world_size: int
    is_resumed: bool


@dataclass
class Recording:
    """The rows and choices after one header in a file."""

    path: Path
    header: Header
    rows: list[dict[str, Any]] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)


def append(path: Path, lines: Sequence[Header | Mapping[str, Any]]) -> None:
    """Append headers, choices and rows to a file. Raises OSError if the file can't be written."""
    texts = []
    for line in lines:
        entry = {"format": FORMAT, **asdict(line)} if isinstance(line, Header) else dict(line)
        floats = {name: value for name, value in entry.items() if isinstance(value, float)}
        entry |= {name: str(value) for name, value in floats.items() if not math.isfinite(value)}
        texts.append(json.dumps(entry, default=str))  # a dtype has a name, for example
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read() != b"\n":  # a program ended while it wrote
                texts.insert(0, "")
        file.write("".join(f"{text}\n" for text in texts).encode())


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
            _add(found, path, json.loads(line))
        except (ValueError, TypeError, LookupError) as error:
            is_torn = number > 1 and isinstance(error, json.JSONDecodeError)
            cause = "the program ended while it wrote; remove the line" if is_torn else "another file"
            raise ValueError(
                f"{path}, line {number} is not what Recorder.save writes: {line[:60]!r}. "
                f"Likely cause: {cause}"
            ) from error
    return found


def _add(recordings: list[Recording], path: Path, entry: dict[str, Any]) -> None:
    """Add a line of a file: a header, a choice or a row.

    Raises ValueError, TypeError, KeyError or IndexError for anything else.
    """
    if "format" in entry:
        if (found := entry.pop("format")) != FORMAT:
            raise ValueError(found)
        recordings.append(Recording(path, Header(**entry)))
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
