"""Simulated collectives have the same values, futures and errors as gloo's."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradcomp.testing.ranks import run_ranks

# torch 2.13 has all_gather_single and reduce_scatter_single for these, and warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGRAL = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)
# gloo's all_to_all of lists, which torch 2.11 doesn't have.
HAS_ALL_TO_ALL = torch.__version__ >= "2.13"


def values(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Make a rank's values; their sums and products over three ranks are exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    small = torch.randint(1, 5, shape, generator=generator)
    if dtype == torch.bool:
        return small % 2 == 0
    return small.to(dtype) if dtype in INTEGRAL else small.to(dtype) / 8


def exact_collectives(
    rank: int, world_size: int, dtype: torch.dtype, make_values: Callable[..., torch.Tensor]
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield every collective's name, and the rank's tensors after it."""

    def mine(*shape: int) -> torch.Tensor:
        return make_values(rank, dtype, *shape)

    def empty(*shape: int) -> list[torch.Tensor]:
        return [torch.zeros(shape, dtype=dtype) for _ in range(world_size)]

    ops = ["SUM"] if dtype in COMPLEX else ["SUM", "PRODUCT", "MIN", "MAX"]
    ops += [] if dtype in INTEGRAL else ["AVG"]
    ops += ["BAND", "BOR", "BXOR"] if dtype in INTEGRAL and dtype != torch.bool else []
    root = world_size - 1
    for op in ops:
        tensor = mine(3, 5)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
        yield f"all_reduce {op}", [tensor]
        dist.reduce(tensor := mine(7), root, op=getattr(dist.ReduceOp, op))
        yield f"reduce {op}", [tensor] if rank == root else []
        output = torch.zeros(4, dtype=dtype)
        dist.reduce_scatter(output, list(mine(world_size, 4)), op=getattr(dist.ReduceOp, op))
        yield f"reduce_scatter {op}", [output]
        output = torch.zeros(2, 3, dtype=dtype)
        dist.reduce_scatter_tensor(output, mine(2 * world_size, 3), op=getattr(dist.ReduceOp, op))
        yield f"reduce_scatter_tensor {op}", [output]

    shapes = {"empty": mine(0), "scalar": mine()}
    if dtype not in COMPLEX:
        shapes["channels last"] = mine(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for name, tensor in shapes.items():
        dist.all_reduce(tensor)
        yield f"all_reduce {name}", [tensor]
    dist.group.WORLD.allreduce_coalesced(tensors := [mine(3), mine(2, 2)]).wait()
    yield "allreduce_coalesced", tensors
    dist.broadcast(tensor := mine(6), root)
    yield "broadcast", [tensor]
    dist.all_gather(outputs := empty(2, 2), mine(2, 2))
    yield "all_gather", outputs
    dist.all_gather_into_tensor(output := torch.zeros(2 * world_size, 3, dtype=dtype), mine(2, 3))
    yield "all_gather_into_tensor", [output]
    if HAS_ALL_TO_ALL:
        dist.all_to_all(outputs := empty(3), list(mine(world_size, 3)))
        yield "all_to_all", outputs
    dist.all_to_all_single(output := torch.zeros(2 * world_size, dtype=dtype), mine(2 * world_size))
    yield "all_to_all_single", [output]
    # Rank s sends s + r + 1 rows to rank r.
    rows = [rank + other + 1 for other in range(world_size)]
    dist.all_to_all_single(output := torch.zeros(sum(rows), 2, dtype=dtype), mine(sum(rows), 2), rows, rows)
    yield "all_to_all_single of some rows", [output]
    dist.scatter(
        output := torch.zeros(3, dtype=dtype), list(mine(world_size, 3)) if rank == root else None, root
    )
    yield "scatter", [output]
    if dtype not in COMPLEX:
        dist.gather(mine(3), outputs := empty(3) if rank == root else None, root)
        yield "gather", outputs or []
    dist.barrier()


def run_all(
    rank: int, group: dist.ProcessGroup, dtypes: Any, make_values: Any
) -> dict[Any, list[torch.Tensor]]:
    """Return the rank's tensors after every collective of every dtype."""
    return {
        (dtype, name): tensors
        for dtype in dtypes
        for name, tensors in exact_collectives(rank, group.size(), dtype, make_values)
    }


def noise(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize(
    ("world_size", "dtypes", "make_values"),
    # Two ranks may have any values, as there is only one order of addition.
    [(2, REAL + COMPLEX, noise), (2, INTEGRAL, values), (3, REAL + INTEGRAL + COMPLEX, values)],
)
def test_values_are_gloo_s(world_size: int, dtypes: Any, make_values: Any) -> None:
    expected = run_ranks(run_all, world_size, dtypes, make_values, ranks="gloo")
    for schedule in (0, 1):
        found = run_ranks(run_all, world_size, dtypes, make_values, schedule=schedule)
        for rank in range(world_size):
            assert found[rank].keys() == expected[rank].keys()
            for key, tensors in expected[rank].items():
                torch.testing.assert_close(
                    found[rank][key], tensors, rtol=0, atol=0, msg=f"rank {rank}, {key}"
                )


def futures(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the values of every collective's future and work."""
    one, two, size = torch.ones(2), torch.ones(2 * group.size()), group.size()
    works = {
        "all_reduce": dist.all_reduce(one.clone(), async_op=True),
        "broadcast": dist.broadcast(one.clone(), 0, async_op=True),
        "all_gather": dist.all_gather([one.clone() for _ in range(size)], one, async_op=True),
        "all_gather_into_tensor": dist.all_gather_into_tensor(two.clone(), one, async_op=True),
        "all_to_all_single": dist.all_to_all_single(two.clone(), two, async_op=True),
        "gather": dist.gather(
            one, [one.clone() for _ in range(size)] if rank == 0 else None, 0, async_op=True
        ),
        "scatter": dist.scatter(
            one.clone(), list(two.view(size, 2)) if rank == 0 else None, 0, async_op=True
        ),
        "coalesced": group.allreduce_coalesced([one.clone(), two.clone()]),
        "barrier": dist.barrier(async_op=True),
    }
    if HAS_ALL_TO_ALL:
        inputs, outputs = ([one.clone() for _ in range(size)] for _ in range(2))
        works["all_to_all"] = dist.all_to_all(outputs, inputs, async_op=True)
    return {
        name: (work.wait(), work.is_completed(), work.get_future().wait(), work.result())
        for name, work in works.items()
    }


def test_futures_hold_what_gloo_s_do() -> None:
    expected, found = run_ranks(futures, 2, ranks="gloo"), run_ranks(futures, 2)
    for rank in range(2):
        for name, (waited, completed, of_future, of_work) in found[rank].items():
            assert (waited, completed) == expected[rank][name][:2]
            torch.testing.assert_close(
                [of_future, of_work], list(expected[rank][name][2:]), rtol=0, atol=0, msg=name
            )


def refusals(rank: int, group: dist.ProcessGroup) -> dict[str, bool]:
    """Return which of these calls are refused: wrong ones, and two valid ones."""
    one, size = torch.ones(2), group.size()
    of_three = [torch.ones(3) for _ in range(size)]
    calls: dict[str, Callable[[], Any]] = {
        "right": lambda: dist.all_reduce(one.clone()),
        "needs grad": lambda: dist.all_reduce(torch.ones(2, requires_grad=True)),
        "int16": lambda: dist.all_reduce(one.to(torch.int16)),
        "float8": lambda: dist.broadcast(one.to(torch.float8_e4m3fn), 0),
        "complex gather": lambda: dist.gather(one.to(torch.complex64), None, 1 - rank),
        "complex product": lambda: dist.all_reduce(one.to(torch.complex64), op=dist.ReduceOp.PRODUCT),
        "mean of integers": lambda: dist.all_reduce(one.to(torch.int32), op=dist.ReduceOp.AVG),
        "bits of floats": lambda: dist.all_reduce(one.clone(), op=dist.ReduceOp.BOR),
        "no such root": lambda: dist.broadcast(one, group_src=size),
        "outputs of another shape": lambda: dist.all_gather(of_three, one),
        "outputs of another dtype": lambda: dist.all_gather([t.double() for t in of_three], torch.ones(3)),
        "too many outputs": lambda: dist.all_gather([*of_three, *of_three], torch.ones(3)),
        "too small an output": lambda: dist.all_gather_into_tensor(one.clone(), one),
        "too many inputs": lambda: dist.reduce_scatter(torch.ones(3), [*of_three, *of_three]),
        "not one input per rank": lambda: dist.all_to_all([one], [one]),
        "split sizes too small": lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 1], [1, 1]),
        "columns": lambda: dist.all_to_all_single(torch.zeros(4, 2), torch.zeros(2, 4).t()),
    }
    refused = {}
    for name, call in calls.items():
        try:
            call()
            refused[name] = False
        except (RuntimeError, ValueError):
            refused[name] = True
    return refused


def test_what_gloo_refuses_is_refused() -> None:
    expected = run_ranks(refusals, 2, ranks="gloo")
    assert expected[0] == {name: name not in ("right", "needs grad") for name in expected[0]}
    assert run_ranks(refusals, 2) == expected
