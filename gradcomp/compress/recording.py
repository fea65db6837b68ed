"""Record what compression does, bucket by bucket and step by step. The host doesn't wait for the device.

Norms and sketches are computed on the bucket's device, in stream order with the hook's kernels. The host
reads them when you ask for rows. docs/recording.md has the formulas.

The ranks' error norms don't determine the norm of their mean error; sketches estimate it. A sketch sums the
elements, multiplied by random signs that all ranks share, in LENGTH places (Charikar, Chen and Farach-Colton,
"Finding frequent items in data streams", ICALP 2002). It is linear, and its norm estimates the vector's, with
a relative standard deviation of about 1 / sqrt(2 · LENGTH) = 4.5 %, and a ratio's up to 6.3 %.
"""

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.device import has_streams, send

from ..comm.consistency import require_all_ranks, require_same_on_all_ranks
from ..comm.exchange import Works
from ..comm.process_group import Explaining, device_for, resolve_group
from ..comm.streams import mark, seconds_between
from ..rules import RANK
from .parameter_states import Bucket
from .state import CompressorState

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
    out: fp32 [1 + LENGTH] on the same device; inf or NaN if a value isn't finite or its square overflows.
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

    group: of the average.
    values: [3, NUM_VALUES], norms and sketches of this rank's gradients, of the average, and of this rank's
        error; without error feedback, of the errors of other compressors that it has sent. None in a plain
        step. Only the norms after Recorder.complete(), which sets relative_error and mean_norm.
    has_error: True with error feedback. The same on all ranks.
    marks: when the hook began, the bucket was averaged, and the values were computed; none in a plain step.
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

    def computed(self) -> torch.Tensor:
        """Wait until the values are computed, and return them."""
        assert self.values is not None
        seconds_between(*self.marks[1:])
        return self.values

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a dict; see Recorder.rows(). Waits until its values are computed."""
        is_compressed, sent = bool(self.marks), self.sent_bytes
        gradient, average, error = self.computed()[:, 0].tolist() if is_compressed else (None, None, None)
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
    rows: Sequence[RecordedBucket], group: dist.ProcessGroup
) -> Iterator[tuple[float, float]]:
    """Yield (relative error of the average, norm of the mean of gradients plus errors) for every row.

    A collective.

    The relative error is ‖E‖ / ‖M‖. C is the average, E the mean of the ranks' new errors, and M the mean of
    gradients plus errors. Error feedback keeps M = C + E. Without error feedback, E = M − C. The ranks'
    sketches are averaged to estimate E.
    """
    gradients, averages, errors = torch.stack([row.computed() for row in rows])[:, :, 1:].unbind(1)
    keeps = torch.tensor([[row.has_error] for row in rows], dtype=torch.bool, device=errors.device)
    owed = torch.where(keeps, errors, gradients + errors - averages).double()
    with Explaining.of("average the sketches of the recorded rows", group):
        dist.all_reduce(owed, group=group)
    owed /= group.size()
    norms = torch.stack([owed.norm(dim=1), (averages.double() + owed).norm(dim=1)], dim=1)
    for error, whole in norms.tolist():
        yield (error / whole if whole else (math.inf if error else 0.0)), whole


_OF_STEP = ("gradient_norm", "average_norm", "error_norm")
_OF_BUCKETS = ("rate", "relative_error", "energy_kept", "time_ms", *_OF_STEP)


def step_values(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, values by name) for every step of rows in the order of steps."""
    for step, of_step in groupby(rows, key=lambda row: int(row["step"])):
        buckets = list(of_step)
        values = {f"gradcomp/{name}": value for name, value in whole_step(buckets).items()}
        for row in buckets:
            values |= {f"gradcomp/bucket {row['bucket']}/{name}": row[name] for name in _OF_BUCKETS}
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
            size, place = (buffer.numel(), buffer.nbytes), (weakref.ref(group), group.rank())
            self._rows.append(RecordedBucket(step, index, *place, *size, buffer.nbytes))

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
        assert own.compressor is not None
        sent_bytes = own.compressor.sent_numel * buffer.itemsize
        shift = step * 8191 + index * 131
        values = buffer.new_zeros(3, NUM_VALUES, dtype=torch.float32)
        measure(buffer, shift, out=values[0])
        marks = [mark(buffer.device)]
        yield from stages
        marks.append(mark(buffer.device))
        measure(buffer, shift, out=values[1])
        error = own.current_error()
        has_error = error is not None
        if error is None and own.sent:
            error = own.added(own.sent)
        if error is not None:
            measure(error, shift, out=values[2])
        marks.append(mark(buffer.device))
        size, place = (buffer.numel(), buffer.nbytes), (weakref.ref(group), group.rank())
        self._rows.append(RecordedBucket(step, index, *place, *size, sent_bytes, values, has_error, marks))

    # --- what users call ---

    @torch.no_grad()
    def complete(self) -> None:
        """Compute the average's relative error for all rows so far. No rank can compute it alone.

        A collective: every rank of the state's group must call it after the same step, with the same rows. It
        averages 2 kB per row, and the host waits for the device. Without it, the rows' relative_error,
        energy_kept and mean_norm stay None, as in rows of an earlier group, with other ranks.

        Raises RuntimeError on every rank if the ranks' rows differ.
        """
        group = resolve_group("Recorder.complete", self._state.process_group)
        rows = [row for row in self._rows if row.marks and row.mean_norm is None and row.group() is group]
        advice = "Call it on every rank, after the same step; then only one rank may write or log the rows"
        require_all_ranks("Recorder.complete", "find the relative errors of the recorded rows", group, advice)
        require_same_on_all_ranks(
            "Recorder.complete()",
            {"recorded rows": [(row.step, row.bucket, row.has_error) for row in rows]},
            group,
            device_for(group, map(RecordedBucket.computed, rows)),
            "Give every rank a recorder with the same every and max_rows, and call complete() after the same "
            "step",
        )
        for row, found in zip(rows, relative_errors(rows, group) if rows else (), strict=True):
            (row.relative_error, row.mean_norm), row.values = found, row.computed()[:, :1].cpu()

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
