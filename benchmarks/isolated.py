"""Run each provider of a case in a process of its own, as whole hooks need on CPU.

Hooks that compute in callbacks compute on gloo's threads, and libgomp gives every computing thread a team of
threads. If a process has more team threads than the machine has CPUs, the team threads no longer spin while
they wait for work (100 times instead of 300,000, see GOMP_SPINCOUNT in libgomp's manual). Then every
computation in the process takes longer. Training runs one hook, so a hook shouldn't pay for another's
threads.

The processes take turns: while one computes, the others wait for a question. A turn is several calls in
succession, as in training. The first call is not timed: after the others' turns it takes up to twice as long.
After some turns new processes replace the old ones: a call's time differs between processes, by some percent,
or more with torch's PowerSGD hook.
"""

from __future__ import annotations

import multiprocessing
import statistics
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.clock import Clock, Timing
from benchmarks.harness import Case, check

# For the longest answer: building a case and checking it.
TIMEOUT_S = 300
TIMED_CALLS_PER_TURN = 5
NUM_PROCESSES = 3  # of each provider, one after another

# The fork server imports what the processes need once, before it starts them.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["benchmarks.powersgd_hooks", "benchmarks.quantized_hooks", "benchmarks.reducer"]
)


def measure(case: Case, clock: Clock) -> tuple[dict[str, float], dict[str, Timing], dict[str, int | None]]:
    """Measure every provider's error, its times, and the number of its launches."""
    samples_us: dict[str, list[float]] = {name: [] for name in case.isolated}
    num_processes = 1 if clock.quick else NUM_PROCESSES
    for _ in range(num_processes):
        with ExitStack() as stack:
            workers = {name: stack.enter_context(_Worker(case, name)) for name in case.isolated}
            errors = {name: worker.ask("error") for name, worker in workers.items()}
            for worker in workers.values():
                worker.turn()
            turns = {name: worker.turn for name, worker in workers.items()}
            factor = TIMED_CALLS_PER_TURN / num_processes
            for name, samples in clock.interleave(turns, case.seconds, factor).items():
                samples_us[name] += samples
            launches = {name: worker.ask("launches") for name, worker in workers.items()}
    return errors, {name: Timing(each) for name, each in samples_us.items()}, launches


class _Worker:
    """A provider in a process of its own."""

    def __init__(self, case: Case, name: str):
        self._name = name
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=_answer, args=(case, name, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, question: str) -> Any:
        """Ask a question. Raises RuntimeError if the process fails, ends or exceeds TIMEOUT_S."""
        with suppress(OSError):  # the process may have ended, and have sent the reason
            self._connection.send(question)
        try:
            has_answered = self._connection.poll(TIMEOUT_S)
            answer = self._connection.recv() if has_answered else f"said nothing for {TIMEOUT_S} s"
        except (EOFError, OSError):
            self._process.join(TIMEOUT_S)
            answer = f"ended with exit status {self._process.exitcode}"
        if isinstance(answer, str):
            raise RuntimeError(f"{self._name}'s process, asked for its {question}: {answer}")
        return answer

    def turn(self) -> float:
        """Time a turn, and return the median of its calls' times in µs."""
        median_us: float = self.ask("turn")
        return median_us

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        # Killed, not asked to leave: with torch's hooks, leaving a process group of gloo's can abort.
        self._process.kill()
        self._process.join()
        self._connection.close()


def _answer(case: Case, name: str, connection: Connection) -> None:
    """Answer questions about a provider. If the provider fails, every answer is a traceback."""
    try:
        torch.manual_seed(0)
        clock, setup = Clock(torch.device("cpu")), case.build()
        provider = setup.providers[name]
        setup.providers = {name: provider}
        count = setup.num_launches
        answers = {
            "error": lambda: check(case, setup)[name],
            "turn": lambda: _turn_us(clock, provider),
            "launches": lambda: None if count is None else count(provider),
        }
        while True:
            connection.send(answers[connection.recv()]())
    except EOFError:  # the other end is closed
        pass
    except Exception:
        connection.send(traceback.format_exc())


def _turn_us(clock: Clock, call: Callable[[], object]) -> float:
    call()
    return statistics.median(clock.sample_us(call) for _ in range(TIMED_CALLS_PER_TURN))
