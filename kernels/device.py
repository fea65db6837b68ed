"""Devices: which ones have streams, how kernels are launched there, and how the host sends tables.

Support for another kind of device begins here. compress/streams.py holds what hooks do on streams.
"""

import threading
from contextlib import AbstractContextManager, nullcontext

import torch

_interpreter = threading.RLock()
_no_change = nullcontext()


def has_streams(device: torch.device) -> bool:
    """Return whether work on the device is enqueued on streams without waiting: whether it is CUDA."""
    return device.type == "cuda"


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on a device: Triton launches on the current one.

    Triton's interpreter, which runs launches on a CPU, keeps its state in globals, while hooks run on several
    threads: there one thread at a time enters the context.
    """
    if not has_streams(device):
        return _interpreter
    if device.index is None or device.index == torch.cuda.current_device():
        return _no_change  # a hook's sequence is on its device already, and torch's context takes longer
    return torch.cuda.device(device)


def send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a host tensor on the device, copied asynchronously where it has streams."""
    return pinned(host, device).to(device, non_blocking=True)


def pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the host tensor in memory from which an asynchronous copy to the device can read."""
    # The pinned-memory allocator keeps the block until the copy that reads it is over, so a fresh one
    # each time can't be overwritten too early.
    return host.pin_memory() if has_streams(device) else host
