"""One all-reduce per bucket, between compressing and decompressing it.

On a CPU without a delay the hook compresses, starts the all-reduce and returns. gloo's thread decompresses,
beside backward:

    hook: compress, start the all-reduce, return      backward goes on
    communication thread: all-reduce, decompress, complete the future

On CUDA, and where ranks exchange messages (exchange.py), these are stages of a pipeline; see pipeline.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.device import has_streams

from .bucket import as_real
from .delay import has_delay
from .exchange import all_reduce, sums_by_messages
from .pipeline import Pipeline, Stages, average_in_stages
from .process_group import ExplainedError, Operation
from .streams import Future


def all_reduce_compressed(
    bucket: dist.GradBucket,
    group: dist.ProcessGroup,
    operation: Operation,
    compress: Callable[[], torch.Tensor],
    release: Callable[[torch.Tensor], None] = lambda _: None,
    pipeline: Pipeline | None = None,
) -> Future:
    """Sum `compress()` over the group into the bucket's buffer, which completes a future.

    operation: explains errors of the all-reduce.
    release: called with what `compress()` returned when it has been used.
    pipeline: see average_in_stages.

    Raises RuntimeError if the backend refuses the tensor. An error of the communication itself is raised by a
    wait for the future, or in a later bucket's hook.
    """
    buffer = bucket.buffer()

    def finish(wire: torch.Tensor) -> torch.Tensor:
        if wire is not buffer:
            ops.decompress_cast(wire, out=buffer)
            release(wire)
        return buffer

    def stages() -> Stages:
        wire = compress()
        yield _all_reduce(wire, group, operation)
        return finish(wire)

    def stages_of(wire: torch.Tensor) -> Stages:
        out = as_real(buffer)
        yield from all_reduce(out if wire is buffer else wire, group, has_delay=is_slow, out=out)
        if wire is not buffer:
            release(wire)
        return buffer

    if has_streams(buffer.device):
        return average_in_stages(bucket, stages(), operation, pipeline)
    is_slow, wire = has_delay(buffer, group), compress()
    if sums_by_messages(wire, group, has_delay=is_slow):
        return average_in_stages(bucket, stages_of(wire), operation, pipeline)
    work = _all_reduce(wire, group, operation)
    # gloo's result for a complex tensor is its view as real numbers.
    return work.get_future().then(lambda future: (_value_of(future, operation), finish(wire))[1])


def average_in_place(
    bucket: dist.GradBucket,
    group: dist.ProcessGroup,
    operation: Operation,
    pipeline: Pipeline | None = None,
    divisor: float | None = None,
) -> Future:
    """Average a bucket in its own dtype: divide it, then all-reduce it (sum).

    divisor: None for the group's size.
    """
    buffer, by = bucket.buffer(), group.size() if divisor is None else divisor
    compress = partial(buffer.div_, by) if by != 1 else lambda: buffer
    return all_reduce_compressed(bucket, group, operation, compress, pipeline=pipeline)


def run_hook_compressed(
    bucket: dist.GradBucket,
    operation: Operation,
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
    if not has_streams(device):
        return start().then(lambda future: finish(_value_of(future, operation)))

    def stages() -> Stages:
        future = start()
        yield future  # type: ignore[misc]  # it is waited for as a collective is
        # gloo's futures know no streams: their work is on the default stream.
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
        return finish(future.value())

    return average_in_stages(bucket, stages(), operation, pipeline)


def _value_of(future: Any, operation: Operation) -> Any:
    with operation:
        return future.value()


def _all_reduce(wire: torch.Tensor, group: dist.ProcessGroup, operation: Operation) -> dist.Work:
    try:
        work: dist.Work = dist.all_reduce(wire, group=group, async_op=True)
        return work
    except (RuntimeError, TypeError, ValueError) as error:
        # gloo's own errors name its source files.
        if isinstance(error, dist.DistError) or "/gloo/" in str(error):
            raise operation.explained(error) from error
        raise ExplainedError(
            f"backend {dist.get_backend(group)!r} did not all-reduce a {wire.dtype} tensor on "
            f"{wire.device}: {error}. If it has no all-reduce for {wire.dtype}, register a hook that "
            "sends another dtype"
        ) from error
