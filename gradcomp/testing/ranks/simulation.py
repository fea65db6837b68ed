"""Simulated ranks: threads of this process that run one at a time, in an order that a schedule determines.

Whenever a rank issues a collective or waits, the simulation chooses the next event:

    a rank continues              if it doesn't wait, or its wait is over
    a collective is carried out   if all its ranks have issued it: its tensors are read and written now
    a future is completed         if its collective was carried out: its callbacks run on a new thread

Schedule 0 chooses the oldest event of the second and third kind; without one, the current rank until it
waits. Any other schedule is the seed of a random choice among all events, as on real backends. A hook that
relies on certain times fails under some schedule. The same schedule yields the same bits.

A group's collectives are matched in the order in which each rank issues them. If ranks disagree, or all wait,
the run ends with an error that names the lines.

With CUDA tensors, each collective synchronizes the device: values are checked, the order of streams is not.
torch's DistributedDataParallel waits in C++, where no other rank can be scheduled: simulate gradcomp's. Here
collectives are in flight and mismatches are found, unlike with torch's own threads with process groups
(torch.testing._internal.distributed.multi_threaded_pg).
"""

from __future__ import annotations

import ctypes
import inspect
import random
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.testing.ranks import c10d
from gradcomp.testing.ranks.collectives import SimulatedProcessGroup, SimulatedWork, carry_out

_one_at_a_time = threading.Lock()  # a simulation exchanges the process's default group
_first_names = count(1_000_000, 1_000_000)


class RankError(AssertionError):
    """A rank raised, died, or waits for ever. The message has the rank, the line and the traceback."""


class CollectiveMismatch(RankError):  # noqa: N818 its name says what went wrong
    """The ranks disagree on a collective. The message has each rank's call, and the line that made it."""


_GRADCOMP, _TORCH = Path(__file__).parents[2], Path(torch.__file__).parent


@cache
def _owner(filename: str) -> str:
    """Classify a file as "user", "library" (gradcomp, torch's hooks), or "plumbing" between them and here."""
    path = Path(filename)
    if path.is_relative_to(_GRADCOMP / "testing") or filename == threading.__file__:
        return "plumbing"
    if path.is_relative_to(_TORCH):
        return "library" if path.is_relative_to(_TORCH / "distributed" / "algorithms") else "plumbing"
    return "library" if path.is_relative_to(_GRADCOMP) else "user"


def _variables_of(values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the variables of the modules of the user's functions that these values are, or call."""
    found, seen, waiting = {}, list[Any](), list(values)
    while waiting:
        value = waiting.pop()
        if not callable(value) or any(each is value for each in seen):
            continue
        seen.append(value)
        with suppress(ValueError):  # an empty cell
            waiting += [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        waiting.append(getattr(value, "func", None))
        module = inspect.getmodule(value)
        if module and _owner(getattr(module, "__file__", None) or module.__name__) == "user":
            found[module.__name__] = vars(module)
    return list(found.values())


def call_site() -> str:
    """Format the calling line and, if it is in gradcomp or torch's hooks, the user's line that led to it."""
    lines: list[traceback.FrameSummary] = []
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        owner = _owner(code.co_filename)
        if owner == "user" or (owner == "library" and not lines):
            lines.append(traceback.FrameSummary(code.co_filename, line, code.co_name))
        if owner == "user":
            break
    return "".join(traceback.format_list(lines)).rstrip()


class _Stopped(BaseException):
    """The exception that unwinds a task when the run is over."""


class Task(threading.Thread):
    """A function that runs as one rank on its own thread: the rank's main function, or a callback.

    until, waits_for: while the task waits, the condition; its name and the line, for messages.
    """

    def __init__(self, simulation: Simulation, rank: int, function: Callable[[], object]) -> None:
        super().__init__(name=f"simulated rank {rank}", daemon=True)
        self._simulation, self._function = simulation, function
        self.rank = rank
        self.until: Callable[[], bool] | None = None
        self.waits_for = ""
        self.result: object = None
        self.may_run = threading.Lock()  # the thread that ran before releases it
        self.may_run.acquire()

    def run(self) -> None:
        try:
            self.result = self._function()
        except _Stopped:
            pass
        except BaseException as error:
            text = f"rank {self.rank} raised {type(error).__name__}: {error}\n\n{traceback.format_exc()}"
            self._simulation.fail(RankError(text))
        self._simulation.finish(self)


class Simulation:
    """One run of `function(rank, process_group, *arguments)` on simulated ranks."""

    def __init__(
        self, function: Callable[..., Any], world_size: int, arguments: Sequence[Any], schedule: int
    ) -> None:
        ranks = range(world_size)
        groups = [SimulatedProcessGroup(self, rank, ranks, 0) for rank in ranks]
        self.worlds = [c10d.new_world(group, ranks, next(_first_names)) for group in groups]
        self._identity = c10d.Identity(self.worlds, _variables_of((function, *arguments)))
        self._random = random.Random(schedule) if schedule else None
        # Collectives that some members have yet to issue: by group and place in its sequence, then by member.
        self._open: dict[tuple[tuple[int, ...], int, int], dict[int, SimulatedWork]] = {}
        # Collectives to carry out, and callbacks to run.
        self._pending: list[Callable[[], None] | Task] = []
        mains = [partial(function, rank, group, *arguments) for rank, group in enumerate(groups)]
        self._mains = [Task(self, rank, main) for rank, main in enumerate(mains)]
        self._tasks = list(self._mains)  # those that haven't ended
        self._started: list[Task] = []
        self._running: Task | None = None
        self._failure: BaseException | None = None
        self._over, self._num_pauses = threading.Event(), 0

    def run(self, timeout_s: float) -> list[Any]:
        """Run the ranks to their end, and return their results by rank; see run_ranks."""
        # A rank of another simulation runs this while that simulation holds the lock.
        lock = nullcontext() if isinstance(threading.current_thread(), Task) else _one_at_a_time
        with lock, self._identity, c10d.futures_by(self._wait_for, self._later):
            try:
                self._switch_to(self._next())
                for _ in range(5):  # a run that still makes calls isn't stuck: the machine may be busy
                    before = self._num_pauses
                    if self._over.wait(timeout_s) or self._num_pauses == before:
                        break
                if not self._over.is_set() and (task := self._running):  # the others wait for it
                    stack = "".join(traceback.format_stack(sys._current_frames().get(task.ident or 0)))
                    self.fail(RankError(f"the ranks were not done in time\nrank {task.rank}:\n{stack}"))
            except BaseException as interrupt:
                self.fail(interrupt)
            self._end()
        if self._failure is not None:
            raise self._failure
        return [task.result for task in self._mains]

    def issue(self, group: SimulatedProcessGroup, call: str, **parts: Any) -> SimulatedWork:
        """Issue the running rank's next collective in this group. Other ranks may run before it returns."""
        rank = self._task(call).rank
        place = f"collective {group.num_issued} of the group {list(group.ranks)}"
        work = SimulatedWork(self, rank, place, call_site(), call, **parts)
        key = (group.ranks, group.index, group.num_issued)
        members = self._open.setdefault(key, {})
        members[group.rank()] = work
        group.num_issued += 1
        group.sent_bytes += work.sent_bytes
        if any(each.call != call for each in members.values()):
            self._mismatch(f"ranks disagree on {place}", members)
        elif len(members) == group.size():
            del self._open[key]
            self._pending.append(partial(self._carry_out, members))
        self.pause()
        return work

    def _mismatch(self, problem: str, members: dict[int, SimulatedWork]) -> None:
        self.fail(CollectiveMismatch("\n".join([problem, *_issuers(members)])))

    def _wait_for(self, future: torch.futures.Future[Any]) -> None:
        if threading.current_thread() is self._running:
            self.pause(future.done, "a future")

    def _later(self, function: Callable[[], object]) -> None:  # on a new thread, as the running rank
        self._pending.append(Task(self, self._task("a callback").rank, function))

    def _carry_out(self, members: dict[int, SimulatedWork]) -> None:
        works = [members[member] for member in range(len(members))]
        try:
            carry_out(works)
        except Exception as error:
            self._mismatch(f"{works[0].place}: {error}", members)
        for work in works:
            work.done = True
            if work.future is not None:
                done = partial(work.future.set_result, list(work.value))
                self._pending.append(Task(self, work.rank, done))

    def _task(self, what: str) -> Task:
        """Return the running task. Raises RuntimeError if the calling thread isn't it."""
        task = self._running
        if task is None or threading.current_thread() is not task:
            raise RuntimeError(f"{what}, on a thread that isn't a simulated rank's: run it with ranks='gloo'")
        return task

    def pause(self, until: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        """Let other tasks run. Return when `until()` holds and this task is scheduled again."""
        task = self._task("waiting for a collective")
        self._num_pauses += 1
        if until is not None:
            task.until, task.waits_for = until, f"{waits_for}\n{call_site()}"
        following = self._next(task)
        if following is not task:
            self._switch_to(following)
            task.may_run.acquire()
        task.until = None
        if self._failure is not None:
            raise _Stopped

    def fail(self, failure: BaseException) -> None:
        """End the run with this failure; an earlier one stands. Every task is unwound where it waits."""
        self._failure = self._failure or failure

    def finish(self, task: Task) -> None:
        """Switch from a task that has ended to the next one."""
        self._tasks.remove(task)
        self._switch_to(self._next())

    def _next(self, current: Task | None = None) -> Task | None:
        """Choose the task that runs next; None if all have ended."""
        while self._failure is None:
            ready = [task for task in self._tasks if task.until is None or task.until()]
            options = [*self._pending, *ready]
            if not options:
                if not self._tasks and not self._open:
                    return None
                self.fail(RankError(self._deadlock()))
                break
            chosen = options[0]
            if self._random is not None:
                chosen = self._random.choice(options)
            elif current in ready and not self._pending:
                return current
            if chosen in self._pending:
                self._pending.remove(chosen)
            if isinstance(chosen, Task):
                if chosen not in self._tasks:
                    self._tasks.append(chosen)
                return chosen
            chosen()
        # After a failure, resume the tasks that have begun, one by one, to unwind them.
        self._tasks = [task for task in self._tasks if task.ident is not None]
        return current if current in self._tasks else next(iter(self._tasks), None)

    def _switch_to(self, task: Task | None) -> None:
        self._running = task
        if task is None:
            self._over.set()
            return
        self._identity.become(task.rank)
        if task.ident is None:
            self._started.append(task)
            task.start()
        else:
            task.may_run.release()

    def _end(self) -> None:
        """End all threads. One that doesn't pause is interrupted.

        Python can't interrupt a thread that is blocked in C++: it stays as a daemon, and so do the others.
        """
        if not self._over.wait(1) and self._running is not None:
            thread = ctypes.c_ulong(self._running.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Stopped))
            self._over.wait(1)
        if self._over.is_set():
            for task in self._started:
                task.join()

    def _deadlock(self) -> str:
        lines = ["deadlock: no rank can go on" if self._tasks else "all ranks have returned, but"]
        for task in sorted(self._tasks, key=lambda task: task.rank):
            lines.append(f"rank {task.rank} waits for {task.waits_for}")
        for (ranks, *_), members in self._open.items():
            missing = ", ".join(str(rank) for member, rank in enumerate(ranks) if member not in members)
            place = next(iter(members.values())).place
            lines += [f"{place} was not issued by rank {missing}, but by", *_issuers(members)]
        return "\n".join(lines)


def _issuers(members: dict[int, SimulatedWork]) -> list[str]:
    return [f"  rank {work.rank}: {work.call}\n{work.site}" for _, work in sorted(members.items())]


def _new_group(options: Any, _: Any) -> dist.ProcessGroup:
    """Make the running rank's process group for dist.new_group."""
    world, ranks = dist.group.WORLD, tuple(options.global_ranks_in_group)
    assert isinstance(world, SimulatedProcessGroup)
    groups = world.simulation.worlds[world.rank()].groups
    index = 1 + sum(group.ranks == ranks for group in groups)
    groups.append(group := SimulatedProcessGroup(world.simulation, world.rank(), ranks, index))
    return group


dist.Backend.register_backend(c10d.BACKEND, _new_group, extended_api=True, devices=["cpu", "cuda"])
