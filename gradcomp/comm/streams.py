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
    """Return the process's one side stream on a CUDA device, hence one order of work for all hooks.

    Its priority is high: collectives wait for our few short kernels, and at equal priority each of these
    would wait until no block of a kernel of backward's is left to start. A priority stops no block that runs
    and adds no work, so backward loses the time that our kernels take, which it does at any priority.
    """
    return torch.cuda.Stream(device, priority=-1)


def completed(device: torch.device, result: Callable[[], torch.Tensor]) -> Future:
    """Return a future that holds the result; to wait for it is to wait for the current stream's work so
    far."""
    future: Future = (
        torch.futures.Future(devices=[device]) if ops.has_streams(device) else torch.futures.Future()
    )
    future.set_result(result())
    return future


def in_order(device: torch.device, sequence: Callable[[], torch.Tensor]) -> Future:
    """Return a future that holds the result of a sequence of kernels and collectives.

    On CUDA they are enqueued on the device's side stream, after its current stream, and whoever waits for the
    future makes their stream wait for the event recorded here. On a CPU the sequence has run when this
    returns: a collective issued from a callback would come in another order on every rank.
    """
    if not ops.has_streams(device):
        return completed(device, sequence)
    stream, current = side_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    if current.device_index != torch.cuda.current_device():
        with torch.cuda.stream(stream):  # which switches devices, too
            return completed(device, sequence)
    # What torch's context does, in half its time.
    torch.cuda.set_stream(stream)
    try:
        return completed(device, sequence)
    finally:
        torch.cuda.set_stream(current)


def around_hook(
    device: torch.device,
    operation: Operation,
    start: Callable[[], Future],
    finish: Callable[[torch.Tensor], torch.Tensor],
) -> Future:
    """Return a future of `finish(result)`, where `start()` calls another hook whose future holds `result`.

    operation: what the errors of the other hook's collectives are explained with.
    """
    if not ops.has_streams(device):
        return start().then(lambda future: finish(_value_of(future, operation)))

    def sequence() -> torch.Tensor:
        with operation:
            result = start().wait()  # makes the side stream wait, not the host
        # But gloo's futures know no streams: what they promise is done on the default one.
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
        return finish(result)

    return in_order(device, sequence)


def around_all_reduce(
    device: torch.device,
    group: dist.ProcessGroup,
    operation: Operation,
    compress: Callable[[], torch.Tensor],
    decompress: Callable[[torch.Tensor], torch.Tensor],
) -> Future:
    """Sum `compress()` over the group, and complete a future with `decompress(sum)`.

    The sum is formed in place. Raises RuntimeError when the backend refuses the tensor; an error of
    the communication itself surfaces from whoever waits for the future. operation: what it is explained with.
    """
    if not ops.has_streams(device):
        work = _all_reduce(compress(), group, operation, async_op=True)
        return work.get_future().then(lambda future: decompress(_value_of(future, operation)[0]))

    def sequence() -> torch.Tensor:
        wire = compress()
        _all_reduce(wire, group, operation, async_op=False)
        return decompress(wire)

    return in_order(device, sequence)


def average_in_place(buffer: torch.Tensor, group: dist.ProcessGroup, operation: Operation) -> Future:
    """Average a bucket in its own dtype: divide it by the world size, then all-reduce it (sum)."""
    return around_all_reduce(
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
        # gloo waits here for an all-reduce of a device's tensors; its own errors name its source files.
        if isinstance(error, dist.DistError) or "/gloo/" in str(error):
            raise operation.explained(error) from error
        raise ExplainedError(
            f"backend {dist.get_backend(group)!r} did not all-reduce a {wire.dtype} tensor on "
            f"{wire.device}: {error}. If it has no all-reduce for {wire.dtype}, register a hook that "
            "sends another dtype"
        ) from error
