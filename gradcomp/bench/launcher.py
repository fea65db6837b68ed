"""Start the benchmark's ranks as processes of this machine, and end all of them with this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .group import STORE_VARIABLE

POLL_S = 0.05
# The time that the others have to end by themselves once one has failed: they may print the reason.
GRACE_S = 5.0
INTERRUPTED = 128 + signal.SIGINT


def run_locally(arguments: Sequence[str], num_ranks: int) -> int:
    """Run `python -m gradcomp bench arguments` in num_ranks processes; return the exit status.

    It is 0 if all end so, else that of the first to end otherwise. Whatever ends this process ends them: they
    are killed when it returns, and when it dies they read the end of their standard input.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[subprocess.Popen[bytes]] = []
        previous = signal.signal(signal.SIGTERM, _interrupt)
        try:
            for rank in range(num_ranks):
                ranks.append(_start(arguments, rank, num_ranks, Path(folder) / "store"))
            return _wait(ranks)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
        finally:
            signal.signal(signal.SIGTERM, previous)
            for each in ranks:
                each.kill()
            for each in ranks:
                each.wait()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _start(arguments: Sequence[str], rank: int, num_ranks: int, store: Path) -> subprocess.Popen[bytes]:
    threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        **{name: str(value) for name, value in places.items()},
        STORE_VARIABLE: str(store),
    }
    # In a session of its own, so that Ctrl-C reaches this process alone, which kills it.
    return subprocess.Popen(
        [sys.executable, "-m", "gradcomp", "bench", *arguments],
        env=environment,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended, or GRACE_S after one has failed; return the exit status."""
    failed, deadline = 0, float("inf")
    while time.monotonic() < deadline:
        ended = [status for each in ranks if (status := each.poll()) is not None]
        if not failed and (failed := next((status for status in ended if status), 0)):
            deadline = time.monotonic() + GRACE_S
        if len(ended) == len(ranks):
            break
        time.sleep(POLL_S)
    # A process that a signal ended has its negative number.
    return failed if failed >= 0 else 128 - failed
