"""Run ranks as processes on gloo. A pool keeps them from call to call, as starting one takes seconds."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gradcomp.testing.ranks.simulation import RankError

_START_TIMEOUT_S = 120.0
# After a rank has failed, its peers may wait for it. This is their time to report their own errors.
_REPORT_TIMEOUT_S = 5.0

_Context = SpawnContext | ForkServerContext


GUARD = 'if __name__ == "__main__":'


def in_unguarded_script() -> bool:
    """Return whether the main module lacks a GUARD: new processes import it, and would run its work, too."""
    file = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    return file.is_file() and "__name__" not in file.read_text(errors="replace")


class _Rank:
    """A rank's process, which waits for functions to run."""

    def __init__(self, rank: int, context: _Context) -> None:
        self.connection, theirs = context.Pipe()
        self.folder = tempfile.TemporaryDirectory()
        self.stack = Path(self.folder.name, "stack")
        # daemon: the process ends when this one does.
        self.process = context.Process(target=_serve, args=(theirs, rank, self.stack), daemon=True)
        with mock.patch.dict(os.environ, PYTHONHASHSEED=str(rank + 1)):
            self.process.start()
        theirs.close()

    def dump_stack(self) -> str:
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            self.process.join(0.5)  # the process doesn't end: this is its time to write
        return self.stack.read_text() if self.stack.exists() else "(it had not started)"


class Pool:
    """The processes of ranks 0, 1, ...: as many as the largest world size so far.

    context: how multiprocessing starts processes; by default it spawns them. A fork server starts them
        sooner, because it may have imported their modules already.
    """

    def __init__(self, context: _Context | None = None) -> None:
        self._context: _Context = context or multiprocessing.get_context("spawn")
        self._ranks: list[_Rank] = []
        self._one_at_a_time = threading.Lock()

    def run(
        self, function: Callable[..., Any], world_size: int, arguments: Sequence[Any], timeout_s: float
    ) -> list[Any]:
        """Run a function on every rank; see run_ranks. Kills all processes if one has died or isn't done."""
        try:
            payload = pickle.dumps((function, arguments))
        except Exception as error:
            raise TypeError(
                "ranks='gloo' sends the function and its arguments to other processes, which pickle refuses: "
                f"{error}. Define the function and its arguments at the top level of a module"
            ) from error
        with self._one_at_a_time, ExitStack() as on_failure:
            on_failure.callback(self.close)
            new = range(len(self._ranks), world_size)
            self._ranks.extend(_Rank(number, self._context) for number in new)
            _, report = _collect(self._ranks[new.start :], _START_TIMEOUT_S)
            if report:
                raise RankError(
                    "the processes of ranks='gloo' did not start. They import the program's main module: a "
                    f"script must run its own work under `{GUARD}`"
                )
            ranks = self._ranks[:world_size]
            store = ranks[0].stack.with_name(f"store-{time.monotonic_ns()}")
            for rank in ranks:
                rank.connection.send((world_size, str(store), timeout_s, payload))
            values, report = _collect(ranks, timeout_s)
            if all(rank in values and rank.process.is_alive() for rank in ranks):
                on_failure.pop_all()
            if report:
                raise RankError(report)
            return [values[rank] for rank in ranks]

    def close(self) -> None:
        """Kill all processes. The next call of `run` starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
            rank.process.join()
            rank.connection.close()
            rank.folder.cleanup()
        self._ranks = []


def _collect(ranks: list[_Rank], timeout_s: float) -> tuple[dict[_Rank, Any], str]:
    """Return the ended ranks' values or tracebacks, and a report on all ranks unless all have succeeded.

    The report is in order of arrival, then has the stacks of the ranks that exceeded timeout_s.
    """
    deadline = time.monotonic() + timeout_s
    values: dict[_Rank, Any] = {}
    reports, has_failed = [], False
    while len(values) < len(ranks) and (left := deadline - time.monotonic()) > 0:
        waiting: dict[Any, _Rank] = {rank.connection: rank for rank in ranks if rank not in values}
        for connection in wait(list(waiting), left):
            rank = waiting[connection]
            try:
                succeeded, values[rank] = pickle.loads(rank.connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                rank.process.join(1)
                succeeded, values[rank] = False, f"the process died, exit code {rank.process.exitcode}"
            reports.append(
                f"rank {ranks.index(rank)} {'returned' if succeeded else f'failed: {values[rank]}'}"
            )
            if not succeeded:
                has_failed, deadline = True, min(deadline, time.monotonic() + _REPORT_TIMEOUT_S)
    missing = [rank for rank in ranks if rank not in values]
    reports += [f"rank {ranks.index(rank)} did not finish in time:\n{rank.dump_stack()}" for rank in missing]
    return values, "\n".join(reports) if has_failed or missing else ""


def _serve(connection: Connection, rank: int, stack: Path) -> None:
    """The main function of a rank's process: run functions received over the connection until it closes."""
    torch.set_num_threads(1)
    with open(stack, "w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        connection.send_bytes(pickle.dumps((True, None)))  # the process has started
        while True:
            try:
                world_size, path, timeout_s, payload = connection.recv()
            except EOFError:
                return
            # A new default group, without state of an earlier call. An error here must end the process: c10d
            # would keep half a group.
            if dist.is_initialized():  # no peer needs it any more
                dist.destroy_process_group()
            # Longer than the pool's time-out: if ranks wait for ever, the pool reports all ranks' stacks.
            timeout = timedelta(seconds=timeout_s + 60)
            store = dist.FileStore(path, world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
            dist.barrier()  # otherwise a rank could fail while its peers are still connecting
            try:
                function, arguments = pickle.loads(payload)
                torch.default_generator.manual_seed(rank)
                connection.send_bytes(pickle.dumps((True, function(rank, dist.group.WORLD, *arguments))))
            except BaseException:
                connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
                dist.destroy_process_group()  # makes peers that wait for this rank fail, too
