"""The benchmark's process group: this rank's place in it, and the time of its collectives."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gradcomp.comm import exchange
from gradcomp.comm.exchange import all_gather, all_to_all, reduce_scatter
from gradcomp.comm.nodes import Nodes, nodes_in
from gradcomp.comm.pipeline import run_through
from gradcomp.comm.process_group import resolve_group
from gradcomp.device import has_streams
from gradcomp.plan.network import CollectiveKind
from gradcomp.plan.network import Group as Place

from .measurements import LinkSample

TIMEOUT = timedelta(seconds=120)
# The path of the file through which processes started by bench find each other.
STORE_VARIABLE = "GRADCOMP_BENCH_STORE"


def is_rank() -> bool:
    """Return whether this process is one of several ranks, started by torchrun or by bench itself."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE"))


def is_first_rank() -> bool:
    """Return whether this process prints for all: it is rank 0, or no rank."""
    return os.environ.get("RANK", "0") == "0"


def synchronize(device: torch.device) -> None:
    """Wait for the device's work. On a CPU nothing is pending."""
    if has_streams(device):
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Group:
    """The default process group, and this rank's device.

    nodes: this rank's groups within its node and between nodes; None if there are no nodes of several ranks.
    """

    rank: int
    world_size: int
    device: torch.device
    backend: str
    nodes: Nodes | None

    @property
    def ranks_per_node(self) -> int:
        return self.nodes.ranks_per_node if self.nodes else 1

    def agree(self, value: int) -> int:
        """Return rank 0's value. A collective."""
        shared = torch.tensor([value], device=self.device)
        dist.broadcast(shared, src=0)
        return int(shared.item())

    def round_trip_s(self) -> float:
        """Return the time from a message to its answer between ranks, or nodes, as hooks do. A collective."""
        world = resolve_group("python -m gradcomp bench", None)
        between = self.nodes.between if self.nodes else None
        return exchange.round_trip_s(torch.empty(0, device=self.device), world, between)

    def slowest(self, samples_s: Sequence[float]) -> list[float]:
        """Return for each sample the longest time of any rank. A collective."""
        shared = torch.tensor(samples_s, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return [float(each) for each in shared]


def join(use_cpu: bool, ranks_per_node: int | str, prepare: Callable[[torch.device], object]) -> Group:
    """Prepare this rank, then join the other ranks' process group.

    use_cpu: whether to use CPUs and gloo on machines with GPUs, too.
    ranks_per_node: see QuantizationState.
    prepare: called with this rank's device before the group exists.

    The backend is NCCL if every rank of a machine has a GPU of its own, else gloo. If prepare raises
    ValueError on any rank, every rank raises ValueError, with the message of the first of these ranks. Every
    rank raises ValueError, too, for nodes with different numbers of ranks.
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
    world = resolve_group("python -m gradcomp bench", None)
    try:
        nodes = nodes_in("python -m gradcomp bench", ranks_per_node, world, device)
    except (RuntimeError, ValueError) as error:
        dist.destroy_process_group()
        raise ValueError(str(error)) from error
    has_nodes = nodes is not None and nodes.num_nodes > 1
    return Group(rank, world_size, device, backend, nodes if has_nodes else None)


def _store(world_size: int) -> dist.Store:
    """Return the store that all ranks share."""
    if STORE_VARIABLE in os.environ:
        return dist.FileStore(os.environ[STORE_VARIABLE], world_size)
    found: dist.Store = next(dist.rendezvous("env://", timeout=TIMEOUT))[0]
    return found


def _raise_together(store: dist.Store, rank: int, world_size: int, problem: str) -> None:
    """Raise ValueError on every rank if any rank has a problem. Return once all ranks know."""
    store.set(f"problem {rank}", problem or "none")
    told = [store.get(f"problem {each}").decode() for each in range(world_size)]
    # The process that holds the store must stay until all ranks have read it.
    store.add("read", 1)
    store.set(f"done {rank}", "")
    store.wait([f"done {each}" for each in range(world_size)], TIMEOUT)
    found = [(each, text) for each, text in enumerate(told) if text != "none"]
    if found:
        first, text = found[0]
        raise ValueError(text if len(found) == world_size else f"rank {first}: {text}")


def end_with_parent() -> None:
    """End this process when its parent ends: our standard input closes then."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


SIZES_BYTES = (2**12, 2**15, 2**18, 2**21, 2**24, 2**26)
MIN_CALLS, MAX_CALLS = 3, 30
# After a collective that takes longer, larger sizes are left out.
LONG_S = 0.5


# The collectives that hooks use: of all ranks; with nodes, also within a node and between nodes.
_TIMED: dict[Place, tuple[CollectiveKind, ...]] = {
    "all": ("all-reduce", "all-to-all", "all-gather"),
    "within": ("all-reduce", "reduce-scatter", "all-gather"),
    "between": ("all-reduce", "all-to-all", "all-gather"),
}


def link_samples(group: Group, limit_s: float) -> Iterator[LinkSample]:
    """Yield the median time of each collective at each size, on the slowest rank. A collective.

    limit_s: the time for all of them together. Every one is measured at two sizes at least, limit or not.
    """
    world = resolve_group("python -m gradcomp bench", None)
    groups: dict[Place, dist.ProcessGroup] = {"all": world}
    if group.nodes is not None:
        groups |= {"within": group.nodes.within, "between": group.nodes.between}
    timed = [(place, kind) for place in groups for kind in _TIMED[place]]
    has_delay = group.round_trip_s() >= exchange.MIN_DELAY_S
    # With a delay, small sizes would all take as long, and leave no time for one that shows the bandwidth.
    sizes = SIZES_BYTES[:1] + SIZES_BYTES[3:] if has_delay else SIZES_BYTES
    for place, kind in timed:
        ranks = groups[place]
        deadline = time.perf_counter() + limit_s / len(timed)
        for index, size in enumerate(sizes):
            num_bytes = -(-size // (4 * ranks.size())) * 4 * ranks.size()
            call = _call(kind, num_bytes, ranks, group.device)
            first_s = _timed(call, 2, group)[-1]
            left_s = deadline - time.perf_counter()
            fair_s = left_s / (len(sizes) - index)
            num_calls = group.agree(min(MAX_CALLS, max(MIN_CALLS, int(fair_s / max(first_s, 1e-6)))))
            seconds = statistics.median(group.slowest(_timed(call, num_calls, group)))
            # Between nodes, all ranks of a node have such a buffer.
            yield LinkSample(
                kind, num_bytes * (group.ranks_per_node if place == "between" else 1), seconds, place
            )
            is_over = seconds > LONG_S or time.perf_counter() > deadline
            if group.agree(is_over and index > 0):
                break


def _call(
    kind: CollectiveKind, num_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], object]:
    """Return a function that runs the collective.

    num_bytes: the size of the whole buffer, all parts together.
    """

    def buffer(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    if kind == "all-reduce":
        summed = buffer(num_bytes // 4, dtype=torch.float32)
        return lambda: dist.all_reduce(summed, group=group)
    shape = group.size(), num_bytes // group.size()
    if kind == "reduce-scatter":
        parts = buffer(shape[0], shape[1] // 4, dtype=torch.float32)
        own = torch.empty_like(parts[0])
        return lambda: run_through(reduce_scatter(own, parts, group))
    received = buffer(*shape)
    exchange, sent = (all_to_all, buffer(*shape)) if kind == "all-to-all" else (all_gather, buffer(shape[1]))
    return lambda: exchange(received, sent, group).wait()


def _timed(call: Callable[[], object], num_calls: int, group: Group) -> list[float]:
    """Time calls one by one. All ranks start together."""
    samples = []
    dist.barrier()
    synchronize(group.device)
    for _ in range(num_calls):
        start = time.perf_counter()
        call()
        synchronize(group.device)
        samples.append(time.perf_counter() - start)
    return samples
