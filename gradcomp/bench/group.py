"""The benchmark's process group: this rank's place in it, and the time of its all-reduces."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gradcomp.comm import exchange
from gradcomp.comm.nodes import Nodes, nodes_in
from gradcomp.comm.process_group import resolve_group
from gradcomp.device import has_streams

from .workloads import Workload, load_workload

TIMEOUT = timedelta(seconds=120)
# The path of the file through which processes started by bench find each other.
STORE_VARIABLE = "GRADCOMP_BENCH_STORE"


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

    def round_trip_s(self) -> float:
        """Return the time from a message to its answer between ranks, or nodes, as hooks do. A collective."""
        world = resolve_group("python -m gradcomp bench", None)
        between = self.nodes.between if self.nodes else None
        return exchange.round_trip_s(torch.empty(0, dtype=torch.float32, device=self.device), world, between)

    def slowest(self, samples_s: Sequence[float]) -> list[float]:
        """Return for each sample the longest time of any rank. A collective."""
        shared = torch.tensor(samples_s, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return [float(each) for each in shared]


def join(use_cpu: bool, ranks_per_node: int | str, model: str) -> tuple[Group, Workload]:
    """Join the other ranks' process group, and make this rank's workload.

    use_cpu: whether to use CPUs and gloo on machines with GPUs, too.
    ranks_per_node: see QuantizationState.
    model: the name of the workload.

    The backend is NCCL if every rank of a machine has a GPU of its own, else gloo. If the model can't be made
    on any rank, every rank raises ValueError, with the message of the first of these ranks. Every rank raises
    ValueError, too, if the ranks don't fill the last node.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    on_gpus = not use_cpu and torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    store = os.environ.get(STORE_VARIABLE)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        init_method="env://" if store is None else f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    problem = ""
    try:
        workload = load_workload(model, device)
    except ValueError as error:
        problem = str(error)
    problems = [""] * world_size
    dist.all_gather_object(problems, problem)
    if any(problems):
        first, problem = next((each, text) for each, text in enumerate(problems) if text)
        dist.destroy_process_group()
        raise ValueError(problem if all(problems) else f"rank {first}: {problem}")
    world = resolve_group("python -m gradcomp bench", None)
    try:
        nodes = nodes_in("python -m gradcomp bench", ranks_per_node, world, device)
    except (RuntimeError, ValueError) as error:
        dist.destroy_process_group()
        raise ValueError(str(error)) from error
    has_nodes = nodes is not None and nodes.num_nodes > 1
    return Group(rank, world_size, device, dist.get_backend(), nodes if has_nodes else None), workload


SIZES_BYTES = (2**12, 2**20, 2**22, 2**24, 2**26)
NUM_CALLS = 5
# After an all-reduce that takes longer, larger sizes are left out, but there is always a second size.
LONG_S = 0.1


@dataclass(frozen=True)
class LinkSample:
    """The time of one all-reduce, in seconds.

    group: "all" ranks; "within" a node; or "between" nodes, the ranks of equal place. All groups of a kind
        run it at once. Between nodes, num_bytes are of all ranks of a node.
    """

    num_bytes: int
    seconds: float
    group: str = "all"


def link_samples(group: Group) -> Iterator[LinkSample]:
    """Yield the median time of an all-reduce of each size, on the slowest rank. A collective."""
    groups: dict[str, dist.ProcessGroup] = {"all": resolve_group("python -m gradcomp bench", None)}
    if group.nodes is not None:
        groups |= {"within": group.nodes.within, "between": group.nodes.between}
    for place, ranks in groups.items():
        num_buffers = group.ranks_per_node if place == "between" else 1
        for size in SIZES_BYTES:
            buffer = torch.zeros(size // 4, dtype=torch.float32, device=group.device)
            seconds = statistics.median(group.slowest(_timed(buffer, ranks)[1:]))
            yield LinkSample(size * num_buffers, seconds, place)
            if seconds > LONG_S and size > SIZES_BYTES[0]:
                break


def _timed(buffer: torch.Tensor, group: dist.ProcessGroup) -> list[float]:
    """Time 1 + NUM_CALLS all-reduces one by one. All ranks start together."""
    samples = []
    dist.barrier()
    synchronize(buffer.device)
    for _ in range(1 + NUM_CALLS):
        start = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        synchronize(buffer.device)
        samples.append(time.perf_counter() - start)
    return samples
