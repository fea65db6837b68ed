"""The providers of a case each in a process of its own: for whole hooks on CPU.

Hooks that compute in callbacks compute on gloo's threads, and libgomp gives every thread that computes a team of
threads. Once a process has more of these than there are CPUs, they no longer spin while they wait for work (100
times instead of 300,000, says libgomp's manual of GOMP_SPINCOUNT), and everything in that process takes longer,
whoever computes. No training runs two hooks, so none should pay for the threads of another.

The processes take turns: while one computes, the others wait for a question.
"""

from __future__ import annotations

import multiprocessing
import traceback
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.clock import WARM_UP_CALLS, Clock, Timing, quantiles
from benchmarks.harness import Case, check

# For the longest answer: building a case and checking it.
TIMEOUT_S = 300

# What starts the processes has imported what they need.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.powersgd", "benchmarks.reducer"])


def measure(case: Case, clock: Clock) -> tuple[dict[str, float], dict[str, Timing], dict[str, int | None]]:
    """Every provider's error, its times, and what it launches."""
    with ExitStack() as stack:
        workers = {name: stack.enter_context(_Worker(case, name)) for name in case.apart}
        errors = {name: worker.ask("error") for name, worker in workers.items()}
        for worker in workers.values():
            for _ in range(WARM_UP_CALLS):
                worker.ask("sample")
        samples = clock.take_turns({name: worker.sample for name, worker in workers.items()}, case.seconds)
        launches = {name: worker.ask("launches") for name, worker in workers.items()}
    return errors, {name: quantiles(each) for name, each in samples.items()}, launches


class _Worker:
    """A provider in a process of its own."""

    def __init__(self, case: Case, name: str):
        self._name = name
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=_answer, args=(case, name, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, question: str) -> Any:
        """Raises RuntimeError if the process fails, ends or says nothing for TIMEOUT_S."""
        with suppress(OSError):  # it may have ended, and have said why
            self._connection.send(question)
        try:
            said = self._connection.poll(TIMEOUT_S)
            answer = self._connection.recv() if said else f"said nothing for {TIMEOUT_S} s"
        except (EOFError, OSError):
            self._process.join(TIMEOUT_S)
            answer = f"ended with exit status {self._process.exitcode}"
        if isinstance(answer, str):
            raise RuntimeError(f"{self._name}'s process, asked for its {question}: {answer}")
        return answer

    def sample(self) -> float:
        sample: float = self.ask("sample")
        return sample

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        # Not asked to leave: with torch's hooks, leaving a process group of gloo's can abort.
        self._process.kill()
        self._process.join()
        self._connection.close()


def _answer(case: Case, name: str, connection: Connection) -> None:
    """Answer questions on a provider; with a text, if it fails."""
    try:
        torch.manual_seed(0)
        clock, setup = Clock(torch.device("cpu")), case.build()
        provider = setup.providers[name]
        setup.providers = {name: provider}
        count = setup.num_launches
        answers = {
            "error": lambda: check(case, setup)[name],
            "sample": lambda: clock.sample_us(provider),
            "launches": lambda: None if count is None else count(provider),
        }
        while True:
            connection.send(answers[connection.recv()]())
    except EOFError:  # nobody asks any more
        pass
    except Exception:
        connection.send(traceback.format_exc())
