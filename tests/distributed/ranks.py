"""Run a function in real processes that form a gloo (or NCCL) process group, and get back what it returned."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

TIMEOUT_S = 90
# Ranks fork from a clean process that has imported what takes seconds to import. Triton reads TRITON_INTERPRET when it
# is imported: ranks that interpret fork from another one.
SERVERS = {interpret: forkserver.ForkServer() for interpret in (False, True)}
PRELOADED = ["torch._dynamo", "torch.distributed.algorithms.ddp_comm_hooks", "gradcomp", "pytest"]


class RankError(AssertionError):
    """A rank raised, died or did not finish; the message has every rank's traceback or stack."""


def device_of_rank() -> torch.device:
    """Where a rank computes: all on the one GPU if there is one (gloo takes CUDA tensors), else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def let_torchs_power_sgd_have_cpu_buckets() -> None:
    """Where a GPU is visible, torch's hook synchronises with the bucket's device, which raises for the CPU."""
    synchronize = torch.cuda.synchronize
    if torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: (
            None if getattr(device, "type", "cuda") == "cpu" else synchronize(device)
        )


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    backend: str = "gloo",
    interpret: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """function(rank, *arguments) in world_size processes of one process group; the results, by rank.

    function: importable by name. interpret: run the Triton kernels on the CPU, under the interpreter.
    Raises RankError if a rank raises or dies, or if the ranks are not done after timeout_s: then every
    process is killed and its stack reported.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pipes, processes = [], []
        # This process interprets unless there is a GPU, and then no rank does.
        with _forking_from_clean_process(interpret and os.environ.get("TRITON_INTERPRET") == "1") as context:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(sender, folder, backend, rank, world_size, function, arguments),
                    daemon=True,
                )
                process.start()
                sender.close()
                pipes.append(receiver)
                processes.append(process)
        try:
            outcomes = _collect(pipes, time.monotonic() + timeout_s)
            if any(outcome is None for outcome in outcomes):
                _dump_stacks(processes)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [_result(rank, outcomes, folder) for rank in range(world_size)]


@contextmanager
def _forking_from_clean_process(interpret: bool) -> Iterator[Any]:
    """The context whose processes fork from SERVERS[interpret]; multiprocessing itself knows one server only."""
    server = SERVERS[interpret]
    server.set_forkserver_preload(PRELOADED)
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
    ):
        os.environ.pop("TRITON_INTERPRET", None)
        if interpret:
            os.environ["TRITON_INTERPRET"] = "1"
        server.ensure_running()
        yield multiprocessing.get_context("forkserver")


def _collect(pipes: list[Connection], deadline: float) -> list[tuple[bool, Any] | None]:
    """Each rank's (succeeded, value or traceback); None for a rank that was not done in time.

    A rank that fails leaves its peers waiting for it: they get 5 s to report what they saw.
    """
    outcomes: list[tuple[bool, Any] | None] = [None] * len(pipes)
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(open_pipes), left):
            rank = open_pipes.pop(pipe)
            try:
                outcomes[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                outcomes[rank] = (False, "the process died without a word")
            if not outcomes[rank][0]:
                deadline = min(deadline, time.monotonic() + 5)
    return outcomes


def _dump_stacks(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    for process in processes:
        process.join(0.5)


def _result(rank: int, outcomes: list[tuple[bool, Any] | None], folder: Path) -> Any:
    if all(outcome is not None and outcome[0] for outcome in outcomes):
        return outcomes[rank][1]
    reports = []
    for index, outcome in enumerate(outcomes):
        if outcome is None:
            stack = folder / f"stack-{index}"
            text = stack.read_text() if stack.exists() else "(it had not started)"
            reports.append(f"rank {index} did not finish in time:\n{text}")
        else:
            reports.append(f"rank {index} {'finished' if outcome[0] else 'failed:' + chr(10) + outcome[1]}")
    raise RankError("\n".join(reports))


def _rank_main(
    sender: Connection,
    folder: Path,
    backend: str,
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    with open(folder / f"stack-{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
        torch.set_num_threads(1)
        let_torchs_power_sgd_have_cpu_buckets()
        torch.backends.cudnn.deterministic = True
        try:
            dist.init_process_group(
                backend,
                init_method=(folder / "store").as_uri(),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=TIMEOUT_S),
            )
            value = function(rank, *arguments)
            sender.send_bytes(pickle.dumps((True, value)))
            # No rank leaves while a peer may still talk to it.
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
