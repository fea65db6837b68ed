"""The processes of a benchmark's ranks, and the signals that end them."""

import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing


def run_ranks(work: Callable[..., None], num_ranks: int, *arguments: Any) -> None:
    """Call work(rank, store, *arguments) in a process for each rank; whatever ends this process ends them.

    store: the URL of a file through which the ranks can join a process group.

    Raises torch.multiprocessing's ProcessException when a rank fails, after ending the other ones.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        torch.multiprocessing.spawn(work, (store, *arguments), nprocs=num_ranks, daemon=True)


def exit_on_signals() -> None:
    """Exit on SIGINT, SIGTERM and SIGHUP as Python does by itself at the end of a program."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
