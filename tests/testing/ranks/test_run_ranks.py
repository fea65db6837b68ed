"""Tests of run_ranks on gloo processes, and of its errors."""

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradcomp.testing.ranks import RankError, run_ranks


def seen(rank: int, group: dist.ProcessGroup, given: torch.Tensor) -> Any:
    """Return a rank's environment, and its process."""
    assert dist.group.WORLD is group
    dist.all_reduce(total := given + rank)
    again = dist.new_group([0, 1])
    dist.all_reduce(total, group=again)
    return (dist.get_rank(), group.size(), total.tolist(), torch.rand(1).item()), os.getpid()


def test_the_same_with_one_argument_changed_and_processes_are_kept() -> None:
    given = torch.tensor([1.0, 2.0])
    simulated = [found for found, _ in run_ranks(seen, 2, given)]
    first, second = (run_ranks(seen, 2, given, ranks="gloo") for _ in range(2))
    assert simulated == [found for found, _ in first] == [found for found, _ in second]
    processes = [process for _, process in first]
    assert processes == [process for _, process in second]
    assert len({os.getpid(), *processes}) == 3


def fail(rank: int, group: dist.ProcessGroup, how: str) -> Any:
    """Let rank 1 fail while rank 0 waits for it, or let no rank fail."""
    if rank == 1 and how == "raise":
        raise KeyError("of rank 1")
    if rank == 1 and how == "return a lock":
        return threading.Lock()
    if rank == 1 and how == "die":
        os._exit(3)
    if not (rank == 1 and how == "leave"):
        dist.barrier()
    return os.getpid()


@pytest.mark.parametrize(
    ("how", "kept", "messages"),
    [
        ("raise", True, ["rank 1 failed: Traceback", "KeyError: 'of rank 1'", "rank 0 failed", "in fail"]),
        ("return a lock", True, ["rank 1 failed: Traceback", "cannot pickle '_thread.lock' object"]),
        ("leave", False, ["rank 1 returned", "rank 0 did not finish in time:", "in barrier", "in fail"]),
        ("die", False, ["rank 1 failed: the process died, exit code 3"]),
    ],
)
def test_a_failure_is_reported_and_the_next_run_is_sound(how: str, kept: bool, messages: list[str]) -> None:
    before = run_ranks(fail, 2, "", ranks="gloo")
    with pytest.raises(RankError) as caught:
        run_ranks(fail, 2, how, ranks="gloo", timeout_s=1 if how == "leave" else 60)
    for message in messages:
        assert message in str(caught.value)
    assert [is_running(process) for process in before] == [kept, kept]


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="at the top level of a module"):
        run_ranks(lambda rank, group: None, 2, ranks="gloo")
    with pytest.raises(ValueError, match="world_size is at least 1, got 0"):
        run_ranks(seen, 0)
    with pytest.raises(ValueError, match="'simulated' or 'gloo', got 'mpi'"):
        run_ranks(seen, 2, ranks="mpi")  # type: ignore[arg-type]
