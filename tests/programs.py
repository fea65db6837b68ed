"""Start programs from tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def users_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without Triton's interpreter, as a user's process has it."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | changes


def run_module(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run python -m arguments in the checkout, without a GPU and without the interpreter."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=users_environment(CUDA_VISIBLE_DEVICES="") | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
