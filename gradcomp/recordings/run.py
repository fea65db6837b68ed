"""A run as recorded by its ranks: their rows merged, and sums, means and ranges over steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from gradcomp.compress.recording.file import Recording
from gradcomp.compress.recording.row import whole_step

Row = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """The median and the range of a value over the buckets of a step."""

    step: int
    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run, with one row per step and bucket.

    A row has the bytes and the relative error, which all ranks have in common, the longest time of any rank,
    and the means of the ranks' norms.

    choices: what an AutoState has chosen, in order of steps; see Recorder.choices.
    """

    algorithm: str
    options: dict[str, Any]
    world_size: int
    ranks: list[int]
    rows: list[Row]
    choices: list[dict[str, Any]] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """The numbers of the recorded steps, in order."""
        return sorted({row["step"] for row in self.rows})

    @property
    def num_buckets(self) -> int:
        """The number of different buckets."""
        return len({row["bucket"] for row in self.rows})

    def by_step(self) -> list[tuple[int, list[Row]]]:
        """Return (step, rows of the step), in order of steps."""
        found: dict[int, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row["step"], []).append(row)
        return sorted(found.items())

    def of_steps(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) for the steps with a known and finite value.

        name: of a value of whole_step.
        """
        pairs = [(step, whole_step(rows)[name]) for step, rows in self.by_step()]
        return [(step, value) for step, value in pairs if value is not None and math.isfinite(value)]

    def spreads(self, name: str) -> list[Spread]:
        """Return a value's spread over the compressed buckets of each step, without unknown, inf and NaN."""
        found = []
        for step, rows in self.by_step():
            values = [row[name] for row in rows if row["compressed"] and row[name] is not None]
            if values := [value for value in values if math.isfinite(value)]:
                found.append(Spread(step, min(values), median(values), max(values)))
        return found

    def num_not_finite(self, name: str) -> int:
        """Return the number of rows in which the value is inf or NaN."""
        return sum(row[name] is not None and not math.isfinite(row[name]) for row in self.rows)

    def cumulated(self, name: str) -> list[tuple[int, float]]:
        """Return (step, bytes of all steps up to this one) for every recorded step."""
        total, found = 0, []
        for step, rows in self.by_step():
            total += sum(row[name] for row in rows)
            found.append((step, float(total)))
        return found

    def total(self, name: str, compressed: bool | None = None) -> int:
        """Return the sum of a number of bytes over rows.

        compressed: True for compressed rows only, False for plain rows only, None for all.
        """
        return sum(row[name] for row in self.rows if compressed in (None, row["compressed"]))

    def mean_of_compressed_steps(self, name: str) -> float | None:
        """Return the mean of a value over the compressed steps with a known and finite value.

        name: of a value of whole_step.
        """
        plain = {row["step"] for row in self.rows if not row["compressed"]}
        values = [value for step, value in self.of_steps(name) if step not in plain]
        return fmean(values) if values else None

    def median_time_ms(self) -> float | None:
        """Return the median of all rows' times."""
        times = [row["time_ms"] for row in self.rows if row["time_ms"] is not None]
        return median(times) if times else None


def runs_of(recordings: Sequence[Recording]) -> list[RecordedRun]:
    """Merge recordings of equal algorithm, options and world size: they are of one run's ranks.

    If a rank has two rows for a step and bucket, as after a restart from an older checkpoint, the last one
    counts.
    """
    by_run: dict[str, list[Recording]] = {}
    for recording in recordings:
        described = [recording.algorithm, recording.options, recording.world_size]
        by_run.setdefault(json.dumps(described, sort_keys=True), []).append(recording)
    return [_run(each) for each in by_run.values() if any(recording.rows for recording in each)]


def _run(recordings: Sequence[Recording]) -> RecordedRun:
    by_place: dict[tuple[int, int], dict[int, Row]] = {}
    for recording in recordings:
        for row in recording.rows:
            by_place.setdefault((row["step"], row["bucket"]), {})[row["rank"]] = row
    first = recordings[0]
    ranks = sorted({rank for of_ranks in by_place.values() for rank in of_ranks})
    rows = [_of_ranks(list(of_ranks.values())) for _, of_ranks in sorted(by_place.items())]
    choices = {each["step"]: each for recording in recordings for each in recording.choices}
    ordered = [choices[step] for step in sorted(choices)]  # all ranks choose alike
    return RecordedRun(first.algorithm, first.options, first.world_size, ranks, rows, ordered)


def _of_ranks(rows: Sequence[Row]) -> Row:
    """Merge the rows of several ranks for one step and bucket."""
    known = [row for row in rows if row["relative_error"] is not None]
    merged = dict((known or rows)[0])
    merged["time_ms"] = _known(max, (row["time_ms"] for row in rows))
    for name in ("gradient_norm", "average_norm", "error_norm"):
        merged[name] = _known(fmean, (row[name] for row in rows))
    return merged


def _known(combine: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    """Combine the values that are known. Return None if all are unknown."""
    known = [value for value in values if value is not None]
    return combine(known) if known else None
