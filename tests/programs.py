"""Start programs from tests."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import stub_cuda

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

# For tests of programs that install benchmarks.stub_cuda.
needs_stub_cuda = pytest.mark.skipif(stub_cuda.missing() is not None, reason=str(stub_cuda.missing()))


def users_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without Triton's interpreter, as a user's process has it."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | changes


def run_python(
    *arguments: str | Path,
    stderr: int = subprocess.PIPE,
    timeout_s: float = 120,
    cwd: Path = ROOT,
    **environment: str,
) -> "subprocess.CompletedProcess[str]":
    """Run `python arguments` in the checkout, as a user does; scripts elsewhere import this gradcomp, too."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=users_environment(PYTHONPATH=str(ROOT)) | environment,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def found_by(*arguments: str, **environment: str) -> Any:
    """Run a Python program, and return what its last line of output says in JSON."""
    done = run_python(*arguments, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run_module(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run `python -m arguments` without a GPU; stdout includes stderr."""
    return run_python(
        "-m", *arguments, stderr=subprocess.STDOUT, **({"CUDA_VISIBLE_DEVICES": ""} | environment)
    )


def refusal(capsys: pytest.CaptureFixture[str], parse: Callable[..., object], arguments: list[str]) -> str:
    """Return what a command says on stderr when it refuses its arguments, with status 2."""
    with pytest.raises(SystemExit) as end:
        parse(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err


def descendants(pid: int) -> set[int]:
    """Return the process ids of all descendants of a process."""
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found |= {child} | descendants(child)
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
