"""One all-reduce per bucket, between compressing and decompressing it.

The hook compresses, starts the all-reduce and returns. A callback of its future decompresses, beside
backward: on a thread of gloo's, or on a stream of torch's, which waits for NCCL.

    hook: compress, start the all-reduce, return      backward goes on
    callback: all-reduce, decompress, complete the future

Over a delay, where ranks exchange messages (exchange.py), for CUDA tensors on gloo, whose futures know no
streams, and while compressed buckets are under way, these are stages of a pipeline; see pipeline.py.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.device import has_streams

from .bucket import Wire, as_real
from .exchange import MIN_DELAY_S, SUM, all_reduce, round_trip_s
from .pipeline import Pipeline, Stages, average_in_stages
from .process_group import ExplainedError, Explaining, backends_of, has_backend
from .streams import Future, require_no_capture


def all_reduce_compressed(
    bucket: dist.GradBucket,
    group: dist.ProcessGroup,
    operation: Explaining,
    compress: Callable[[], Wire],
    pipeline: Pipeline | None = None,
) -> Future:
    """Sum a compressed bucket over the group into the bucket's buffer, which completes a future.

    operation: explains errors of the all-reduce.
    compress: returns the wire, which may be the buffer.
    pipeline: see average_in_stages.

    Raises RuntimeError if the backend refuses the tensor. An error of the communication itself is raised by a
    wait for the future, or in a later bucket's hook.
    """
    buffer = bucket.buffer()
    on_streams = has_streams(buffer.device)

    def stages() -> Stages:
        wire, release = compress()
        if on_streams:
            yield start_all_reduce(wire, group, operation)
            if wire is not buffer:
                ops.decompress_cast(wire, out=buffer)
        else:
            out = as_real(buffer)
            yield from all_reduce(out if wire is buffer else wire, group, has_delay=True, out=out)
        release()
        return buffer

    if on_streams:
        in_future = has_backend(group, "cuda:nccl") and (pipeline is None or pipeline.is_idle)
    else:  # a delay is known where ranks exchange messages only
        in_future = round_trip_s(buffer, group) < MIN_DELAY_S
    if not in_future:
        return average_in_stages(bucket, stages(), operation, pipeline)
    if on_streams:
        require_no_capture("gradients can't be averaged", buffer.device)
    wire, release = compress()

    def finish(future: Future) -> torch.Tensor:
        # gloo's result for a complex tensor is its view as real numbers.
        with operation:
            future.value()
        if wire is not buffer:
            ops.decompress_cast(wire, out=buffer)
        release()
        return buffer

    return start_all_reduce(wire, group, operation).get_future().then(finish)


def average_in_place(
    bucket: dist.GradBucket,
    group: dist.ProcessGroup,
    operation: Explaining,
    pipeline: Pipeline | None = None,
    divisor: float | None = None,
) -> Future:
    """Average a bucket in its own dtype: divide it by the divisor or the group's size, then all-reduce it."""
    buffer, by = bucket.buffer(), group.size() if divisor is None else divisor

    def divide() -> Wire:
        return (buffer.div_(by) if by != 1 else buffer), lambda: None

    return all_reduce_compressed(bucket, group, operation, divide, pipeline)


def run_hook_compressed(
    bucket: dist.GradBucket,
    operation: Explaining,
    start: Callable[[], Future],
    finish: Callable[[torch.Tensor], torch.Tensor],
    pipeline: Pipeline,
) -> Future:
    """Return a future of `finish(result)`, where `start()` calls another hook whose future holds `result`.

    operation: explains the errors of the other hook's collectives.
    pipeline: of the calling hook alone. The other hook has its buckets in another one: a stage that waits for
        a bucket of its own pipeline would wait without end.
    """
    device = bucket.buffer().device

    def finish_explained(future: Future) -> torch.Tensor:
        with operation:
            result = future.value()
        return finish(result)

    def stages() -> Stages:
        future = start()
        yield future  # type: ignore[misc]  # it is waited for as a collective is
        # gloo's futures know no streams: their work is on the default stream.
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
        return finish(future.value())

    if not has_streams(device):
        return start().then(finish_explained)
    return average_in_stages(bucket, stages(), operation, pipeline)


def start_all_reduce(wire: torch.Tensor, group: dist.ProcessGroup, operation: Explaining) -> dist.Work:
    """Start summing a flat tensor over the group. Raises RuntimeError if the backend refuses its dtype."""
    try:
        return group.allreduce([as_real(wire)], SUM)
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
