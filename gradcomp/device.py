"""What devices can do, how kernels are launched on them, and how the host sends them tables.

To support another kind of device, begin here. For hooks on streams see comm/streams.py.
"""

import functools
import threading
from contextlib import AbstractContextManager, nullcontext

import torch

# AMD's GPUs for which the kernels are known to compile: MI200, MI300 and MI350.
AMD_ARCHITECTURES = ("gfx90a", "gfx942", "gfx950")

_interpreter = threading.RLock()
_no_change = nullcontext()
# torch.cuda's functions around torch's private ones take several times as long.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_raw_stream = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda _: torch.cuda.current_stream().cuda_stream
)


def has_streams(device: torch.device) -> bool:
    """Return whether the device enqueues work on streams without waiting: True for CUDA and ROCm."""
    return device.type == "cuda"


def require_no_capture(what: str, device: torch.device) -> None:
    """Raise RuntimeError if the current stream is captured in a CUDA graph.

    what: an object with a verb, for the message.
    """
    if has_streams(device) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} while a CUDA graph is captured: a replay would use this step's addresses, seeds and "
            "counts again. Capture forward and backward of the bare module, without DistributedDataParallel "
            "or Reducer, and call gradcomp.average_ with its gradients after each replay"
        )


def is_rocm() -> bool:
    """Return whether torch was built for AMD's GPUs, on which tensors have the device type "cuda" too."""
    return torch.version.hip is not None


@functools.cache
def amd_architecture(device: torch.device) -> str:
    """Return the architecture of an AMD GPU, such as "gfx942"."""
    name: str = torch.cuda.get_device_properties(device).gcnArchName  # gfx942:sramecc+:xnack-
    return name.partition(":")[0]


@functools.cache
def require_kernels_for(device: torch.device) -> None:
    """Raise RuntimeError for an AMD GPU that isn't among AMD_ARCHITECTURES."""
    architecture = amd_architecture(device)
    if architecture not in AMD_ARCHITECTURES:
        raise RuntimeError(
            f"gradcomp has no kernels for {device}, an AMD GPU of architecture {architecture}: they are "
            f"compiled for {', '.join(AMD_ARCHITECTURES)}. On this GPU use torch's own DDP and its hooks"
        )


def dot_precision(dtype: torch.dtype) -> str:
    """Return the input_precision of matrix products that are as precise as FMAs in fp32, or in fp64.

    dtype: of the products, fp32 or fp64.

    CUDA's tensor cores have no fp32: tf32x3 adds up three products of tf32. AMD's matrix cores have fp32, and
    Triton refuses tf32x3 for them.
    """
    return "ieee" if dtype == torch.float64 or is_rocm() else "tf32x3"


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on this device.

    Triton launches on the current CUDA device, so the context makes this device the current one.
    Triton's interpreter launches on a CPU. It keeps its state in globals, while hooks run on several threads:
    there the context is a lock.

    Raises RuntimeError for an AMD GPU that has no kernels.
    """
    if not has_streams(device):
        return _interpreter
    if is_rocm():
        require_kernels_for(device)
    # Hooks are on their device already, and torch's context takes longer.
    return _no_change if is_current(device) else torch.cuda.device(device)


def is_current(device: torch.device) -> bool:
    """Return whether a CUDA device is the current one."""
    return device.index is None or device.index == _current_device()


def current_stream() -> int:
    """Return the current device's current stream, as the kernels' launchers take it."""
    return int(_raw_stream(_current_device()))


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has. For any other device, which stands for a GPU: an H100's."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def processor(device: torch.device) -> dict[str, str]:
    """Return the properties of a device that decide the last bits of sums, by name.

    They should be equal on all ranks.
    """
    if device.type == "cuda":
        if is_rocm():
            return {"GPU architecture": amd_architecture(device)}
        major, minor = torch.cuda.get_device_capability(device)
        return {"GPU compute capability": f"{major}.{minor}"}
    return {"CPU capability": torch.backends.cpu.get_cpu_capability()} if device.type == "cpu" else {}


def send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a host tensor on the device. The copy is asynchronous if the device has streams."""
    return pinned(host, device).to(device, non_blocking=True)


def pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the host tensor, in pinned memory if the device has streams: asynchronous copies need it."""
    # The allocator of pinned memory reuses a block only after the copy from it has ended. So a new block for
    # every call can't be overwritten too early.
    return host.pin_memory() if has_streams(device) else host
