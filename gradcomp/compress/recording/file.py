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

FORMAT, VERSION = "gradcomp recording", 1
_HEADER_KEYS = {"format", "version", "algorithm", "options", "rank", "world_size"}
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
    shown = {name: _plain(value) for name, value in options.items()}
    return {
        "format": FORMAT,
        "version": VERSION,
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
    texts = [json.dumps({name: _written(value) for name, value in line.items()}) for line in lines]
    if texts:
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{text}\n" for text in texts))


def read(path: Path) -> list[Recording]:
    """Return the recordings in a file, one per header.

    Raises OSError if the file can't be read. Raises ValueError, naming the file and the line, for anything
    that `append` didn't write.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no recording: it isn't text ({error.reason})") from error
    found: list[Recording] = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {line[:60]!r}. {_cause(number, lines)}") from error
        if isinstance(entry, dict) and entry.get("format") == FORMAT:
            found.append(_recording(where, entry))
        elif not found:
            raise ValueError(
                f"{where} is not the header of a recording: {line[:60]!r}. Likely cause: another file than "
                "Recorder.save wrote"
            )
        elif isinstance(entry, dict) and "choice" in entry:
            found[-1].choices.append(_choice(where, entry))
        else:
            found[-1].rows.append(_row(where, entry))
    if not found:
        raise ValueError(f"{path} is empty. Likely cause: Recorder.save was not called")
    return found


def _cause(number: int, lines: Sequence[str]) -> str:
    if 1 < number == len(lines):
        return "Likely cause: the program ended while it wrote; remove the line"
    return "Likely cause: another file than Recorder.save wrote"


def _recording(where: str, entry: dict[str, Any]) -> Recording:
    if entry.get("version") != VERSION:
        raise ValueError(
            f"{where} has version {entry.get('version')!r}, but this gradcomp reads {VERSION}. Likely cause: "
            "a newer gradcomp wrote it"
        )
    if set(entry) != _HEADER_KEYS or not isinstance(entry["options"], dict):
        raise ValueError(f"{where} is not a header that Recorder.save writes: it has {sorted(entry)}")
    rank, world_size = (_count(where, entry, name) for name in ("rank", "world_size"))
    return Recording(str(entry["algorithm"]), entry["options"], rank, world_size)


def _row(where: str, entry: Any) -> dict[str, Any]:
    expected = {*_COUNTS, *_NUMBERS, "compressed"}
    if not isinstance(entry, dict) or set(entry) != expected or not isinstance(entry["compressed"], bool):
        raise ValueError(f"{where} is not a row that Recorder.save writes: {json.dumps(entry)[:60]}")
    row: dict[str, Any] = {"compressed": entry["compressed"]}
    row |= {name: _count(where, entry, name) for name in _COUNTS}
    for name in _NUMBERS:
        value = entry[name]
        try:
            row[name] = None if value is None else float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {name} is {value!r}, but must be a number") from error
    return row


def _choice(where: str, entry: dict[str, Any]) -> dict[str, Any]:
    given = entry.get("candidates")
    candidates = [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    names = [each.get("candidate") for each in candidates]
    if set(entry) != {"step", "choice", "candidates"} or entry["choice"] not in names:
        raise ValueError(f"{where} is not a choice that Recorder.save writes: {json.dumps(entry)[:60]}")
    for each in candidates:
        for name in ("ms", "sent_bytes", "nats"):
            if not isinstance(each.get(name), int | float | None):
                raise ValueError(f"{where}: {name} is {each.get(name)!r}, but must be a number")
    return {**entry, "step": _count(where, entry, "step")}


def _count(where: str, entry: dict[str, Any], name: str) -> int:
    value = entry[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{where}: {name} is {value!r}, but must be a whole number of at least 0")
    return value


def _written(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """Convert an option to a JSON value: a dtype to its name, for example."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
