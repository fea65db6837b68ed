"""The side stream of a CUDA device, on which compressors run.

    current stream  ──gradients ready──▶ ...backward goes on...                         ──▶ waits for event
    side stream      └▶ compress │ … next bucket's work … │ waits for it ─ decompress ─ event ──┘
    NCCL's stream               └ collective ────────────┘

Everything is enqueued by the threads that call hooks, bucket after bucket, with no wait on the host (except
for backends that work on the host, such as gloo). On a CPU there are no streams: work runs at once.
"""

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch

from gradcomp.device import has_streams, is_current, require_no_capture

from .torch_private import ids_of_current_stream, set_stream

T = TypeVar("T")
Future = torch.futures.Future[torch.Tensor]
_side_streams: dict[torch.device, torch.cuda.Stream] = {}


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the process's one side stream on a CUDA device: all hooks' work has one order there.

    The stream has a high priority, because collectives wait for our few short kernels. At equal priority each
    kernel would wait until backward's kernels have no blocks left to start. A priority stops no running block
    and adds no work, so backward loses only our kernels' time, as at any priority.
    """
    # For two threads at once, cache calls this twice.
    return _side_streams.setdefault(device, torch.cuda.Stream(device, priority=-1))


def wait_for_current_stream(device: torch.device) -> None:
    """Make the side stream wait for the current stream's work so far: a bucket's gradients, for example.

    Raises RuntimeError if the current stream is captured in a CUDA graph.
    """
    require_no_capture("gradients can't be averaged", device)
    side, events = side_stream(device), cast(dict[Any, torch.cuda.Event], _of_thread.__dict__)
    event = events.get(side)
    if event is None:
        event = events[side] = torch.cuda.Event()
    # Recorded again: what has waited for it keeps waiting for the earlier record.
    event.record(_stream(*ids_of_current_stream(side.device_index)))
    event.wait(side)


_of_thread = threading.local()  # has an event by side stream: another thread's record would be waited for


@cache
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def on_side_stream(device: torch.device, function: Callable[[], T]) -> T:
    """Run a function while the device's side stream is the current one. On a CPU, just run it."""
    if not has_streams(device):
        return function()
    stream = side_stream(device)
    if not is_current(device):
        with torch.cuda.stream(stream):  # which switches devices, too
            return function()
    before = _stream(*ids_of_current_stream(stream.device_index))
    _set(stream)
    try:
        return function()
    finally:
        _set(before)


def _set(stream: torch.cuda.Stream) -> None:
    set_stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def completed(device: torch.device, result: torch.Tensor) -> Future:
    """Return a future that holds the result. Waiting for it waits for the current stream's work so far."""
    future: Future = torch.futures.Future(devices=[device] if has_streams(device) else None)
    future.set_result(result)
    return future


def mark(device: torch.device) -> Any:
    """Return the time, on CUDA as an event on the current stream."""
    if not has_streams(device):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(first: Any, last: Any) -> float:
    """Return the time between two marks. The host waits for the second."""
    if isinstance(first, torch.cuda.Event):
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3
    return float(last - first)
