"""A run of simulated ranks ends when ranks disagree, wait for ever, or raise."""

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

from gradcomp import ops
from gradcomp.comm.bucket import GradBucket
from gradcomp.hooks import powerSGD_hook as power_sgd
from gradcomp.testing.ranks import CollectiveMismatch, RankError, run_ranks

pytestmark = pytest.mark.usefixtures("nothing_is_left")
SCHEDULES = range(12)
ones = torch.ones


def error_of(function: Callable[..., Any], world_size: int = 2, **options: Any) -> str:
    with pytest.raises(RankError) as caught:
        run_ranks(function, world_size, **options)
    return str(caught.value)


def issue(call: str, tensor: torch.Tensor) -> None:
    if call == "product":
        dist.all_reduce(tensor, op=dist.ReduceOp.PRODUCT)
    elif call == "all_reduce":
        dist.all_reduce(tensor)
    elif call == "broadcast":
        dist.broadcast(tensor, 0)
    elif call == "from 1":
        dist.broadcast(tensor, 1)


@pytest.mark.parametrize(
    ("first", "second", "messages"),
    [
        (("all_reduce", ones(2)), ("broadcast", ones(2)), ("all_reduce(op=SUM", "broadcast(root=0")),
        (("all_reduce", ones(2)), ("product", ones(2)), ("op=SUM", "op=PRODUCT")),
        (("broadcast", ones(2)), ("from 1", ones(2)), ("root=0", "root=1")),
        (("all_reduce", ones(2)), ("all_reduce", ones(3)), ("shape=[2]", "shape=[3]")),
        # The same number of elements in another shape: real backends add them up without an error.
        (("all_reduce", ones(2, 3)), ("all_reduce", ones(3, 2)), ("shape=[2, 3]", "shape=[3, 2]")),
        (("all_reduce", ones(2)), ("all_reduce", ones(2).half()), ("float32", "float16")),
    ],
)  # fmt: skip
def test_ranks_that_disagree_are_told_where(first: Any, second: Any, messages: tuple[str, str]) -> None:
    def function(rank: int, group: dist.ProcessGroup) -> None:
        dist.barrier()
        if rank == 0:
            issue(*first)
        else:
            issue(*second)

    for schedule in range(3):
        with pytest.raises(CollectiveMismatch) as caught:
            run_ranks(function, 2, schedule=schedule)
        lines = str(caught.value).splitlines()
        assert lines[0] == "ranks disagree on collective 1 of the group [0, 1]"
        for rank, message in enumerate(messages):
            (of_rank,) = [index for index, line in enumerate(lines) if line.startswith(f"  rank {rank}: ")]
            assert message in lines[of_rank]
            assert re.match(r'  File ".*test_simulation_ends\.py", line \d+, in issue', lines[of_rank + 1])
            assert re.match(r"    dist\.(all_reduce|broadcast)\(", lines[of_rank + 2])


def test_split_sizes_that_do_not_fit_are_a_mismatch() -> None:
    def function(rank: int, group: dist.ProcessGroup) -> None:
        dist.all_to_all_single(torch.zeros(3), torch.zeros(3), [1, 2], [[1, 2], [2, 1]][rank])

    with pytest.raises(
        CollectiveMismatch, match=r"rank 0 sends \[\[2\]\] to rank 1, which expects \[\[1\]\]"
    ):
        run_ranks(function, 2)


def power_sgd_steps(rank: int, group: dist.ProcessGroup, module: Any) -> list[torch.Tensor]:
    """Run PowerSGD on two buckets in flight, past its warm-up."""
    state = module.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=0.5)
    parameters = [torch.nn.Parameter(torch.zeros(12, 10)) for _ in range(2)]
    for _ in range(4):
        futures = [
            module.powerSGD_hook(state, GradBucket(index, torch.randn(120), [parameter], index == 1))
            for index, parameter in enumerate(parameters)
        ]
        averages = [future.wait() for future in futures]
    return averages


def test_torch_s_powersgd_mismatches_and_gradcomp_s_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_INTERPRETED", False)
    message = error_of(lambda rank, group: power_sgd_steps(rank, group, torch_power_sgd))
    assert "ranks disagree on collective" in message
    assert len(set(re.findall(r'ddp_comm_hooks/powerSGD_hook\.py", line (\d+)', message))) == 2
    for schedule in SCHEDULES:
        first, second = run_ranks(power_sgd_steps, 2, power_sgd, schedule=schedule)
        assert all(map(torch.equal, first, second))


def test_torch_s_local_sgd_in_subgroups() -> None:
    def function(rank: int, group: dist.ProcessGroup) -> float:
        subgroup, _ = dist.new_subgroups(2)
        state = local_sgd.PostLocalSGDState(group, subgroup, start_localSGD_iter=1)
        for _ in range(2):
            bucket = GradBucket(0, torch.tensor([float(rank)]), [torch.zeros(1)], True)
            average = local_sgd.post_localSGD_hook(state, bucket).wait()
        return average.item()

    assert run_ranks(function, 4) == [0.5, 0.5, 2.5, 2.5]


def test_a_deadlock_says_who_waits_where() -> None:
    def function(rank: int, group: dist.ProcessGroup) -> None:
        if rank == 1:
            dist.barrier()

    for schedule in range(3):
        message = error_of(function, 3, schedule=schedule)
        assert "deadlock: no rank can go on\nrank 1 waits for barrier(), collective 0" in message
        assert "was not issued by rank 0, 2, but by\n  rank 1: barrier()" in message
        assert "in function\n    dist.barrier()" in message
    forever: Any = torch.futures.Future()
    assert "rank 1 waits for a future" in error_of(lambda rank, group: forever.wait())


def test_collectives_that_are_not_waited_for_have_to_be_complete_at_the_end() -> None:
    def function(rank: int, group: dist.ProcessGroup, issuers: int) -> None:
        if rank < issuers:
            dist.all_reduce(torch.ones(1), async_op=True)

    run_ranks(function, 2, 2)
    with pytest.raises(
        RankError, match=r"all ranks have returned, but\ncollective 0 .* not issued by rank 1"
    ):
        run_ranks(function, 2, 1)


def test_a_rank_that_raises_ends_the_others_where_they_wait() -> None:
    unwound = []

    def function(rank: int, group: dist.ProcessGroup) -> None:
        try:
            dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda _: dist.barrier())
            if rank == 2:
                raise KeyError("of rank 2")
            dist.barrier()
        except Exception:  # the scheduler ends the others by a BaseException
            unwound.append((rank, "handled"))
            raise
        finally:
            unwound.append((rank, "unwound"))

    for schedule in SCHEDULES:
        unwound.clear()
        message = error_of(function, 3, schedule=schedule)
        assert message.startswith("rank 2 raised KeyError: 'of rank 2'")
        assert 'raise KeyError("of rank 2")' in message
        assert sorted(unwound)[-2:] == [(2, "handled"), (2, "unwound")]
        assert all(what == "unwound" for rank, what in unwound if rank != 2)


def test_an_error_in_a_callback_surfaces_where_it_is_waited_for() -> None:
    def function(rank: int, group: dist.ProcessGroup) -> str:
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda _: 1 // 0)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            future.wait()
        return "went on"

    for schedule in range(4):
        assert run_ranks(function, 2, schedule=schedule) == ["went on"] * 2


def test_a_loop_without_end_is_interrupted() -> None:
    def function(rank: int, group: dist.ProcessGroup) -> None:
        while rank == 0:
            pass
        dist.barrier()

    message = error_of(function, timeout_s=0.1)
    assert message.startswith("the ranks were not done in time")
    assert "in function\n    while rank == 0:" in message


def test_a_run_that_still_makes_calls_is_not_stuck() -> None:
    def function(rank: int, group: dist.ProcessGroup, num_calls: int) -> None:
        for _ in range(num_calls):
            time.sleep(0.01)
            dist.barrier()

    run_ranks(function, 2, 150, timeout_s=1)
    assert "not done in time" in error_of(lambda rank, group: function(rank, group, 10**6), timeout_s=0.1)


def test_a_thread_that_is_no_rank_s_is_refused() -> None:
    def function(rank: int, group: dist.ProcessGroup) -> str:
        errors = []

        def on_a_thread() -> None:
            try:
                dist.all_reduce(torch.ones(1), group=group)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=on_a_thread)
        thread.start()
        thread.join()
        return errors[0]

    assert "shape=[1]), on a thread that isn't a simulated rank's" in run_ranks(function, 2)[0]
