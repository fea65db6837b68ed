"""One all-reduce per bucket, in the bucket's dtype or in 16 bits.

The caller divides or casts the bucket, starts the all-reduce and returns. A callback of its future casts
back, beside backward: on a thread of gloo's, or on a stream of torch's, which waits for NCCL.

    hook: compress, start the all-reduce, return      backward goes on
    callback: all-reduce, decompress, complete the future

Over a delay, where ranks exchange messages (exchange.py), for CUDA tensors on gloo, whose futures know no
streams, and while compressed buckets are under way, these are stages of a pipeline; see pipeline.py.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.device import has_streams, require_no_capture

from .bucket import as_real, take_wire
from .exchange import MIN_DELAY_S, SUM, Works, all_reduce, round_trip_s
from .pipeline import Pipeline, average_in_stages
from .process_group import ExplainedError, Explaining, backends_of, has_backend
from .streams import Future

# What a bucket is sent in, and what to call when it is averaged, if anything. A name, as Python evaluates the
# annotations of a function within a function in every call.
_Wire = tuple[torch.Tensor, Callable[[], None] | None]


def average_in_place(
    bucket: dist.GradBucket,
    group: dist.ProcessGroup,
    operation: Explaining,
    pipeline: Pipeline | None = None,
    *,
    divisor: float | None = None,
    wire_dtype: torch.dtype | None = None,
) -> Future:
    """Return a future of the bucket's buffer, which gets the sum over the group of buffer / divisor.

    operation: explains errors of the all-reduce.
    pipeline: see average_in_stages.
    divisor: the group's size if None. The division comes first: the sum may overflow where the mean does not.
    wire_dtype: float16 or bfloat16, to which each rank's quotient is rounded; None for the bucket's dtype.

    Raises RuntimeError if the backend refuses the dtype. An error of the communication itself is raised by a
    wait for the future, or in a later bucket's hook.
    """
    buffer, by = bucket.buffer(), group.size() if divisor is None else divisor
    on_streams = has_streams(buffer.device)

    def compress() -> _Wire:
        if wire_dtype is not None:
            wire, keep = take_wire(bucket, wire_dtype)
            return ops.cast(buffer, out=wire, scale=1 / by, overwrite=True), keep
        return as_real(buffer.div_(by) if by != 1 else buffer), None

    def stages() -> Works:
        wire, keep = compress()
        yield from all_reduce(wire, group, has_delay=True, out=wire if keep is None else buffer)
        if keep is not None:
            keep()

    if on_streams:
        in_future = has_backend(group, "cuda:nccl") and not (pipeline and pipeline.running)
    else:  # a delay is known where ranks exchange messages only
        in_future = round_trip_s(buffer, group) < MIN_DELAY_S
    if not in_future:
        return average_in_stages(bucket, stages(), operation, pipeline)
    require_no_capture("gradients can't be averaged", buffer.device)
    wire, keep = compress()

    def finish(future: Future) -> torch.Tensor:  # holds no process group, see Explaining
        with operation:
            future.value()
        if keep is not None:
            ops.cast(wire, out=buffer)
            keep()
        return buffer

    return start_all_reduce(wire, group, operation).get_future().then(finish)


def start_all_reduce(wire: torch.Tensor, group: dist.ProcessGroup, operation: Explaining) -> dist.Work:
    """Start summing a real tensor over the group. Raises RuntimeError if the backend refuses its dtype."""
    try:
        return group.allreduce([wire], SUM)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        # gloo's own errors name its source files.
        if isinstance(error, dist.DistError) or "/gloo/" in str(error):
            raise operation.explained(error) from error
        raise ExplainedError(
            f"backend {','.join(backends_of(group))!r} did not all-reduce a {wire.dtype} tensor on "
            f"{wire.device}: {error}. If it has no all-reduce for {wire.dtype}, register a hook that "
            "sends another dtype"
        ) from error
