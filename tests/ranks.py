"""Run a test's function in fresh processes that form a gloo process group.

The processes are made by gradcomp.testing's ranks="gloo", which reports every rank's traceback or stack and
kills ranks that don't end. Here each call has its own processes, so that ranks may die or change torch's
global state. Ranks may run the Triton kernels under the interpreter. They fork from a process that has
imported the slow modules: importing these takes seconds.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gradcomp.testing import RankError
from gradcomp.testing.ranks.processes import Pool
from tests.devices import let_torchs_power_sgd_have_cpu_buckets

__all__ = ["RankError", "run_ranks"]

TIMEOUT_S = 90
# Triton reads TRITON_INTERPRET when it is imported, so ranks that interpret fork from another process.
SERVERS = {interpret: forkserver.ForkServer() for interpret in (False, True)}
PRELOADED = [
    *("torch._dynamo", "torch.distributed.algorithms.ddp_comm_hooks"),
    *("gradcomp", "gradcomp.testing.ranks.processes", "pytest"),
]


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    interpret: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """Call function(rank, *arguments) in world_size processes of one group; return the results, by rank.

    function: importable by name.
    interpret: run the Triton kernels on the CPU, under the interpreter.

    Raises RankError if a rank raises or dies, or if the ranks are not done after timeout_s. In the last case
    every process is killed and its stack reported.
    """
    # With a GPU, neither this process nor any rank interprets.
    interpret = interpret and os.environ.get("TRITON_INTERPRET") == "1"
    with _forking_from_clean_process(interpret) as context, closing(Pool(context)) as pool:
        return pool.run(_call, world_size, (function, arguments), timeout_s)


@contextmanager
def _forking_from_clean_process(interpret: bool) -> Iterator[ForkServerContext]:
    """Yield a context whose processes fork from SERVERS[interpret]; multiprocessing has one server only."""
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


def _call(rank: int, _: dist.ProcessGroup, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    let_torchs_power_sgd_have_cpu_buckets()
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)  # the pool seeds every rank differently
    return function(rank, *arguments)
