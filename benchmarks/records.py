"""The rows of a run: shown as a table, recorded as JSON lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

Row = dict[str, Any]

_COLUMNS = ["provider", "p50 us", "p20-p80", "host us", "/bucket", "MB", "B/elem", "GB/s", "% copy"]
_COLUMNS += ["x floor", "error", "times the baseline"]
_WIDTHS = [16, 10, 17, 9, 9, 9, 8, 8, 7, 8, 9, 23]


def append(path: Path, rows: Iterable[Row]) -> None:
    """Append one JSON line per row to a file, which need not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read(path: Path) -> list[Row]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def file_of(environment: Row, directory: Path) -> Path:
    """Return the path of the records of the environment's device."""
    return directory / f"{slug(str(environment['device']))}.jsonl"


def slug(device: str) -> str:
    """Convert a device's name to a file name: "NVIDIA H100 80GB" -> "nvidia-h100-80gb"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def header() -> str:
    return _line(_COLUMNS)


def table(rows: Iterable[Row]) -> str:
    """Format one case's rows as lines of text that go under header().

    "times the baseline": how many times as fast, formed in every round: the median, and the middle 60 %.
    """
    return "\n".join(_line(_cells(row)) for row in rows)


def _cells(row: Row) -> list[str]:
    per_bucket, per_element = row["host_us_per_bucket"], row["bytes_per_element"]
    host_us, times_floor = row["host_us"], row["times_floor"]
    return [
        str(row["provider"]),
        f"{row['p50_us']:.1f}",
        f"{row['p20_us']:.1f}-{row['p80_us']:.1f}",
        "-" if host_us is None else f"{host_us:.1f}",
        "-" if per_bucket is None else f"{per_bucket:.1f}",
        f"{row['num_bytes'] / 1e6:.1f}",
        "-" if per_element is None else f"{per_element:.2f}",
        f"{row['gb_per_s']:.1f}",
        f"{row['percent_of_copy']:.0f}",
        "-" if times_floor is None else f"{times_floor:.2f}",
        "-" if row["error"] is None else f"{row['error']:.1e}",
        f"{row['times_baseline']:.2f} ({row['times_baseline_p20']:.2f}-{row['times_baseline_p80']:.2f})",
    ]


def _line(cells: Sequence[str]) -> str:
    first, *others = (
        f"{cell:<{width}}" if index == 0 else f"{cell:>{width}}"
        for index, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    )
    return "  " + first + "".join(others)
