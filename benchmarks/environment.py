"""Describe where a measurement was made, and compute the least time of a call there."""

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch
import triton

from benchmarks.records import Row

ROOT = Path(__file__).resolve().parent.parent


def describe(device: torch.device) -> Row:
    """Return the fields that every recorded row carries besides its measurement."""
    capability, driver = None, None
    if device.type == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        driver = driver_version()
    return {
        "date_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": device_name(device),
        "load": os.getloadavg()[0],  # when this was asked
        "compute_capability": capability,
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    found = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"CPU {found[1].strip() if found else platform.machine()}, {torch.get_num_threads()} threads"


def commit() -> str:
    """Return what the environment variable GRADCOMP_COMMIT says, else the checkout's commit by git.

    By git it ends in "-dirty" if any file but the results differs from it. Without a .git folder: "unknown".
    """
    given = os.environ.get("GRADCOMP_COMMIT")
    if not given and (ROOT / ".git").exists():
        given = _output_of(["git", "rev-parse", "HEAD"])
        if given and _output_of(["git", "status", "--porcelain", "--", ".", ":!benchmarks/results"]):
            given += "-dirty"
    return given or "unknown"


def driver_version() -> str | None:
    output = _output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return output.splitlines()[0].strip() if output else None


def _output_of(command: list[str]) -> str | None:
    """Return what the command prints, or None if it does not exist or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


LAUNCH_S = 2e-6
# A GPU's memory bandwidth by the driver's name. Other variants, such as an H100 PCIe, have another one.
BYTES_PER_S = {
    "NVIDIA H200": 4.8e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA L40S": 0.864e12,
    "NVIDIA GeForce RTX 4090": 1.008e12,
}


def floor_us(device: torch.device, num_bytes: int, num_launches: int) -> float | None:
    """Return the least time of a call in µs: bytes / memory bandwidth + launches · 2 µs.

    None on a CPU, and on a GPU that BYTES_PER_S lacks.

    num_bytes: the fewest bytes that the call reads and writes in device memory.
    num_launches: the fewest kernels that the call launches.

    The data sheet's bandwidth is reached by no kernel in full: `copy_gb_per_s` in a row is the measured one.
    2 µs, from the end of one launch on a stream to the work of the next, is an assumption. The floor leaves
    out arithmetic, waiting, and small tensors (P, Q, tables), so most times are above one floor. A time is
    below one floor if the L2 cache keeps a bucket between two kernels, or if launches take less than 2 µs.
    """
    bytes_per_s = BYTES_PER_S.get(device_name(device)) if device.type == "cuda" else None
    if bytes_per_s is None:
        return None
    return (num_bytes / bytes_per_s + num_launches * LAUNCH_S) * 1e6
