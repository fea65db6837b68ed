"""The rows of a run: shown as a table, recorded as JSON lines."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

Row = dict[str, Any]

# The columns: titles, and widths.
_COLUMNS = {"provider": 16, "p50 us": 10, "p20-p80": 17, "host us": 9, "/bucket": 9, "MB": 9, "B/elem": 8}
_COLUMNS |= {"GB/s": 8, "% copy": 7, "x floor": 8, "error": 9, "times the baseline": 23}


def append(path: Path, rows: Iterable[Row]) -> None:
    """Append one JSON line per row to a file, which need not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read(path: Path) -> list[Row]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def file_of(environment: Row, directory: Path) -> Path:
    """Return the path of the records of the environment's device: "NVIDIA H100" -> nvidia-h100.jsonl."""
    name = re.sub(r"[^a-z0-9]+", "-", str(environment["device"]).lower()).strip("-")
    return directory / f"{name}.jsonl"


def header() -> str:
    return _line(_COLUMNS)


def table(rows: Iterable[Row]) -> str:
    """Format one case's rows as lines of text that go under header().

    "times the baseline": how many times as fast, formed in every round: the median, and the middle 60 %.
    """
    return "\n".join(_line(_cells(row)) for row in rows)


def _cells(row: Row) -> list[str]:
    def shown(name: str, form: str) -> str:
        return "-" if row[name] is None else f"{row[name]:{form}}"

    return [
        str(row["provider"]),
        f"{row['p50_us']:.1f}",
        f"{row['p20_us']:.1f}-{row['p80_us']:.1f}",
        shown("host_us", ".1f"),
        shown("host_us_per_bucket", ".1f"),
        f"{row['num_bytes'] / 1e6:.1f}",
        shown("bytes_per_element", ".2f"),
        f"{row['gb_per_s']:.1f}",
        f"{row['percent_of_copy']:.0f}",
        shown("times_floor", ".2f"),
        shown("error", ".1e"),
        f"{row['times_baseline']:.2f} ({row['times_baseline_p20']:.2f}-{row['times_baseline_p80']:.2f})",
    ]


def _line(cells: Iterable[str]) -> str:
    first, *others = (f"{cell:>{width}}" for cell, width in zip(cells, _COLUMNS.values(), strict=True))
    return f"  {first.strip():16}" + "".join(others)
