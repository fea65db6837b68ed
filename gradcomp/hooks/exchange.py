"""When a hook's work runs: in order on a side stream (CUDA), or around an asynchronous collective.

A hook that compresses, all-reduces and decompresses a bucket must neither hold up backward nor let the
order of collectives differ between ranks:

    CUDA   current stream  ──gradients ready──▶ ...backward goes on...            ──▶ waits for event
           side stream       └▶ compress ─ all-reduce ─ decompress ─ event ──────────┘

    CPU    hook: compress, start the all-reduce, return      backward goes on
           communication thread: all-reduce, decompress, complete the future

On CUDA everything is enqueued by the thread that called the hook, bucket after bucket: no callback, and
no wait on the host (but for backends that work on the host, such as gloo, which wait by their nature).
"""

from collections.abc import Callable, MutableMapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The process's one side stream on a CUDA device, hence one order of work for all hooks."""
    return torch.cuda.Stream(device)


_wires: MutableMapping[torch.Tensor, dict[str, torch.Tensor]] = WeakIdKeyDictionary()


def take_wire(bucket: dist.GradBucket, hook_name: str, dtype: torch.dtype) -> torch.Tensor:
    """A buffer of this dtype, as long as the bucket, for as long as the bucket is in flight: end with keep_wire.

    Two buckets in flight never have the same one: what is taken is not kept any more. On a CPU, where new memory costs a
    page fault per 4 KiB, it is kept from step to step with the bucket's first parameter, until the parameters are arranged in
    other buckets. On CUDA the caching allocator of torch keeps it, for the stream that is current here.
    """
    buffer = bucket.buffer()
    wire = _wires.get(bucket.parameters()[0], {}).pop(hook_name, None)
    if wire is None or wire.numel() != buffer.numel() or wire.device != buffer.device:
        # What other buckets of these parameters have left: the first step's one bucket, say.
        for parameter in bucket.parameters():
            _wires.get(parameter, {}).pop(hook_name, None)
        wire = torch.empty(buffer.numel(), dtype=dtype, device=buffer.device)
    return wire


def keep_wire(first_parameter: torch.Tensor, hook_name: str, wire: torch.Tensor) -> None:
    """Keep what take_wire gave for the bucket's next step, once nothing reads it any more."""
    if not wire.is_cuda:
        _wires.setdefault(first_parameter, {})[hook_name] = wire


def group_of(hook_name: str, process_group: Any, of: str = "state") -> dist.ProcessGroup:
    """The process group that a hook was registered with, as its `of`; None means the default group."""
    if process_group is None:
        process_group = dist.group.WORLD
        if process_group is None:
            raise RuntimeError(
                f"{hook_name} was registered with {of} None, which means the default process group, "
                "but there is none: call torch.distributed.init_process_group first"
            )
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"{hook_name} takes a process group or None as its {of}, got {process_group!r}")
    return process_group


def require_dense_floats(hook_name: str, buffer: torch.Tensor) -> None:
    if not buffer.is_floating_point():
        raise TypeError(f"{hook_name} compresses floating-point buckets, got {buffer.dtype}")
    if buffer.layout != torch.strided:
        raise TypeError(
            f"{hook_name} compresses dense buckets, got {buffer.layout}. Likely cause: nn.Embedding(sparse=True), for "
            "which torch's DDP makes a sparse bucket; gradcomp's averages it apart from the hook"
        )


def in_stream_order(
    device: torch.device, sequence: Callable[[], torch.Tensor]
) -> torch.futures.Future[torch.Tensor]:
    """Enqueue kernels and collectives on a CUDA device's side stream, after its current stream.

    Returns a future that already holds the sequence's result; whoever waits for it makes their stream
    wait for the event recorded here.
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[device])
    stream = side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        future.set_result(sequence())
    return future


def all_reduce_between(
    device: torch.device,
    group: dist.ProcessGroup,
    compress: Callable[[], torch.Tensor],
    decompress: Callable[[torch.Tensor], torch.Tensor],
) -> torch.futures.Future[torch.Tensor]:
    """Sum `compress()` over the group, and complete a future with `decompress(sum)`.

    The sum is formed in place. Raises RuntimeError when the backend refuses the tensor; an error of
    the communication itself surfaces from whoever waits for the future.
    """

    def sequence() -> torch.Tensor:
        wire = compress()
        _all_reduce(wire, group, async_op=False)
        return decompress(wire)

    if device.type == "cuda":
        return in_stream_order(device, sequence)
    work = _all_reduce(compress(), group, async_op=True)
    return work.get_future().then(lambda future: decompress(future.value()[0]))


def _all_reduce(wire: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool) -> dist.Work:
    try:
        work: dist.Work = dist.all_reduce(wire, group=group, async_op=async_op)
        return work
    except (RuntimeError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"backend {dist.get_backend(group)!r} did not all-reduce a {wire.dtype} tensor on "
            f"{wire.device}: {error}. If it has no all-reduce for {wire.dtype}, register a hook that "
            "sends another dtype"
        ) from error
