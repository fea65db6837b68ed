"""This rank's place in the benchmark's process group, and what the ranks tell each other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gradcomp import ops

TIMEOUT = timedelta(seconds=120)
# Where the processes that bench itself starts find each other: the path of a file.
STORE_VARIABLE = "GRADCOMP_BENCH_STORE"


def is_rank() -> bool:
    """Return whether this process is one of several ranks, started by torchrun or by bench itself."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE"))


def is_first_rank() -> bool:
    """Return whether this process speaks for all: rank 0, or one that is no rank."""
    return os.environ.get("RANK", "0") == "0"


def synchronize(device: torch.device) -> None:
    """Wait for the device's work; a CPU has done it."""
    if ops.has_streams(device):
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Group:
    """The default process group, and this rank's device in it."""

    rank: int
    world_size: int
    device: torch.device
    backend: str

    def agree(self, value: int) -> int:
        """Return rank 0's value. A collective."""
        shared = torch.tensor([value], device=self.device)
        dist.broadcast(shared, src=0)
        return int(shared.item())

    def slowest(self, samples_s: Sequence[float]) -> list[float]:
        """Return the longest of all ranks' times, sample by sample. A collective."""
        shared = torch.tensor(samples_s, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return [float(each) for each in shared]


def join(use_cpu: bool, prepare: Callable[[torch.device], object]) -> Group:
    """Join the other ranks, once all of them are prepared.

    The backend is NCCL where every rank of a machine has a GPU of its own, and gloo elsewhere. prepare is
    called with the rank's device first. Raises ValueError on every rank, with what the first rank that failed
    has to say, if it raises a ValueError on any.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    on_gpus = not use_cpu and torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    try:
        prepare(device)
        problem = ""
    except ValueError as error:
        problem = str(error)
    store = _store(world_size)
    _raise_together(store, rank, world_size, problem)
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(
        backend, store=dist.PrefixStore("bench", store), rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    return Group(rank, world_size, device, backend)


def _store(world_size: int) -> dist.Store:
    """Return the store through which all ranks find each other."""
    if STORE_VARIABLE in os.environ:
        return dist.FileStore(os.environ[STORE_VARIABLE], world_size)
    found: dist.Store = next(dist.rendezvous("env://", timeout=TIMEOUT))[0]
    return found


def _raise_together(store: dist.Store, rank: int, world_size: int, problem: str) -> None:
    """Raise ValueError on every rank if any has a problem, and return once all ranks know."""
    store.set(f"problem {rank}", problem or "none")
    told = [store.get(f"problem {each}").decode() for each in range(world_size)]
    # The process that holds the store has to stay until all have read it.
    store.add("read", 1)
    store.set(f"done {rank}", "")
    store.wait([f"done {each}" for each in range(world_size)], TIMEOUT)
    found = [(each, text) for each, text in enumerate(told) if text != "none"]
    if found:
        first, text = found[0]
        raise ValueError(text if len(found) == world_size else f"rank {first}: {text}")


def end_with_parent() -> None:
    """End this process as soon as the one that started it has ended: its end of our standard input closes."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
