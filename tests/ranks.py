"""Run a test's function in fresh processes that form a process group, on gloo or on NCCL.

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
from torch.utils._pytree import tree_map_only

from gradcomp import ops, testing
from gradcomp.testing import RankError
from gradcomp.testing.ranks.processes import Pool
from tests.devices import let_torchs_power_sgd_have_cpu_buckets, patch_triton_once_per_launch

__all__ = ["RankError", "of_all_ranks", "run_ranks", "simulate"]

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
    backend: str = "gloo",
    interpret: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """Call function(rank, *arguments) in world_size processes of one group; return the results, by rank.

    Tensors in results, also in lists, tuples and dicts, come back on the CPU.

    function: importable by name.
    backend: "gloo", or "nccl" with a GPU per rank; without a GPU it is gloo, too.
    interpret: run the Triton kernels on the CPU, under the interpreter.

    Raises RankError if a rank raises or dies, or if the ranks are not done after timeout_s. In the last case
    every process is killed and its stack reported.
    """
    # With a GPU, neither this process nor any rank interprets.
    interpret = interpret and os.environ.get("TRITON_INTERPRET") == "1"
    # gpu-check has less time.
    timeout_s = min(timeout_s, float(os.environ.get("GRADCOMP_RANKS_TIMEOUT_S", "inf")))
    with _forking_from_clean_process(interpret) as context, closing(Pool(context)) as pool:
        return pool.run(_call, world_size, (function, arguments, backend), timeout_s)


def simulate(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Call function(rank, *arguments) on simulated ranks in plain torch; return the results, by rank."""
    with mock.patch.object(ops, "_INTERPRETED", False):  # plain torch, as in a rank that is a process
        return testing.run_ranks(lambda rank, _, *given: function(rank, *given), world_size, *arguments)


def of_all_ranks(value: Any) -> list[Any]:
    """Return a value of every rank, in a test marked `ranks`."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


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


def _call(
    rank: int,
    group: dist.ProcessGroup,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    backend: str,
) -> Any:
    if backend == "nccl" and torch.cuda.is_available():
        _regroup(rank, group.size(), backend)
    let_torchs_power_sgd_have_cpu_buckets()
    if os.environ.get("TRITON_INTERPRET") == "1":
        patch_triton_once_per_launch()
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)  # the pool seeds every rank differently
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), function(rank, *arguments))


def _regroup(rank: int, world_size: int, backend: str) -> None:
    """Replace the default group by one on another backend, with a GPU per rank."""
    torch.cuda.set_device(rank)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # this machine need not have any network
    store = dist.PrefixStore(backend, dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
