"""A file of outcomes: a JSON line for whatever is planned, and one when it ends.

Several processes may share the file. A process that is killed leaves the lines that it has written.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LEFT, PASSED, FAILED, SKIPPED = "left", "passed", "failed", "skipped"


def plan(path: Path | None, names: Iterable[str]) -> None:
    """Note that these are left to do. path: None notes nothing."""
    _append(path, [{"name": name, "outcome": LEFT} for name in names])


def note(path: Path | None, name: str, outcome: str, **details: Any) -> None:
    """Note an outcome. details: what else is to be known, such as the error. path: None notes nothing."""
    _append(path, [{"name": name, "outcome": outcome, **details}])


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the outcome, with its details, of everything that was planned or has ended."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # its process was killed
        # Another process may end a test before this line of the plan is written.
        if row["outcome"] != LEFT or row["name"] not in found:
            found[row.pop("name")] = row
    return found


def _append(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path is not None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, "".join(json.dumps(row) + "\n" for row in rows).encode())  # at once, not in pieces
        os.close(file)
