"""Print versions, devices and backends, and whether kernels or plain torch compute on CPU and CUDA tensors.

python -m gradcomp [info]    print the versions, the devices and the backends
python -m gradcomp plan      what each hook sends for a model, and a network's time for it, by arithmetic
torchrun … -m gradcomp bench train a model with auto_hook; print its table and its choice
"""

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import triton

from . import __version__, ops
from .bench import main as bench
from .command_line import OneLineParser
from .device import AMD_ARCHITECTURES, amd_architecture, is_rocm
from .plan import main as plan


def devices() -> Iterator[tuple[str, str]]:
    """Yield (name, description) of the CPU and of each CUDA or ROCm device."""
    capability = torch.backends.cpu.get_cpu_capability()
    yield "cpu", f"{platform.machine()} with {capability}, {torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        architecture = f"compute capability {found.major}.{found.minor}"
        if is_rocm():
            architecture = amd_architecture(torch.device("cuda", index))
            if architecture not in AMD_ARCHITECTURES:
                architecture += " (no kernels for it)"
        yield f"cuda:{index}", f"{found.name}, {architecture}, {found.total_memory / 2**30:.0f} GiB"


def computed_by(device_type: str) -> str:
    """Return what computes gradcomp's operations on tensors of this device type: kernels or plain torch."""
    if not ops.runs_triton(torch.device(device_type)):
        return "plain torch"
    if triton.knobs.runtime.interpret:
        return "Triton's interpreter, which is for tests (TRITON_INTERPRET is set)"
    return "Triton kernels"


def info(arguments: Sequence[str] | None = None) -> None:
    """Print versions, devices, backends, and what computes."""
    OneLineParser(prog="python -m gradcomp info", description=info.__doc__).parse_args(arguments)
    cuda = torch.version.cuda
    computing = {"CPU tensors": computed_by("cpu"), "CUDA tensors": computed_by("cuda")}
    if not torch.cuda.is_available():
        computing["CUDA tensors"] += ", but no CUDA device is available"
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(name)]
    sections = {
        "Versions": {
            "gradcomp": __version__,
            "Python": platform.python_version(),
            "torch": torch.__version__,
            "Triton": triton.__version__,
            "GPU back end": f"ROCm {torch.version.hip}" if is_rocm() else f"CUDA {cuda}" if cuda else "none",
        },
        "Devices": dict(devices()),
        "Process groups": {"backends": ", ".join(backends)},
        "Computed by": computing,
    }
    for title, rows in sections.items():
        print(title, *(f"  {name:<14}{value}" for name, value in rows.items()), sep="\n")


COMMANDS = {"info": info, "plan": plan, "bench": bench}


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    parser = OneLineParser(
        prog="python -m gradcomp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Each command has options of its own: python -m gradcomp plan --help",
    )
    parser.add_argument("command", nargs="?", choices=COMMANDS, default="info", help="default: %(default)s")
    # Each command parses its own options.
    COMMANDS[parser.parse_args(given[:1]).command](given[1:])


if __name__ == "__main__":
    main()
