"""Record what compression does, bucket by bucket and step by step. The host doesn't wait for the device.

Norms and sketches (row.py) are computed on the bucket's device, in stream order with the hook's kernels. The
host reads them when you ask for rows. docs/recording.md has the formulas.
"""

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...comm.consistency import require_all_ranks, require_same_on_all_ranks
from ...comm.exchange import Works
from ...comm.process_group import device_for, resolve_group
from ...comm.streams import mark
from ...rules import RANK
from ..parameter_states import Bucket
from ..state import CompressorState
from .row import NUM_VALUES, RecordedBucket, measure, relative_errors, step_values


class Recorder:
    """Records the steps of a compressing hook's state, from now on.

    state: a PowerSGDState, QuantizationState or CompressorState, used with DDP, the Reducer, the wrapper,
        compress_replicas or average_. A state has at most one recorder. Its checkpoints don't contain it.
    every: record the steps whose number is a multiple of `every`; 1 for all steps.
    max_rows: the number of rows to keep, one per bucket and step; then the oldest rows are dropped. A row
        takes about 4 kB, 3 kB of them on the bucket's device.

    Averages are bit-identical with and without a recorder. docs/recording.md has the cost.

    Raises TypeError for another state; ValueError if the state has a recorder, is compress_reduce_scatter's,
    or if every or max_rows is not a whole number of at least 1.

    Example::

        recorder = Recorder(state, every=10)
        ...  # train
        recorder.complete()  # on every rank
        json.dump(recorder.rows(), file)
    """

    def __init__(self, state: CompressorState, *, every: int = 1, max_rows: int = 4096):
        if not isinstance(state, CompressorState):
            raise TypeError(
                "Recorder takes the state of a compressing hook (PowerSGDState, QuantizationState, "
                f"CompressorState), got {state!r}"
            )
        if state.recorder is not None:
            raise ValueError("the state has a recorder already: call its detach() first")
        if state.has_shards:
            raise ValueError(
                "the state is compress_reduce_scatter's: it sums shards, and no rank has averages to record"
            )
        self._state = state
        self._every = int(RANK("every", every))
        self._rows: deque[RecordedBucket] = deque(maxlen=int(RANK("max_rows", max_rows)))
        # What an AutoState has chosen: {"step", "choice", "candidates"}, the last as in AutoState.table.
        self.choices: list[dict[str, Any]] = []
        state.recorder = self

    def detach(self) -> None:
        """Stop recording. The rows so far stay."""
        if self._state.recorder is self:
            self._state.recorder = None

    # --- what the state calls ---

    def add_plain(self, step: int, index: int, buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Record a bucket that is averaged without compression."""
        if step % self._every == 0:
            self._rows.append(self._row(step, index, buffer, group, buffer.nbytes))

    def _row(
        self, step: int, index: int, buffer: torch.Tensor, group: dist.ProcessGroup, sent_bytes: int
    ) -> RecordedBucket:
        numel, gradient_bytes = buffer.numel(), buffer.nbytes
        return RecordedBucket(
            step, index, weakref.ref(group), group.rank(), numel, gradient_bytes, sent_bytes
        )

    def recorded(
        self,
        stages: Works,
        step: int,
        index: int,
        buffer: torch.Tensor,
        own: Bucket,
        group: dist.ProcessGroup,
    ) -> Works:
        """Run a compressed bucket's stages, and record the bucket. Yields each collective under way.

        buffer: the bucket's buffer: this rank's gradients before the stages, the averages after them.
        own: the bucket's compressor and errors.
        """
        if step % self._every:
            yield from stages
            return
        sent_bytes = 0 if own.compressor is None else own.compressor.sent_numel * buffer.itemsize
        row = self._row(step, index, buffer, group, sent_bytes)
        shift = step * 8191 + index * 131
        row.values = buffer.new_zeros(3, NUM_VALUES, dtype=torch.float32)
        measure(buffer, shift, out=row.values[0])
        row.marks.append(mark(buffer.device))
        yield from stages
        row.marks.append(mark(buffer.device))
        measure(buffer, shift, out=row.values[1])
        error = own.current_error()
        row.has_error = error is not None
        if error is None and own.sent:
            error = own.added(own.sent)
        if error is not None:
            measure(error, shift, out=row.values[2])
        row.marks.append(mark(buffer.device))
        self._rows.append(row)

    # --- what users call ---

    @torch.no_grad()
    def complete(self) -> None:
        """Compute the average's relative error for all rows so far. No rank can compute it alone.

        A collective: every rank of the state's group must call it after the same step, with the same rows. It
        averages 1 kB per row, and the host waits for the device. Without it, the rows' relative_error,
        energy_kept and mean_norm stay None, as in rows of an earlier group, with other ranks.

        Raises RuntimeError on every rank if the ranks' rows differ.
        """
        group = resolve_group("Recorder.complete", self._state.process_group)
        rows = [row for row in self._rows if row.values is not None and row.group() is group]
        values = [row.values for row in rows if row.values is not None]
        advice = "Call it on every rank, after the same step; then only one rank may write or log the rows"
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
            row.read_norms()
        found = relative_errors(torch.stack(values), [row.has_error for row in rows], group)
        for row, (relative_error, mean_norm) in zip(rows, found, strict=True):
            row.relative_error, row.mean_norm, row.values = relative_error, mean_norm, None

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per bucket and step, oldest first. The host waits for the device.

        docs/recording.md explains the values. Unknown ones are None: norms and times of plain steps,
        error_norm without error feedback, and the results of complete() before you call it.
        """
        return [row.as_dict() for row in list(self._rows)]

    def flush(self, log: Callable[[int, dict[str, float]], Any]) -> None:
        """Call log(step, {name: value}) for every recorded step, oldest first, and delete the rows.

        The step as a whole has the names "gradcomp/rate", "gradcomp/relative_error" and others. Its buckets
        have "gradcomp/bucket 0/rate" and so on. Unknown values are left out.
        """
        rows = self.rows()
        for step, values in step_values(rows):
            log(step, values)
        for _ in range(min(len(rows), len(self._rows))):
            self._rows.popleft()

    def forget_step(self, step: int) -> None:
        """Delete the rows of this step and later ones. Rows that are flushed stay."""
        self._rows = deque((row for row in self._rows if row.step < step), self._rows.maxlen)
