"""The simulated process group refuses calls by name, and counts bytes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradcomp.testing.ranks import run_ranks
from gradcomp.testing.ranks.collectives import SimulatedProcessGroup

# torch 2.13 has all_gather_single and reduce_scatter_single for these, and warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda t: dist.send(t, 1 - dist.get_rank()), "send"),
        (lambda t: dist.recv(t), "recv_anysource"),
        (lambda t: dist.all_reduce(t.to_sparse()), "all_reduce: simulated ranks take dense tensors"),
        # gloo silently computes nonsense for the first, and NCCL refuses both.
        (lambda t: dist.all_reduce(t[::2]), "all_reduce: tensors must be contiguous"),
        (lambda t: dist.broadcast(t.view(2, 2).t(), 0), "broadcast: tensors must be contiguous"),
        (lambda t: dist.all_to_all_single(t[:2], t[1:3]), "all_to_all_single: output and input share memory"),
    ],
)
def test_the_unsupported_says_its_name(call: Any, name: str) -> None:
    with pytest.raises(AssertionError, match=name):
        run_ranks(lambda rank, group: call(torch.ones(4)), 2)


def test_no_collective_of_torch_s_is_left_out() -> None:
    """Every method that torch adds must be simulated or refused by name: the base class gives no message."""
    inherited = {
        name
        for name in dir(dist.ProcessGroup)
        if not name.startswith("__")
        if getattr(SimulatedProcessGroup, name) is getattr(dist.ProcessGroup, name)
        if any(
            word in name for word in ("all", "reduce", "gather", "scatter", "cast", "send", "recv", "barrier")
        )
    }
    assert inherited == set()


def nan_of(rank: int, group: dist.ProcessGroup, source: int) -> float:
    dist.all_reduce(tensor := torch.tensor(float("nan") if rank == source else 1.0), op=dist.ReduceOp.MAX)
    return tensor.item()


def test_a_maximum_may_lose_a_nan() -> None:
    """gloo's maximum loses it, too: a hook must not use a maximum to find NaN."""
    assert run_ranks(nan_of, 2, 1, ranks="gloo") == run_ranks(nan_of, 2, 1) == [1, 1]


def sent(rank: int, group: Any) -> list[int]:
    counts = []
    for collective in (
        lambda: dist.all_reduce(torch.ones(4)),
        lambda: dist.broadcast(torch.ones(4), 0),
        lambda: dist.all_gather([torch.ones(4).half() for _ in range(2)], torch.ones(4).half()),
        lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4)),
        lambda: dist.barrier(),
    ):
        collective()
        counts.append(group.sent_bytes)
    return counts


def test_sent_bytes_count_a_tensor_once() -> None:
    assert run_ranks(sent, 2) == [[16, 32, 40, 56, 56], [16, 16, 24, 40, 40]]


def stacked(rank: int, group: dist.ProcessGroup) -> list[list[float]]:
    dist.all_gather_into_tensor(output := torch.zeros(2, 3), torch.full((3,), float(rank)))
    rows: list[list[float]] = output.tolist()
    return rows


def test_all_gather_into_a_stack() -> None:
    assert run_ranks(stacked, 2) == [[[0, 0, 0], [1, 1, 1]]] * 2


def parts_of_one_buffer(rank: int, group: dist.ProcessGroup) -> list[list[float]]:
    gathered, exchanged, scattered = (torch.arange(4.0) + 10 * rank for _ in range(3))
    dist.all_gather(list(gathered.view(2, 2)), gathered.view(2, 2)[rank])
    dist.all_to_all_single(exchanged[:2], exchanged[2:])
    dist.reduce_scatter(scattered.view(2, 2)[rank], list(scattered.view(2, 2)))
    return [gathered.tolist(), exchanged.tolist(), scattered.tolist()]


def test_tensors_may_be_parts_of_one_buffer() -> None:
    assert run_ranks(parts_of_one_buffer, 2) == [
        [[0, 1, 12, 13], [2, 12, 2, 3], [10, 12, 2, 3]],
        [[0, 1, 12, 13], [3, 13, 12, 13], [10, 11, 14, 16]],
    ]


def objects(rank: int, group: dist.ProcessGroup) -> Any:
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, {"rank": rank})
    chosen = [("from", rank)]
    dist.broadcast_object_list(chosen, src=1)
    return gathered, chosen


def test_objects() -> None:
    assert run_ranks(objects, 2) == [([{"rank": 0}, {"rank": 1}], [("from", 1)])] * 2
