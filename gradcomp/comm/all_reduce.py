"""One all-reduce per bucket, between compressing and decompressing it.

On a CPU the hook compresses, starts the all-reduce and returns. gloo's thread decompresses, beside backward:

    hook: compress, start the all-reduce, return      backward goes on
    communication thread: all-reduce, decompress, complete the future

On CUDA these are two stages of a pipeline; see pipeline.py.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gradcomp import ops

from .pipeline import Pipeline, Stages, average_in_stages
from .process_group import ExplainedError, Operation
from .streams import Future


def all_reduce_compressed(
    bucket: dist.GradBucket,
    group: dist.ProcessGroup,
    operation: Operation,
    compress: Callable[[], torch.Tensor],
    decompress: Callable[[torch.Tensor], torch.Tensor],
) -> Future:
    """Sum `compress()` over the group, and complete a future with `decompress(sum)`.

    operation: explains errors of the all-reduce.

    The sum is formed in place. Raises RuntimeError if the backend refuses the tensor. An error of the
    communication itself is raised by a wait for the future, or on CUDA in a later bucket's hook.
    """
    device = bucket.buffer().device
    if not ops.has_streams(device):
        work = _all_reduce(compress(), group, operation)
        return work.get_future().then(lambda future: decompress(_value_of(future, operation)[0]))

    def stages() -> Stages:
        wire = compress()
        yield _all_reduce(wire, group, operation)
        return decompress(wire)

    return average_in_stages(bucket, stages(), operation)


def average_in_place(bucket: dist.GradBucket, group: dist.ProcessGroup, operation: Operation) -> Future:
    """Average a bucket in its own dtype: divide it by the world size, then all-reduce it (sum)."""
    buffer = bucket.buffer()
    return all_reduce_compressed(
        bucket,
        group,
        operation,
        compress=lambda: buffer.div_(group.size()),
        # In place; gloo's result for a complex bucket is its view as real numbers.
        decompress=lambda _: buffer,
    )


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
    if not ops.has_streams(device):
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
