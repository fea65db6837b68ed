"""When a hook's work runs: in order on a side stream (CUDA), or around an asynchronous collective (CPU).

pipeline.py is for hooks with several collectives per bucket on a CPU.

A hook that compresses, all-reduces and decompresses a bucket must neither hold up backward nor let the
order of collectives differ between ranks:

    CUDA   current stream  ──gradients ready──▶ ...backward goes on...            ──▶ waits for event
           side stream       └▶ compress ─ all-reduce ─ decompress ─ event ──────────┘

    CPU    hook: compress, start the all-reduce, return      backward goes on
           communication thread: all-reduce, decompress, complete the future

On CUDA everything is enqueued by the thread that called the hook, bucket after bucket: no callback, and
no wait on the host (but for backends that work on the host, such as gloo, which wait by their nature).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from gradcomp import ops

from .process_group import ExplainedError, Operation

Future = torch.futures.Future[torch.Tensor]


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the process's one side stream on a CUDA device: all hooks' work has one order there.

    The stream has a high priority, because collectives wait for our few short kernels. At equal priority each
    kernel would wait until backward's kernels have no blocks left to start. A priority stops no running block
    and adds no work, so backward loses only our kernels' time, as at any priority.
    """
    return torch.cuda.Stream(device, priority=-1)


def completed(device: torch.device, result: Callable[[], torch.Tensor]) -> Future:
    """Return a future that holds the result. Waiting for it waits for the current stream's work so far."""
    future: Future = (
        torch.futures.Future(devices=[device]) if ops.has_streams(device) else torch.futures.Future()
    )
    future.set_result(result())
    return future


def run_on_side_stream(device: torch.device, sequence: Callable[[], torch.Tensor]) -> Future:
    """Return a future that holds the result of a sequence of kernels and collectives.

    On CUDA the sequence is enqueued on the device's side stream, after the current stream. A wait for the
    future makes the waiting stream wait for the event recorded here. On a CPU the sequence has run when this
    returns: collectives issued from callbacks would come in a different order on each rank.
    """
    if not ops.has_streams(device):
        return completed(device, sequence)
    stream, current = side_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    if current.device_index != torch.cuda.current_device():
        with torch.cuda.stream(stream):  # which switches devices, too
            return completed(device, sequence)
    # torch.cuda.stream does this in twice the time.
    torch.cuda.set_stream(stream)
    try:
        return completed(device, sequence)
    finally:
        torch.cuda.set_stream(current)


def run_hook_compressed(
    device: torch.device,
    operation: Operation,
    start: Callable[[], Future],
    finish: Callable[[torch.Tensor], torch.Tensor],
) -> Future:
    """Return a future of `finish(result)`, where `start()` calls another hook whose future holds `result`.

    operation: explains the errors of the other hook's collectives.
    """
    if not ops.has_streams(device):
        return start().then(lambda future: finish(_value_of(future, operation)))

    def sequence() -> torch.Tensor:
        with operation:
            result = start().wait()  # makes the side stream wait, not the host
        # gloo's futures know no streams: their work is on the default stream.
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
        return finish(result)

    return run_on_side_stream(device, sequence)


def all_reduce_compressed(
    device: torch.device,
    group: dist.ProcessGroup,
    operation: Operation,
    compress: Callable[[], torch.Tensor],
    decompress: Callable[[torch.Tensor], torch.Tensor],
) -> Future:
    """Sum `compress()` over the group, and complete a future with `decompress(sum)`.

    operation: explains errors of the all-reduce.

    The sum is formed in place. Raises RuntimeError if the backend refuses the tensor. An error of the
    communication itself is raised by a wait for the future.
    """
    if not ops.has_streams(device):
        work = _all_reduce(compress(), group, operation, async_op=True)
        return work.get_future().then(lambda future: decompress(_value_of(future, operation)[0]))

    def sequence() -> torch.Tensor:
        wire = compress()
        _all_reduce(wire, group, operation, async_op=False)
        return decompress(wire)

    return run_on_side_stream(device, sequence)


def average_in_place(buffer: torch.Tensor, group: dist.ProcessGroup, operation: Operation) -> Future:
    """Average a bucket in its own dtype: divide it by the world size, then all-reduce it (sum)."""
    return all_reduce_compressed(
        buffer.device,
        group,
        operation,
        compress=lambda: buffer.div_(group.size()),
        # In place; gloo's result for a complex bucket is its view as real numbers.
        decompress=lambda _: buffer,
    )


def _value_of(future: Any, operation: Operation) -> Any:
    with operation:
        return future.value()


def _all_reduce(
    wire: torch.Tensor, group: dist.ProcessGroup, operation: Operation, *, async_op: bool
) -> dist.Work:
    try:
        work: dist.Work = dist.all_reduce(wire, group=group, async_op=async_op)
        return work
    except (RuntimeError, TypeError, ValueError) as error:
        # gloo waits here for CUDA tensors. Its own errors name its source files.
        if isinstance(error, dist.DistError) or "/gloo/" in str(error):
            raise operation.explained(error) from error
        raise ExplainedError(
            f"backend {dist.get_backend(group)!r} did not all-reduce a {wire.dtype} tensor on "
            f"{wire.device}: {error}. If it has no all-reduce for {wire.dtype}, register a hook that "
            "sends another dtype"
        ) from error
