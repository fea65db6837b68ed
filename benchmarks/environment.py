"""Describe where a measurement was made: device, driver, versions, commit."""

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
