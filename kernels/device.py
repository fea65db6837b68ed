"""Devices: which have streams or slow fp64, how kernels are launched there, how the host sends tables.

Support for another kind of device begins here. comm/streams.py holds what hooks do on streams.
"""

import functools
import threading
from contextlib import AbstractContextManager, nullcontext

import torch

# Compute capabilities whose fp64 runs at half of fp32's rate or, on tensor cores, as fast. All others run it
# at 1/32 or 1/64 (CUDA C++ programming guide, throughput of arithmetic instructions).
FAST_FP64 = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})

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


@functools.cache
def is_fp64_slow(device: torch.device) -> bool:
    """Return whether kernels should avoid fp64 on a device. Triton's interpreter has no reason to."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) not in FAST_FP64


def processor(device: torch.device) -> dict[str, str]:
    """Return what decides the last bits of sums on a device, by name: between ranks it should be equal."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arithmetic = "pairs of fp32" if is_fp64_slow(device) else "fp64"
        return {"GPU compute capability": f"{major}.{minor}", "orthonormalizing in": arithmetic}
    return {"CPU capability": torch.backends.cpu.get_cpu_capability()} if device.type == "cpu" else {}


def send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a host tensor on the device, copied asynchronously where it has streams."""
    return pinned(host, device).to(device, non_blocking=True)


def pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the host tensor in memory from which an asynchronous copy to the device can read."""
    # The pinned-memory allocator keeps the block until the copy that reads it is over, so a fresh one
    # each time can't be overwritten too early.
    return host.pin_memory() if has_streams(device) else host
