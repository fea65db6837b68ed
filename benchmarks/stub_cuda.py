"""Stubs of CUDA that cost nothing, so that a hook's time on the host is Python's and Triton's.

Tensors stay on the CPU and pose as the device's. Kernels are compiled for sm_90 as on a GPU. Triton's own
launcher launches them on a libcuda of empty functions, so there is no need for a GPU or its driver. A machine
with a real libcuda is refused: the stub would take its place. Triton needs a C compiler, as always. Streams,
events and futures keep torch's Python code around empty calls. A future's set_result looks for tensors in its
value, as with devices. Not counted: the time of CUDA's own functions (a launch some 2 µs, an event 1 µs), and
NCCL.

install() changes torch and Triton for the whole process, so call it in a process of its own.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_T = TypeVar("_T")

# What is not called here returns 0, "success".
_C_FUNCTIONS = {
    "cuCtxGetCurrent": "(void **context) { *context = (void *)1; return 0; }",
    "cuDeviceGetAttribute": "(int *value, int name, int device) { *value = 232448; return 0; }",
    "cuFuncGetAttribute": "(int *value, int name, void *function) { *value = 1024; return 0; }",
    "cuModuleLoadData": "(void **module, void *image) { *module = (void *)1; return 0; }",
    "cuModuleGetFunction": "(void **function, void *module, char *name) { *function = (void *)1; return 0; }",
    "cuPointerGetAttribute": "(unsigned long long *data, int name, unsigned long long pointer)"
    " { *data = pointer; return 0; }",
}


def missing() -> str | None:
    """Return the reason why the stub can't be installed here, or None if there is none."""
    if shutil.which("cc") is None:
        return "the stub of CUDA needs a C compiler"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return "the stub of CUDA takes the place of libcuda, and this machine has a real one"


def install(architecture: int = 90) -> None:
    """Replace CUDA in torch and Triton, and start a process group of one rank with empty collectives.

    Raises RuntimeError if gradcomp has been imported, as its classes have torch's as bases, and where
    missing() gives a reason.
    """
    if "gradcomp" in sys.modules:
        raise RuntimeError("stub_cuda.install() must come before gradcomp is imported")
    if reason := missing():
        raise RuntimeError(reason)
    _install_libcuda()
    _install_torch(architecture)
    import gradcomp  # noqa: F401 its modules are changed

    replaced = {
        "has_streams": lambda device: True,
        "runs_triton": lambda device: True,
        "pinned": lambda host, device: host,
        "has_backend": lambda group, name: name == "cuda:nccl",
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("gradcomp."):
            for function in replaced.keys() & vars(module).keys():
                setattr(module, function, replaced[function])
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 registers the backend

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)


def _install_libcuda() -> None:
    """Build and load a libcuda.so.1 with every function that Triton's driver names."""
    import triton

    folder = Path(tempfile.mkdtemp(prefix="stub_cuda"))
    driver = (Path(triton.__file__).parent / "backends" / "nvidia" / "driver.c").read_text()
    names = set(re.findall(r"\bcu[A-Z]\w+?\b(?:_v\d)?", driver)) | {"cuLaunchKernelEx"}
    functions = {f"{name}{suffix}" for name in names for suffix in ("", "_v2", "_v3")} - set(_C_FUNCTIONS)
    lines = [f"int {name}{body}" for name, body in _C_FUNCTIONS.items()]
    lines += [f"int {name}() {{ return 0; }}" for name in sorted(functions)]
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text("\n".join(lines))
    (folder / "libcuda.so").symlink_to(library)
    flags = ["-shared", "-fPIC", "-O1", "-w", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *flags, "-o", str(library), str(source)], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    # A cache of its own: it must not mix launchers linked with the real libcuda and with the stub.
    os.environ["TRITON_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"stub_cuda_cache.{os.getuid()}")


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: "_Event") -> float:
        return 1.0


class _Stream:
    """Stands in for torch.cuda.Stream: its Python code without CUDA's calls."""

    wait_event, wait_stream = torch.cuda.Stream.wait_event, torch.cuda.Stream.wait_stream
    record_event = torch.cuda.Stream.record_event

    def __init__(
        self,
        device: Any = None,
        priority: int = 0,
        *,
        stream_id: int = 1,
        device_index: int = 0,
        device_type: int = 1,
    ):
        self.stream_id, self.device_index, self.device_type = stream_id, device_index, device_type
        self.cuda_stream, self.device, self.priority = stream_id, _DEVICE, priority


class _Future(torch.futures.Future[_T]):
    """A future that looks for the tensors in its value, like one with devices, but records no event."""

    def __init__(self, *, devices: Any = None):
        super().__init__()
        self._has_devices = bool([torch.device(device) for device in devices or ()])

    def set_result(self, result: Any) -> None:
        if self._has_devices:
            torch._jit_internal._extract_tensors(result)
        super().set_result(result)


_DEVICE = torch.device("cuda", 0)


def _install_torch(architecture: int) -> None:
    """Replace the C functions that torch.cuda calls, and the classes that need them."""
    current = [0]

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        current[0] = stream_id

    c: Any = torch._C
    c._cuda_getDevice = lambda: 0
    c._cuda_exchangeDevice = c._cuda_maybeExchangeDevice = lambda _: 0
    c._cuda_getCurrentStream = lambda _: (current[0], 0, 1)
    c._cuda_getCurrentRawStream = lambda _: current[0]
    c._cuda_getDefaultStream = lambda _: (0, 0, 1)
    c._cuda_setStream = set_stream
    cuda: Any = torch.cuda
    cuda._initialized = True
    cuda._exchange_device = cuda._maybe_exchange_device = lambda _: 0
    cuda.is_available = lambda: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_capability = lambda *_: divmod(architecture, 10)
    index_of = cuda._get_device_index
    # The tensors' device is the CPU.
    cuda._get_device_index = lambda device, *options, **named: index_of(_DEVICE, *options, **named)
    cuda.Stream = _Stream
    cuda.Event = cuda.streams.Event = _Event
    torch.futures.Future = _Future
