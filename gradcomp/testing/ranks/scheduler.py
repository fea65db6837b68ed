"""A cooperative scheduler of threads: one integer, the schedule, determines the order in which they run.

One thread runs at a time, until it calls `pause`. Then the scheduler chooses a ready task or a pending action
to run next. Schedule 0 chooses the oldest pending action; without one, the current task until it waits. Any
other schedule is the seed of a random choice among all ready tasks and pending actions.
"""

from __future__ import annotations

import ctypes
import linecache
import random
import sys
import threading
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType

import torch


class RankError(AssertionError):
    """A rank raised, died, or waits for ever. The message has the rank, the line and the traceback."""


class CollectiveMismatch(RankError):  # noqa: N818 its name says what went wrong
    """The ranks disagree on a collective. The message has each rank's call, and the line that made it."""


_GRADCOMP, _TORCH = Path(__file__).parents[2], Path(torch.__file__).parent

# Pairs of a function's code and a line number, innermost first.
CallSite = tuple[tuple[CodeType, int], ...]


@cache
def _owner(filename: str) -> str:
    """Classify a file as "user", "library" (gradcomp, torch's hooks), or "plumbing" between them and here."""
    path = Path(filename)
    if path.is_relative_to(_GRADCOMP / "testing") or filename == threading.__file__:
        return "plumbing"
    if path.is_relative_to(_TORCH):
        return "library" if path.is_relative_to(_TORCH / "distributed" / "algorithms") else "plumbing"
    return "library" if path.is_relative_to(_GRADCOMP) else "user"


def call_site() -> CallSite:
    """Find the calling line and, if it is in gradcomp or torch's hooks, the user's line that led to it."""
    lines: list[tuple[CodeType, int]] = []
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        owner = _owner(frame.f_code.co_filename)
        if owner == "user" or (owner == "library" and not lines):
            lines.append((frame.f_code, line))
        if owner == "user":
            break
    return tuple(lines)


def shown(site: CallSite) -> str:
    """Format the call site as text, one line per line of code: file:line, function and source."""
    return "\n".join(
        f"    {code.co_filename}:{line} in {code.co_name}: "
        f"{linecache.getline(code.co_filename, line).strip()}"
        for code, line in site
    )


class _Stopped(BaseException):
    """The exception that unwinds a task when the run is over."""


class Task(threading.Thread):
    """A function that runs as one rank on its own thread: the rank's main function, or a callback.

    until: while the task waits, the condition for which it waits.
    waits_for: the object for which it waits, as messages name it.
    site: the line at which it waits.
    result: the function's.
    """

    def __init__(self, scheduler: Scheduler, rank: int, function: Callable[[], object]) -> None:
        super().__init__(name=f"simulated rank {rank}", daemon=True)
        self._scheduler, self._function = scheduler, function
        self.rank = rank
        self.until: Callable[[], bool] | None = None
        self.waits_for: object = None
        self.site: CallSite = ()
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
            self._scheduler.fail(RankError(text))
        self._scheduler.finish(self)


Action = Callable[[], Task | None]


class Scheduler:
    """The scheduler of one run.

    become: called with a task's rank before the task runs.
    unfinished: describes incomplete operations, in lines of text.
    """

    def __init__(self, schedule: int, become: Callable[[int], None], unfinished: Callable[[], list[str]]):
        self._random = random.Random(schedule) if schedule else None
        self._become, self._unfinished = become, unfinished
        self._tasks: list[Task] = []
        self._pending: list[Action] = []
        self._running: Task | None = None
        self._started: list[Task] = []
        self._failure: BaseException | None = None
        self._over = threading.Event()

    def run(self, timeout_s: float) -> None:
        """Run until every task has ended, and leave no thread behind.

        Raises the error of the first task that failed, or RankError for a deadlock or after timeout_s.
        """
        try:
            self._switch_to(self._next())
            if not self._over.wait(timeout_s):
                self.fail(RankError(f"the ranks were not done after {timeout_s} s\n{self._stacks()}"))
        except BaseException as interrupt:
            self.fail(interrupt)
        self._end()
        if self._failure is not None:
            raise self._failure

    def add(self, rank: int, function: Callable[[], object]) -> Task:
        """Add a task, which may be scheduled from now on."""
        self._tasks.append(Task(self, rank, function))
        return self._tasks[-1]

    def add_pending(self, action: Action) -> None:
        """Add an action. A pausing thread may run it; if it returns a task, that runs next."""
        self._pending.append(action)

    def running(self) -> Task | None:
        """Return the task of the calling thread, or None if it has none."""
        return self._running if threading.current_thread() is self._running else None

    def pause(self, until: Callable[[], bool] | None = None, waits_for: object = None) -> None:
        """Let other tasks run. Return when `until()` holds and this task is scheduled again."""
        task = self._running
        assert task is not None
        if until is not None:
            task.until, task.waits_for, task.site = until, waits_for, call_site()
        following = self._next(task)
        if following is not task:
            self._switch_to(following)
            task.may_run.acquire()
        task.until = None
        if self._failure is not None:
            raise _Stopped

    def fail(self, failure: BaseException) -> None:
        """End the run with this failure; an earlier one stands. Every task is unwound where it waits."""
        if self._failure is None:
            self._failure = failure

    def finish(self, task: Task) -> None:
        """Switch from a task that has ended to the next one."""
        self._tasks.remove(task)
        self._switch_to(self._next())

    def _next(self, current: Task | None = None) -> Task | None:
        """Choose the task that runs next; None if all have ended."""
        while self._failure is None:
            ready = [task for task in self._tasks if task.until is None or task.until()]
            options: list[Task | Action] = [*self._pending, *ready]
            if not options:
                if not self._tasks and not self._unfinished():
                    return None
                self.fail(RankError(self._deadlock()))
                break
            chosen = options[0]
            if self._random is not None:
                chosen = self._random.choice(options)
            elif current in ready and not self._pending:
                return current
            if isinstance(chosen, Task):
                return chosen
            self._pending.remove(chosen)
            if (task := chosen()) is not None:
                return task
        # After a failure, resume the tasks that have begun, one by one, to unwind them.
        self._tasks = [task for task in self._tasks if task.ident is not None]
        return current if current in self._tasks else next(iter(self._tasks), None)

    def _switch_to(self, task: Task | None) -> None:
        self._running = task
        if task is None:
            self._over.set()
            return
        self._become(task.rank)
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
        waiting = [
            f"rank {task.rank} waits for {task.waits_for}\n{shown(task.site)}"
            for task in sorted(self._tasks, key=lambda task: task.rank)
        ]
        first = "deadlock: no rank can go on" if waiting else "all ranks have returned, but"
        return "\n".join([first, *waiting, *self._unfinished()])

    def _stacks(self) -> str:
        frames = sys._current_frames()
        return "\n".join(
            f"rank {task.rank}:\n{''.join(traceback.format_stack(frames[task.ident or 0]))}"
            for task in list(self._tasks)
            if task.ident in frames
        )
