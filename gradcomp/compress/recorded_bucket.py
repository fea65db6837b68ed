"""What a recorder knows of one bucket in one step, much of which may still be on its way on a device."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradcomp import ops

from .operation import Operation
from .sketch import LENGTH

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.

# A norm, and a sketch.
NUM_VALUES = 1 + LENGTH


class Stopwatch:
    """Measures a bucket's time: on CUDA by events on the stream that runs the hook's work, else by the clock.

    It starts when it is made.
    """

    def __init__(self, device: torch.device):
        self._on_stream = ops.has_streams(device)
        self._marks = [self._mark()]
        self._elapsed_ms: float | None = None

    def _mark(self) -> Any:
        if not self._on_stream:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        """Note that the bucket is averaged."""
        self._marks.append(self._mark())

    def end_of_measuring(self) -> None:
        """Note that the row's values have been computed, too."""
        self._marks.append(self._mark())

    @property
    def is_read(self) -> bool:
        """True once the time is known on the host."""
        return self._elapsed_ms is not None

    def read_if_over(self) -> bool:
        """Read the time if everything is over; return whether it is. Doesn't wait."""
        if not self.is_read and (not self._on_stream or self._marks[-1].query()):
            self._read()
        return self.is_read

    def wait(self) -> None:
        """Wait until the bucket is averaged and measured."""
        if not self.is_read:
            if self._on_stream:
                self._marks[-1].synchronize()
            self._read()

    def _read(self) -> None:
        start, stop, _ = self._marks
        self._elapsed_ms = start.elapsed_time(stop) if self._on_stream else (stop - start) * 1e3
        self._marks.clear()

    @property
    def elapsed_ms(self) -> float:
        """The time in ms. Waits for it."""
        self.wait()
        assert self._elapsed_ms is not None
        return self._elapsed_ms


@dataclass(eq=False)
class RecordedBucket:
    """One row of a recorder.

    values: norms and sketches [3, NUM_VALUES] of this rank's gradients, of their average, and of this rank's
    error, which has none without error feedback. None in a plain step, as is stopwatch, and once all ranks
    have exchanged their sketches, from when on relative_error and mean_norm are known.
    """

    step: int
    bucket: int
    rank: int
    numel: int
    gradient_bytes: int
    sent_bytes: int
    is_compressed: bool = False
    values: torch.Tensor | None = None
    has_error: bool = False
    stopwatch: Stopwatch | None = None
    relative_error: float | None = None
    mean_norm: float | None = None
    _norms: list[float] | None = None

    def wait(self) -> None:
        """Wait until its values are there."""
        if self.stopwatch is not None:
            self.stopwatch.wait()

    def read_norms(self) -> None:
        """Bring the norms to the host. Waits for them."""
        self.wait()
        if self._norms is None and self.values is not None:
            self._norms = self.values[:, 0].tolist()

    def as_dict(self) -> dict[str, Any]:
        """Return the row as Recorder.rows() describes it. Waits for its values."""
        self.read_norms()
        gradient, average, error = self._norms or (None, None, None)
        relative_error = self.relative_error if self.is_compressed else 0.0
        sent = self.sent_bytes
        return {
            "step": self.step,
            "bucket": self.bucket,
            "rank": self.rank,
            "compressed": self.is_compressed,
            "numel": self.numel,
            "gradient_bytes": self.gradient_bytes,
            "sent_bytes": sent,
            "rate": self.gradient_bytes / sent if sent else (math.inf if self.gradient_bytes else 1.0),
            "time_ms": None if self.stopwatch is None else self.stopwatch.elapsed_ms,
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
    """Yield (relative error of the average, norm of the mean of gradients plus errors) of every row.

    values: [rows, 3, NUM_VALUES], as RecordedBucket has them. A collective.

    The mean of gradients plus errors, M, is the average C and the mean E of the new errors, because that is
    what error feedback keeps; without it, M is the mean of the gradients, and E = M − C. So the sketches of
    each rank's errors are averaged, and the ratio is ‖E‖ / ‖C + E‖.
    """
    gradients, averages, errors = values[:, :, 1:].unbind(1)
    keeps = torch.tensor(has_error, device=values.device).view(-1, 1)
    owed = torch.where(keeps, errors, gradients - averages).double()
    with Operation.of("average the sketches of the recorded rows", group):
        dist.all_reduce(owed, group=group)
    owed /= group.size()
    norms = torch.stack([owed.norm(dim=1), (averages.double() + owed).norm(dim=1)], dim=1)
    for error, whole in norms.tolist():
        yield (error / whole if whole else (math.inf if error else 0.0)), whole
