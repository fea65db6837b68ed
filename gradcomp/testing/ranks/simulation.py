"""Simulated ranks: threads of this process that run one at a time, in an order that a schedule determines.

Whenever a rank issues a collective or waits, the scheduler chooses the next event:

    a rank continues              if it doesn't wait, or its wait is over
    a collective is carried out   if all its ranks have issued it: its tensors are read and written now
    a future is completed         if its collective was carried out: its callbacks run on a new thread

Schedule 0 runs the second and third kind of event as early as possible, other schedules at random times. So a
tensor in flight is read and written at some time between issue and completion, as on real backends. Callbacks
run at some later time. A hook that relies on certain times fails under some schedule. The same schedule
yields the same bits.

A group's collectives are matched in the order in which each rank issues them. If ranks disagree, or all wait,
the run ends with an error that names the lines.

With CUDA tensors, each collective synchronizes the device: values are checked, the order of streams is not.
torch's DistributedDataParallel waits in C++, where no other rank can be scheduled. Simulate gradcomp's, which
waits in Python. Unlike here, no collective is ever in flight between torch's own threads with process groups
(torch.testing._internal.distributed.multi_threaded_pg), and mismatches pass there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, reduce
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradcomp.testing.ranks import c10d
from gradcomp.testing.ranks.collectives import REDUCTIONS, Call, SimulatedProcessGroup, SimulatedWork
from gradcomp.testing.ranks.scheduler import CollectiveMismatch, RankError, Scheduler, Task, call_site, shown

_one_at_a_time = threading.Lock()  # a simulation exchanges the process's default group
_first_names = count(1_000_000, 1_000_000)


class Simulation:
    """One run of `function(rank, process_group, *arguments)` on simulated ranks."""

    def __init__(
        self, function: Callable[..., Any], world_size: int, arguments: Sequence[Any], schedule: int
    ) -> None:
        ranks = range(world_size)
        groups = [SimulatedProcessGroup(self, rank, ranks, 0) for rank in ranks]
        self._worlds = [c10d.new_world(group, ranks, next(_first_names)) for group in groups]
        self._identity = c10d.Identity(self._worlds)
        # Collectives that some members have yet to issue: by group and place in its sequence, then by member.
        self._open: dict[tuple[tuple[int, ...], int, int], dict[int, SimulatedWork]] = {}
        self._scheduler = Scheduler(schedule, self._identity.become, self._unfinished)
        mains = [partial(function, rank, group, *arguments) for rank, group in enumerate(groups)]
        self._tasks = [self._scheduler.add(rank, main) for rank, main in enumerate(mains)]

    def run(self, timeout_s: float) -> list[Any]:
        """Run the ranks to their end, and return their results by rank. Raises RankError."""
        with ExitStack() as stack:
            # A rank of another simulation runs this while that simulation holds the lock.
            if not isinstance(threading.current_thread(), Task):
                stack.enter_context(_one_at_a_time)
            stack.enter_context(self._identity)
            stack.enter_context(c10d.waiting_by(self._pause_for))
            self._scheduler.run(timeout_s)
        return [task.result for task in self._tasks]

    def issue(self, group: SimulatedProcessGroup, call: Call) -> SimulatedWork:
        """Issue the running rank's next collective in this group. Other ranks may run before it returns."""
        task = self._task(call.name)
        place = f"collective {group.num_issued} of the group {list(group.ranks)}"
        key = (group.ranks, group.index, group.num_issued)
        group.num_issued += 1
        members = self._open.setdefault(key, {})
        members[group.rank()] = work = SimulatedWork(self, task.rank, call, place, call_site())
        first = next(iter(members.values())).call
        if (first.name, first.agreed) != (call.name, call.agreed):
            self._fail(f"ranks disagree on {work.place}", members)
        elif len(members) == group.size():
            del self._open[key]
            works = [members[member] for member in range(group.size())]
            if problem := _shape_mismatch([work.call for work in works]):
                self._fail(f"{work.place}: {problem}", members)
            self._scheduler.add_pending(partial(self._carry_out, works))
        self._scheduler.pause()
        return work

    def _fail(self, problem: str, members: dict[int, SimulatedWork]) -> None:
        self._scheduler.fail(CollectiveMismatch("\n".join([problem, *_issuers(members)])))

    def wait(self, work: SimulatedWork) -> None:
        """Let other ranks run until the work is done."""
        self._task("waiting for a collective")
        self._scheduler.pause(work.is_completed, work)

    def new_group(self, ranks: Sequence[int]) -> SimulatedProcessGroup:
        """Make the running rank's process group for a new group of these global ranks."""
        rank = self._task("new_group").rank
        index = 1 + sum(group.ranks == tuple(ranks) for group in self._worlds[rank].groups)
        group = SimulatedProcessGroup(self, rank, ranks, index)
        self._worlds[rank].groups.append(group)
        return group

    def _pause_for(self, future: torch.futures.Future[Any]) -> None:
        if self._scheduler.running() is not None:
            self._scheduler.pause(future.done, "a future")

    def _carry_out(self, works: list[SimulatedWork]) -> None:
        try:
            _transfer([work.call for work in works])
        except Exception as error:
            self._scheduler.fail(RankError(f"{works[0]}: {error}"))
        for work in works:
            work.done = True
            if work.future is not None:
                self._scheduler.add_pending(partial(self._scheduler.add, work.rank, work.complete))

    def _task(self, what: str) -> Task:
        task = self._scheduler.running()
        if task is None:
            raise RuntimeError(f"{what}, on a thread that isn't a simulated rank's: run it with ranks='gloo'")
        return task

    def _unfinished(self) -> list[str]:
        lines = []
        for (ranks, *_), members in self._open.items():
            missing = [rank for member, rank in enumerate(ranks) if member not in members]
            place = next(iter(members.values())).place
            lines.append(f"{place} was not issued by rank {', '.join(map(str, missing))}, but by")
            lines += _issuers(members)
        return lines


def _transfer(calls: Sequence[Call]) -> None:
    """Carry out a collective: one call per rank, in rank order.

    Reductions add up in rank order, in the tensors' dtype. With two ranks they have gloo's bits; with more
    they are equal to gloo's up to rounding. MIN and MAX ignore a NaN unless it is rank 0's. gloo's ignore a
    NaN of one rank or another.
    """
    devices = set().union(*(call.devices for call in calls))
    for device in devices:  # the order of streams is not simulated
        torch.cuda.synchronize(device)
    with torch.no_grad():
        writes: list[tuple[Tensor, Tensor]] = []
        totals: dict[tuple[int, ...], Tensor] = {}
        for rank, call in enumerate(calls):
            for source, outputs in call.receives.items():
                writes += zip(outputs, calls[source].sends[rank], strict=True)
            if call.op:
                for output, *terms in zip(call.value, *(peer.sends[rank] for peer in calls), strict=True):
                    key = tuple(map(id, terms))  # an all-reduce has one sum for all ranks
                    if key not in totals:
                        totals[key] = _reduce(call.op, terms)
                    writes.append((output, totals[key]))
            for output in call.value if call.is_undefined else ():
                real = output.is_floating_point() or output.is_complex()
                writes.append((output, output.new_full((), float("nan") if real else 0)))
        for output, value in writes:
            output.detach().copy_(value)  # autograd does not see collectives
    for device in devices:
        torch.cuda.synchronize(device)


def _shape_mismatch(calls: Sequence[Call]) -> str | None:
    """Describe the first tensors that have other shapes than their receiver expects; None if all agree.

    The calls' names and agreed arguments must be equal already.
    """
    for rank, call in enumerate(calls):
        for source, outputs in call.receives.items():
            sent = [list(t.shape) for t in calls[source].sends[rank]]
            expected = [list(t.shape) for t in outputs]
            if sent != expected:
                return f"rank {source} sends {sent} to rank {rank}, which expects {expected}"
    return None


def _reduce(op: str, terms: Sequence[Tensor]) -> Tensor:
    total = reduce(REDUCTIONS[op], terms)
    if op == "AVG":
        return total / len(terms)
    return total if len(terms) > 1 else total.clone()


def _issuers(members: dict[int, SimulatedWork]) -> list[str]:
    return [f"  rank {work.rank}: {work.call}\n{shown(work.site)}" for _, work in sorted(members.items())]


def _new_group(options: Any, _: Any) -> dist.ProcessGroup:
    """Make the running rank's process group, for dist.new_group."""
    world = dist.group.WORLD
    assert isinstance(world, SimulatedProcessGroup)
    return world.network.new_group(options.global_ranks_in_group)


dist.Backend.register_backend(c10d.BACKEND, _new_group, extended_api=True, devices=["cpu", "cuda"])
