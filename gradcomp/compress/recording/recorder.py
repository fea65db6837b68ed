"""Record what compression does, bucket by bucket and step by step, without a wait for the host.

Norms and sketches (row.py) are computed where the bucket is, in the order of the hook's own work, and are
read when rows are asked for. docs/recording.md has the formulas.
"""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...comm.consistency import require_all_ranks, require_same_on_all_ranks
from ...comm.pipeline import Stages
from ...comm.process_group import device_for, resolve_group
from ...rules import RANK
from ..compressor import Compressor
from ..memories import BucketPart
from ..state import CompressorState
from . import file as recording_file
from .row import NUM_VALUES, RecordedBucket, Stopwatch, measure, relative_errors, step_values

Log = Callable[[int, dict[str, float]], Any]
# Rows that share a tensor, so that a device's memory isn't cut into small blocks.
_BLOCK_ROWS = 64


class Recorder:
    """Records the steps of a compressing hook's state, from now on.

    state: a PowerSGDState, QuantizationState or CompressorState; on DDP, the Reducer, the wrapper, with
    compress_replicas or average_. It has one recorder at most, which its checkpoints don't contain.
    every: record the steps whose number is a multiple of this; 1 for all steps.
    max_rows: rows that are kept, one per bucket and step; the oldest are dropped then. A row takes about 4
    kB, 3 kB of which are on the bucket's device.

    What is averaged is the same, to the bit, with and without it. docs/recording.md says what it costs.

    Raises TypeError for another state, ValueError for one that has a recorder, and for an every or a max_rows
    that is no whole number of at least 1.

    Example::

        recorder = Recorder(state, every=10)
        ...  # train
        recorder.complete()  # on every rank
        recorder.save("recording.jsonl")
    """

    def __init__(self, state: CompressorState, *, every: int = 1, max_rows: int = 4096):
        if not isinstance(state, CompressorState):
            raise TypeError(
                "Recorder takes the state of a compressing hook (PowerSGDState, QuantizationState, "
                f"CompressorState), got {state!r}"
            )
        if state.recorder is not None:
            raise ValueError("the state has a recorder already: call its detach() first")
        self._state = state
        self._every = int(RANK("every", every))
        self._rows: deque[RecordedBucket] = deque(maxlen=int(RANK("max_rows", max_rows)))
        self._under_way: deque[Stopwatch] = deque()
        self._block: torch.Tensor | None = None
        self._num_used = 0
        self._paths: set[str] = set()  # files that have this recorder's header
        # Rows that were dropped because there were more than max_rows.
        self.num_dropped = 0
        state.recorder = self

    def detach(self) -> None:
        """Record nothing more. The rows so far stay."""
        if self._state.recorder is self:
            self._state.recorder = None

    # --- what the state calls ---

    def add_plain(self, step: int, index: int, buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Record a bucket that is averaged without compression."""
        if step % self._every == 0:
            num_bytes = buffer.nbytes
            self._append(RecordedBucket(step, index, group.rank(), buffer.numel(), num_bytes, num_bytes))

    def recorded(
        self,
        stages: Stages,
        step: int,
        index: int,
        buffer: torch.Tensor,
        parts: Sequence[BucketPart],
        compressors: Sequence[Compressor],
        group: dist.ProcessGroup,
    ) -> Stages:
        """Run a compressed bucket's stages, and record them; what the stages yield and return stays the same.

        buffer: has this rank's gradients before the stages, and the averages after them.
        """
        if step % self._every:
            return (yield from stages)
        row = RecordedBucket(
            step,
            index,
            group.rank(),
            buffer.numel(),
            buffer.nbytes,
            sum(compressor.sent_numel for compressor in compressors) * buffer.itemsize,
            is_compressed=True,
        )
        shift = step * 8191 + index * 131
        row.values = self._next_values(buffer.device)
        measure(_gathered(parts, buffer), shift, out=row.values[0])
        row.stopwatch = Stopwatch(buffer.device)
        result = yield from stages
        row.stopwatch.stop()
        measure(_gathered(parts, buffer), shift, out=row.values[1])
        errors = [error for error in (each.current_error() for each in compressors) if error is not None]
        row.has_error = len(errors) == len(compressors)
        if row.has_error:
            measure(errors[0] if len(errors) == 1 else torch.cat(errors), shift, out=row.values[2])
        row.stopwatch.end_of_measuring()
        self._append(row)
        return result

    def _next_values(self, device: torch.device) -> torch.Tensor:
        """Return memory for a row's values, [3, NUM_VALUES]."""
        if self._block is None or self._num_used == _BLOCK_ROWS or self._block.device != device:
            self._block = torch.empty(_BLOCK_ROWS, 3, NUM_VALUES, device=device)
            self._num_used = 0
        self._num_used += 1
        return self._block[self._num_used - 1]

    def _append(self, row: RecordedBucket) -> None:
        self.num_dropped += len(self._rows) == self._rows.maxlen
        self._rows.append(row)
        if row.stopwatch is not None:
            self._under_way.append(row.stopwatch)
        # A device's events aren't kept for long; whether one is over is asked without a wait.
        while self._under_way and self._under_way[0].read_if_over():
            self._under_way.popleft()

    # --- what users call ---

    @torch.no_grad()
    def complete(self) -> None:
        """Find out the relative errors of all rows so far: those of the average, which no rank knows alone.

        Every rank of the state's group calls it, in the same place among its collectives and with the same
        rows; it averages 1 kB per row. Waits for the host. Without it, relative_error and energy_kept are
        None.

        Raises RuntimeError on every rank where the rows differ.
        """
        rows = [row for row in self._rows if row.values is not None]
        values = [row.values for row in rows if row.values is not None]
        group = resolve_group("Recorder.complete", self._state.process_group)
        advice = "Call it on every rank, after the same step; then only one rank may save or log the rows"
        require_all_ranks("Recorder.complete", "find the relative errors of the recorded rows", group, advice)
        require_same_on_all_ranks(
            "Recorder.complete()",
            {"recorded rows": [(row.step, row.bucket, row.has_error) for row in rows]},
            group,
            device_for(group, values),
            "Give every rank a recorder with the same every and max_rows, and call complete() after the same "
            "step",
        )
        if not rows:
            return
        for row in rows:
            row.wait()
        for row, (relative_error, mean_norm) in zip(
            rows, relative_errors(torch.stack(values), [row.has_error for row in rows], group), strict=True
        ):
            row.relative_error, row.mean_norm = relative_error, mean_norm
            row.read_norms()
            row.values = None

    def rows(self) -> list[dict[str, Any]]:
        """Return what was recorded, oldest first, as a dict per bucket and step. Waits for the host.

        step, bucket: the step's number and the bucket's index. rank: this rank. compressed: False in plain
        steps. numel: the bucket's elements. gradient_bytes, sent_bytes: of the bucket, and of what an
        all-reduce of as many bytes would send. rate: their ratio. time_ms: from the hook's start until the
        bucket is averaged. gradient_norm, average_norm, error_norm: of this rank's gradients, of their
        average, and of this rank's new error. relative_error, energy_kept, mean_norm: the average's error
        against the mean of gradients plus errors, 1 − its square, and that mean's norm, once complete() was
        called.

        A value that isn't known is None: norms and times of plain steps, error_norm without error feedback.
        """
        return [row.as_dict() for row in list(self._rows)]

    def drain(self) -> list[dict[str, Any]]:
        """Return rows() and forget them."""
        rows = self.rows()
        self._forget(len(rows))
        return rows

    def flush(self, log: Log) -> None:
        """Call log(step, {name: value}) for every recorded step, oldest first, and forget the rows.

        The names: "gradcomp/rate", "gradcomp/relative_error" and others for the step as a whole, and
        "gradcomp/bucket 0/rate" and so on for its buckets. Values that aren't known are left out.
        """
        rows = self.rows()
        for step, values in step_values(rows):
            log(step, values)
        self._forget(len(rows))

    def save(self, path: str | Path) -> None:
        """Append the rows to a file of JSON lines, and forget them; `python -m gradcomp report` shows it.

        Every rank that saves needs a file of its own. Raises OSError for a file that can't be written; the
        rows stay then.
        """
        rows = self.rows()
        group = resolve_group("Recorder.save", self._state.process_group)
        header = None
        if str(path) not in self._paths:
            header = recording_file.header(
                self._state.algorithm, self._state.compared_options(), group.rank(), group.size()
            )
        recording_file.append(Path(path), header, rows)
        self._paths.add(str(path))
        self._forget(len(rows))

    def _forget(self, num_rows: int) -> None:
        for _ in range(min(num_rows, len(self._rows))):
            self._rows.popleft()


def _gathered(parts: Sequence[BucketPart], buffer: torch.Tensor) -> torch.Tensor:
    """Return the parts' elements one after another; the buffer itself if there is one part, the whole."""
    gathered = [part.gather(buffer) for part in parts]
    return gathered[0] if len(gathered) == 1 else torch.cat(gathered)
