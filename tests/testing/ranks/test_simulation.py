"""Simulated ranks have their own state, and run in an order that follows from the schedule."""

import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import gradcomp
from gradcomp import ops
from gradcomp.testing.ranks import RankError, c10d, run_ranks

pytestmark = pytest.mark.usefixtures("nothing_is_left")
SCHEDULES = range(12)


# ---- what a rank has of its own


def test_a_rank_has_a_default_group_and_random_numbers() -> None:
    def own(rank: int, group: dist.ProcessGroup) -> Any:
        dist.barrier()  # other ranks run in between
        assert dist.is_initialized()
        assert dist.group.WORLD is group
        assert dist.get_world_size() == dist.get_world_size(group) == group.size() == 3
        first = torch.rand(2).tolist()
        dist.barrier()
        return dist.get_rank(), group.rank(), dist.get_backend(), first + torch.rand(2).tolist()

    expected = [torch.rand(4, generator=torch.Generator().manual_seed(rank)).tolist() for rank in range(3)]
    for schedule in SCHEDULES:
        found = run_ranks(own, 3, schedule=schedule)
        assert found == [(rank, rank, "simulated", expected[rank]) for rank in range(3)]
    assert not dist.is_initialized()


def test_a_real_default_group_stays() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        own = dist.group.WORLD
        assert run_ranks(lambda rank, group: (dist.get_rank(), dist.get_world_size()), 2) == [(0, 2), (1, 2)]
        with pytest.raises(RankError, match="ZeroDivisionError"):
            run_ranks(lambda rank, group: 1 // rank, 2)
        assert dist.group.WORLD is own
        assert dist.get_world_size() == 1
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


def test_subgroups() -> None:
    def subgroups(rank: int, world: dist.ProcessGroup) -> Any:
        mine, _ = dist.new_subgroups(2)
        odd = dist.new_group([1, 3])
        again = dist.new_group([1, 3])
        dist.all_reduce(pair := torch.tensor([rank]), group=mine)
        if rank % 2 == 1:
            # Two groups of the same ranks have separate sequences.
            works = [dist.all_reduce(torch.ones(size), group=g, async_op=True) for g, size in
                     (((odd, 1), (again, 2)) if rank == 1 else ((again, 2), (odd, 1)))]  # fmt: skip
            for work in works:
                work.wait()
            dist.broadcast(pair, src=3, group=odd)
            dist.destroy_process_group(again)
        return pair.item(), dist.get_rank(mine), dist.get_process_group_ranks(mine)

    for schedule in SCHEDULES:
        assert run_ranks(subgroups, 4, schedule=schedule) == [
            (1, 0, [0, 1]), (5, 1, [0, 1]), (5, 0, [2, 3]), (5, 1, [2, 3])
        ]  # fmt: skip


def test_a_rank_may_simulate_ranks() -> None:
    def outer(rank: int, group: dist.ProcessGroup) -> Any:
        dist.all_reduce(before := torch.ones(1))
        inner = run_ranks(lambda inner_rank, _: (rank, dist.get_rank(), dist.get_world_size()), 3)
        dist.all_reduce(after := torch.ones(1))
        return before.item(), inner, after.item(), dist.get_world_size()

    for rank, found in enumerate(run_ranks(outer, 2)):
        assert found == (2, [(rank, inner_rank, 3) for inner_rank in range(3)], 2, 2)


def test_gradcomp_s_wrapper_trains_on_simulated_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_INTERPRETED", False)

    def train(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        model = gradcomp.DistributedDataParallel(module, bucket_cap_mb=1e-4)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.rand(4, 6)).square().mean().backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    trained = [parameters for schedule in (0, 1) for parameters in run_ranks(train, 2, schedule=schedule)]
    assert all(torch.equal(parameters, trained[0]) for parameters in trained)


# ---- in which order


def test_callbacks_run_as_their_rank_on_a_thread_of_their_own() -> None:
    def function(rank: int, group: dist.ProcessGroup) -> Any:
        def callback(future: Any) -> Any:
            (tensor,) = future.value()
            dist.all_reduce(again := tensor.clone())  # may issue collectives, and wait for them
            return dist.get_rank(), again.item(), threading.current_thread() is mine

        mine = threading.current_thread()
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(callback)
        done_at_once = future.done()
        return *future.wait(), done_at_once

    found = [run_ranks(function, 2, schedule=schedule) for schedule in SCHEDULES]
    assert all((rank, 4.0) == run[rank][:2] for run in found for rank in range(2))
    # The last rank to issue can find its collective done: then the callback runs in `then`, as with gloo.
    assert {own and at_once for run in found for *_, own, at_once in run} == {True, False}


def test_a_schedule_gives_one_order_and_others_other_orders() -> None:
    def function(rank: int, group: dist.ProcessGroup, trace: list[Any]) -> None:
        works = [dist.all_reduce(torch.ones(1), async_op=True).get_future() for _ in range(3)]
        futures = [
            work.then(lambda _, index=index: trace.append((rank, index))) for index, work in enumerate(works)
        ]
        trace.append((rank, "issued"))
        torch.futures.wait_all(futures)
        trace.append((rank, "done"))

    def trace_of(schedule: int) -> list[Any]:
        trace: list[Any] = []
        run_ranks(function, 2, trace, schedule=schedule)
        return trace

    traces = [trace_of(schedule) for schedule in SCHEDULES]
    assert traces == [trace_of(schedule) for schedule in SCHEDULES]
    assert len(set(map(tuple, traces))) > len(SCHEDULES) // 2
    # Schedule 0 runs as early as possible: rank 0 waits before rank 1 has issued a collective.
    assert traces[0][0] == (0, "issued")
    assert traces[0].index((0, 2)) < traces[0].index((1, "done"))


@pytest.mark.parametrize("wait", ["then", "collect_all", "own future", "work"])
def test_every_way_to_wait_lets_others_run(wait: str) -> None:
    def function(rank: int, group: dist.ProcessGroup) -> Any:
        work = dist.all_reduce(tensor := torch.ones(1), async_op=True)
        if wait == "work":
            assert work.wait()
            return tensor.item()
        future = work.get_future().then(lambda future: future.value()[0].item())
        if wait == "collect_all":
            (future,) = torch.futures.collect_all([future]).wait()
        if wait == "own future":
            own: torch.futures.Future[Any] = torch.futures.Future()
            future.add_done_callback(lambda done: own.set_result(done.value()))
            future = own
        return future.wait()

    for schedule in SCHEDULES:
        assert run_ranks(function, 3, schedule=schedule) == [3, 3, 3]


def test_a_buffer_in_flight_is_read_and_written_at_any_time() -> None:
    def reuse(rank: int, group: dist.ProcessGroup) -> float:
        work = dist.all_reduce(tensor := torch.ones(1), async_op=True)
        tensor.zero_()  # too early
        work.wait()
        return tensor.item()

    # The tensor is zeroed before the sum is formed, or after: no rank ever gets 2.
    assert {value for schedule in SCHEDULES for value in run_ranks(reuse, 2, schedule=schedule)} == {0, 1}


num_calls = 0


def counted(rank: int, group: dist.ProcessGroup) -> tuple[int, bool]:
    global num_calls, made_by_rank_0
    num_calls += 1
    if rank == 0:
        made_by_rank_0 = True
    dist.barrier()
    return num_calls, "made_by_rank_0" in globals()


def test_a_rank_has_its_modules_variables() -> None:
    assert run_ranks(partial(counted), 2) == [(1, True), (1, False)]
    assert (num_calls, "made_by_rank_0" in globals()) == (0, False)


# ---- torch's private names


def test_a_rank_s_world_has_all_that_torch_s_has() -> None:
    """A table that torch adds would be missing on simulated ranks."""
    theirs = {name for name, value in vars(distributed_c10d._World).items() if isinstance(value, property)}
    ours = set(vars(c10d.new_world(dist.ProcessGroup(0, 1), [0], 0)))
    assert theirs - ours == {"pg_config_info"}  # computed from the others, for the flight recorder


def test_torch_s_futures_wait_in_python() -> None:
    """Every future waits by the one method that simulated ranks exchange."""
    done = torch.futures.Future()
    done.set_result(1)
    for future in (done, done.then(lambda _: 1), torch.futures.collect_all([done])):
        assert isinstance(future, torch._C.Future)
        waited: list[Any] = []
        with c10d.futures_by(waited.append, lambda function: function()):
            future.wait()
        assert waited == [future]
