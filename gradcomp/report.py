"""The command `python -m gradcomp report`: print what a Recorder's files say about each run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any

from gradcomp.command_line import OneLineParser
from gradcomp.compress.announcement import shown_bytes
from gradcomp.compress.recording.file import Recording, read
from gradcomp.compress.recording.row import whole_step

# The lines of a run's table at most: long runs have the medians of equally many steps in a line.
MAX_LINES = 10
COLUMNS = ("rate", "relative_error", "energy_kept", "time_ms")
UNKNOWN = "not known: Recorder.complete() was not called on every rank before Recorder.save()"

Step = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = OneLineParser(
        prog="python -m gradcomp report",
        description="Print the totals, and the values over the steps, of each run and rank in files that "
        "Recorder.save wrote.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Files that Recorder.save wrote.")
    files = parser.parse_args(arguments).files
    try:
        runs = runs_of(recording for file in files for recording in read(file))
    except FileNotFoundError as error:
        parser.error(f"there is no file {error.filename}")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not runs:
        names = ", ".join(map(str, files))
        parser.error(f"no rows in {names}. Likely cause: no step was recorded before Recorder.save")
    print("\n\n".join(map(report, runs, labels(runs))))


def runs_of(recordings: Iterable[Recording]) -> list[Recording]:
    """Put together what each recorder has saved with equal options as one rank: a run.

    A resumed run is put together with the run that it goes on from: the only one in the file, before it,
    that is alike, of equal buckets, too.
    """
    runs: dict[str, Recording] = {}
    for each in recordings:
        key = json.dumps(asdict(replace(each.header, is_resumed=False)), sort_keys=True)
        if key not in runs:
            before = {id(run): run for run in runs.values() if _goes_on(run, each)}
            is_clear = len(before) == 1
            runs[key] = before.popitem()[1] if is_clear else replace(each, rows=[], choices=[])
        _extend(runs[key], each)
    return [run for run in {id(run): run for run in runs.values()}.values() if run.rows]


def _goes_on(run: Recording, later: Recording) -> bool:
    """Return whether a resumed run may go on from a run: its steps do, and the rest is alike."""
    like = replace(run.header, recorder=later.header.recorder, is_resumed=True)
    if not (run.rows and later.rows) or (later.path, later.header) != (run.path, like):
        return False
    ours, theirs = ({row["bucket"]: row["numel"] for row in each.rows} for each in (run, later))
    return ours == theirs and run.rows[0]["step"] < later.rows[0]["step"]


def _extend(run: Recording, later: Recording) -> None:
    """Add rows and choices to a run. They replace its rows and choices of the same and later steps."""
    if later.rows:
        first = later.rows[0]["step"]
        run.choices = [choice for choice in run.choices if choice["step"] < first]
    run.choices += later.choices
    for step, of_step in groupby(later.rows, key=lambda row: row["step"]):
        while run.rows and run.rows[-1]["step"] >= step:
            run.rows.pop()
        run.rows += of_step


def labels(runs: Sequence[Recording]) -> list[str]:
    """Return a line for each run: its algorithm and rank, and if others have them, too, what differs."""
    headers, paths = [run.header for run in runs], [str(run.path) for run in runs]
    texts = [f"{each.algorithm}, rank {each.rank} of {each.world_size}" for each in headers]
    names = dict.fromkeys(name for each in headers for name in each.options)
    parts = [[f"{name} = {each.options.get(name)}" for each in headers] for name in names]
    numbers = [f"run {paths[: i + 1].count(path)} of the file" for i, path in enumerate(paths)]
    for part in (*parts, paths, numbers):
        alike = [{other for text, other in zip(texts, part, strict=True) if text == each} for each in texts]
        more = zip(texts, part, alike, strict=True)
        texts = [f"{text}, {own}" if len(values) > 1 else text for text, own, values in more]
    return texts


def report(run: Recording, label: str) -> str:
    """Return the lines about a run: its label, totals, an AutoState's choices, and a table over the steps."""
    steps: list[Step] = []  # values of whole steps, and the median time of their buckets
    for number, each in groupby(run.rows, key=lambda row: row["step"]):
        rows = list(each)
        times = [row["time_ms"] for row in rows if row["time_ms"] is not None]
        more = {"step": number, "compressed": any(row["compressed"] for row in rows)}
        steps.append({**whole_step(rows), **more, "time_ms": median(times) if times else None})
    options = {name: value for name, value in run.header.options.items() if value is not None}
    totals = {
        "options": ", ".join(f"{name} = {value}" for name, value in options.items()) or "none",
        **_totals(run, steps),
        **{f"choice before step {each['step']:,}": _choice(each) for each in run.choices},
    }
    width = max(map(len, totals))
    lines = [f"  {name:<{width}}  {value}" for name, value in totals.items()]
    return "\n".join([label, *lines, "", *_table(steps)])


def _totals(run: Recording, steps: list[Step]) -> dict[str, str]:
    compressed = [step for step in steps if step["compressed"]]
    gradient_bytes, sent_bytes = (sum(s[name] for s in steps) for name in ("gradient_bytes", "sent_bytes"))
    num_plain, num_buckets = len(steps) - len(compressed), len({row["bucket"] for row in run.rows})
    times = [row["time_ms"] for row in run.rows if row["time_ms"] is not None]
    totals = {
        "steps": f"{len(steps):,}, from {steps[0]['step']:,} to {steps[-1]['step']:,}; "
        f"{num_plain:,} of them without compression",
        "buckets": f"{num_buckets:,}",
        "bytes sent": f"{shown_bytes(sent_bytes)} of {shown_bytes(gradient_bytes)}",
    }
    if compressed:
        sent = sum(step["sent_bytes"] for step in compressed)
        whole = sum(step["gradient_bytes"] for step in compressed)
        totals["compression rate"] = f"{whole / sent:.2f}" if sent else "nothing was sent"
        totals["relative error"] = _mean(compressed, "relative_error")
        totals["energy kept"] = _mean(compressed, "energy_kept")
        totals["time of a bucket"] = f"{median(times):.3g} ms" if times else "not known"
    return totals


def _mean(steps: list[Step], name: str) -> str:
    """Return the mean of a value over the steps in which it is known and finite."""
    known = [step[name] for step in steps if step[name] is not None]
    finite = [value for value in known if math.isfinite(value)]
    if not known:
        return UNKNOWN
    left_out = f"; {len(known) - len(finite):,} steps of inf or NaN are left out" if known != finite else ""
    return (f"{fmean(finite):.4f}" if finite else "not finite") + left_out


def _choice(choice: dict[str, Any]) -> str:
    """Say what an AutoState has chosen, with the time of a step and its bytes for each candidate."""
    times = []
    for each in choice["candidates"]:
        ms = "not known" if each["ms"] is None else f"{each['ms']:.3g} ms"
        sent = "" if each["sent_bytes"] is None else f", {shown_bytes(int(each['sent_bytes']))}"
        times.append(f"{each['candidate']} {ms}{sent}")
    return f"{choice['choice']}. A step with {'; '.join(times)}"


def _table(steps: list[Step]) -> list[str]:
    """Return the lines of the table: medians over intervals of equally many recorded steps."""
    size = -(-len(steps) // MAX_LINES)
    rows = [["steps", *(name.replace("_", " ") for name in COLUMNS)]]
    for start in range(0, len(steps), size):
        some = steps[start : start + size]
        first, last = some[0]["step"], some[-1]["step"]
        rows.append([f"{first:,}" if first == last else f"{first:,} to {last:,}"])
        for name in COLUMNS:
            values = [step[name] for step in some if step[name] is not None and math.isfinite(step[name])]
            rows[-1].append(f"{median(values):.4g}" if values else "–")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.rjust, row, widths)) for row in rows]
