"""The rows of a run: shown as a table, recorded as JSON lines."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradcomp.command_line import aligned

RESULTS = Path(__file__).resolve().parent / "results"

Row = dict[str, Any]


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


def table(rows: Iterable[Row]) -> str:
    """Format one case's rows as a table.

    "times the baseline": how many times as fast, formed in every round: the median, and the middle 60 %.
    """
    titles = ["provider", "p50 us", "p20-p80", "host us", "/bucket", "MB", "B/elem", "GB/s"]
    titles += ["% copy", "x floor"]
    return "\n".join(aligned([[*titles, "error", "times the baseline"], *map(_cells, rows)]))


def _cells(row: Row) -> list[str]:
    def shown(name: str, form: str) -> str:
        return "-" if row[name] is None else f"{row[name]:{form}}"

    return [
        row["provider"],
        shown("p50_us", ".1f"),
        f"{row['p20_us']:.1f}-{row['p80_us']:.1f}",
        shown("host_us", ".1f"),
        shown("host_us_per_bucket", ".1f"),
        f"{row['num_bytes'] / 1e6:.1f}",
        shown("bytes_per_element", ".2f"),
        shown("gb_per_s", ".1f"),
        shown("percent_of_copy", ".0f"),
        shown("times_floor", ".2f"),
        shown("error", ".1e"),
        f"{row['times_baseline']:.2f} ({row['times_baseline_p20']:.2f}-{row['times_baseline_p80']:.2f})",
    ]
