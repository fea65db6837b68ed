"""What devices can do, how kernels are launched on them, and how the host sends them tables.

To support another kind of device, begin here. For hooks on streams see comm/streams.py.
"""

import functools
import threading
from contextlib import AbstractContextManager, nullcontext

import torch

# Compute capabilities with fast fp64: half of fp32's rate, or all of it on tensor cores. All others run fp64
# at 1/32 or 1/64 of fp32's rate (CUDA C++ programming guide, throughput of arithmetic instructions).
FAST_FP64 = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})

_interpreter = threading.RLock()
_no_change = nullcontext()


def has_streams(device: torch.device) -> bool:
    """Return whether the device enqueues work on streams without waiting: True for CUDA."""
    return device.type == "cuda"


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on this device.

    Triton launches on the current CUDA device, so the context makes this device the current one.
    Triton's interpreter launches on a CPU. It keeps its state in globals, while hooks run on several threads:
    there the context is a lock.
    """
    if not has_streams(device):
        return _interpreter
    if device.index is None or device.index == torch.cuda.current_device():
        return _no_change  # hooks are on their device already, and torch's context takes longer
    return torch.cuda.device(device)


@functools.cache
def is_fp64_slow(device: torch.device) -> bool:
    """Return whether kernels should avoid fp64 on a device: True for CUDA outside FAST_FP64.

    False on a CPU, where Triton's interpreter has no reason to avoid fp64.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) not in FAST_FP64


def processor(device: torch.device) -> dict[str, str]:
    """Return the properties of a device that decide the last bits of sums, by name.

    They should be equal on all ranks.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arithmetic = "pairs of fp32" if is_fp64_slow(device) else "fp64"
        return {"GPU compute capability": f"{major}.{minor}", "orthonormalizing in": arithmetic}
    return {"CPU capability": torch.backends.cpu.get_cpu_capability()} if device.type == "cpu" else {}


def send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a host tensor on the device. The copy is asynchronous if the device has streams."""
    return pinned(host, device).to(device, non_blocking=True)


def pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the host tensor, in pinned memory if the device has streams: asynchronous copies need it."""
    # The allocator of pinned memory reuses a block only after the copy from it has ended. So a new block for
    # every call can't be overwritten too early.
    return host.pin_memory() if has_streams(device) else host
