"""The row that is recorded for a bucket in one step, and the values of a whole step.

The ranks' error norms don't determine the norm of their mean error; sketches estimate it. A sketch sums the
elements, multiplied by random signs that all ranks share, in LENGTH places (Charikar, Chen and Farach-Colton,
"Finding frequent items in data streams", ICALP 2002). It is linear, and its norm estimates the vector's, with
a relative standard deviation of about 1 / sqrt(2 · LENGTH) = 4.5 %, and a ratio's up to 6.3 %.
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.device import has_streams, send

from ...comm.process_group import Explaining
from ...comm.streams import seconds_between

# A prime, so that a matrix's rows or columns don't all fall into a few of the places.
LENGTH = 251
_NUM_SHIFTS = 1 << 16


def chunk_numel(device: torch.device) -> int:
    """Return the number of elements to sum at a time.

    On a CPU: 1 MB in fp32, which fits the processor's cache. On CUDA: 16 MB, for fewer kernel launches.
    """
    return LENGTH << (14 if has_streams(device) else 10)


@cache
def _signs(device: torch.device) -> torch.Tensor:
    """Return random signs, fp32 [chunk_numel + _NUM_SHIFTS], the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    numel = chunk_numel(device) + _NUM_SHIFTS
    signs = torch.randint(0, 2, (numel,), generator=generator, dtype=torch.float32, device="cpu")
    return send(signs * 2 - 1, device)


@torch.no_grad()
def measure(values: torch.Tensor, shift: int, *, out: torch.Tensor) -> None:
    """Write a vector's Euclidean norm and sketch to out. The host doesn't wait for the device.

    values: [numel], floating-point.
    shift: selects the signs; must be the same for sketches that are added.
    out: fp32 [1 + LENGTH] on the same device. Holds inf or NaN if a value isn't finite or its square
        overflows.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    square = torch.zeros((), dtype=torch.float64, device=values.device)
    sketch = torch.zeros(LENGTH, dtype=wide, device=values.device)
    signs, size = _signs(values.device), chunk_numel(values.device)
    scratch = torch.empty(min(size, values.numel()), dtype=wide, device=values.device)
    for index, chunk in enumerate(values.split(size) if values.numel() else ()):
        chunk = chunk.to(wide)
        square += torch.linalg.vector_norm(chunk).double().square()
        start = (shift + 7919 * index) % _NUM_SHIFTS
        signed = torch.mul(chunk, signs[start : start + len(chunk)], out=scratch[: len(chunk)])
        num_whole = len(chunk) // LENGTH * LENGTH
        sketch += signed[:num_whole].view(-1, LENGTH).sum(0)
        rest = signed[num_whole:]
        sketch[: len(rest)] += rest
    out[0] = square.sqrt()
    out[1:] = sketch


# One norm, and a sketch.
NUM_VALUES = 1 + LENGTH


@dataclass(eq=False)
class RecordedBucket:
    """One row of a recorder.

    group, rank: of the average; this rank's number in the group.
    values: [3, NUM_VALUES], norms and sketches of this rank's gradients, of the average, and of this rank's
        error; without error feedback, of the errors of other compressors that it has sent. None in a plain
        step. None again after Recorder.complete(), which sets relative_error and mean_norm instead.
    has_error: True with error feedback. The same on all ranks.
    marks: the times at which the hook began, the bucket was averaged, and the values were computed; empty in
        a plain step.
    """

    step: int
    bucket: int
    group: weakref.ref[dist.ProcessGroup]
    rank: int
    numel: int
    gradient_bytes: int
    sent_bytes: int
    values: torch.Tensor | None = None
    has_error: bool = False
    marks: list[Any] = field(default_factory=list)
    relative_error: float | None = None
    mean_norm: float | None = None
    _norms: list[float] | None = None

    def read_norms(self) -> None:
        """Copy the norms to the host. Waits until the row's values are computed."""
        if self.marks and isinstance(self.marks[-1], torch.cuda.Event):
            self.marks[-1].synchronize()
        if self._norms is None and self.values is not None:
            self._norms = self.values[:, 0].tolist()

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a dict; see Recorder.rows(). Waits until its values are computed."""
        self.read_norms()
        gradient, average, error = self._norms or (None, None, None)
        is_compressed, sent = bool(self.marks), self.sent_bytes
        relative_error = self.relative_error if is_compressed else 0.0
        return {
            "step": self.step,
            "bucket": self.bucket,
            "rank": self.rank,
            "compressed": is_compressed,
            "numel": self.numel,
            "gradient_bytes": self.gradient_bytes,
            "sent_bytes": sent,
            "rate": self.gradient_bytes / sent if sent else (math.inf if self.gradient_bytes else 1.0),
            "time_ms": seconds_between(*self.marks[:2]) * 1e3 if is_compressed else None,
            "gradient_norm": gradient,
            "average_norm": average,
            "error_norm": error if self.has_error else None,
            "relative_error": relative_error,
            "energy_kept": None if relative_error is None else 1.0 - relative_error * relative_error,
            "mean_norm": self.mean_norm,
        }


def relative_errors(
    values: torch.Tensor, has_error: Sequence[bool], group: dist.ProcessGroup
) -> Iterator[tuple[float, float]]:
    """Yield (relative error of the average, norm of the mean of gradients plus errors) for every row.

    A collective.

    values: [rows, 3, NUM_VALUES], the values of RecordedBuckets.
    has_error: for each row, whether errors are kept.

    The relative error is ‖E‖ / ‖M‖. C is the average, E the mean of the ranks' new errors, and M the mean of
    gradients plus errors. Error feedback keeps M = C + E. Without error feedback, E = M − C. The ranks'
    sketches are averaged to estimate E.
    """
    gradients, averages, errors = values[:, :, 1:].unbind(1)
    keeps = torch.tensor(has_error, dtype=torch.bool, device=values.device).view(-1, 1)
    owed = torch.where(keeps, errors, gradients + errors - averages).double()
    with Explaining.of("average the sketches of the recorded rows", group):
        dist.all_reduce(owed, group=group)
    owed /= group.size()
    norms = torch.stack([owed.norm(dim=1), (averages.double() + owed).norm(dim=1)], dim=1)
    for error, whole in norms.tolist():
        yield (error / whole if whole else (math.inf if error else 0.0)), whole


PREFIX = "gradcomp"
_OF_STEP = ("gradient_norm", "average_norm", "error_norm")
_OF_BUCKETS = ("rate", "relative_error", "energy_kept", "time_ms", *_OF_STEP)


def step_values(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, values by name) for every step of rows in the order of steps."""
    for step, of_step in groupby(rows, key=lambda row: int(row["step"])):
        buckets = list(of_step)
        values = {f"{PREFIX}/{name}": value for name, value in whole_step(buckets).items()}
        for row in buckets:
            values |= {f"{PREFIX}/bucket {row['bucket']}/{name}": row[name] for name in _OF_BUCKETS}
        yield step, {name: value for name, value in values.items() if value is not None}


def whole_step(buckets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a step's bytes, rate, norms and relative error, with all its buckets as one vector.

    A norm is None if a bucket's is.
    """
    found: dict[str, Any] = {
        name: sum(row[name] for row in buckets) for name in ("gradient_bytes", "sent_bytes")
    }
    for name in ("mean_norm", *_OF_STEP):
        norms = [row[name] for row in buckets if row[name] is not None]
        found[name] = math.hypot(*norms) if len(norms) == len(buckets) else None
    whole, error = found.pop("mean_norm"), None
    if whole is not None or not any(row["compressed"] for row in buckets):
        lost = (row["relative_error"] * row["mean_norm"] for row in buckets if row["mean_norm"])
        error = math.hypot(*lost) / whole if whole else 0.0
    rate = found["gradient_bytes"] / found["sent_bytes"] if found["sent_bytes"] else None
    return {
        **found,
        "rate": rate,
        "relative_error": error,
        "energy_kept": None if error is None else 1.0 - error**2,
    }
