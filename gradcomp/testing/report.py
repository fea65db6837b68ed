"""The result of check_hook, as data and as a table, and the progress of a long check on a terminal."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from gradcomp.testing.claims import Claims
from gradcomp.testing.properties.failure import PropertyFailure
from gradcomp.testing.workload import Workload

__all__ = ["Failure", "Progress", "Report", "Verdict"]


class Progress:
    """A line on standard error if that is a terminal. It is cleared at the end of the `with` statement."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._is_shown = self._stream is not None and self._stream.isatty()
        self._width = 0

    def show(self, line: str) -> None:
        """Overwrite the last line with this one, cut to the terminal's width: a wrapped line would stay."""
        if not self._is_shown:
            return
        line = line[: shutil.get_terminal_size().columns - 1]
        self._stream.write(f"\r{line:<{self._width}}")
        self._stream.flush()
        self._width = len(line)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._width:
            self.show("")
            self.show("")  # back to the line's beginning


Outcome = Literal["holds", "fails", "not claimed", "not checked"]
OVERRIDE = (
    "If the hook does not claim this, say so: claims=dataclasses.replace(claims_of(hook, make_state), ...)"
)
# Of a longer message, which has a traceback in it, the first and last lines are shown.
LONGEST_MESSAGE = 14


@dataclass(frozen=True)
class Failure:
    """A property that fails for a hook, with the smallest workload found and the property's message."""

    property: str
    counterexample: Workload
    message: str

    def __str__(self) -> str:
        lines = [line for line in self.message.splitlines() if line.strip()]
        if len(lines) > LONGEST_MESSAGE:
            lines = [*lines[:2], "...", *lines[3 - LONGEST_MESSAGE :]]
        return "\n  ".join([f"{self.property} fails for", repr(self.counterexample), *lines])


@dataclass(frozen=True)
class Verdict:
    """The verdict on one property.

    measured: the worst value that it returned. note: the name of that value, or the reason why it wasn't
    checked.
    num_passed_over: the number of further examples in which the hook did not complete, or its averages were
    not finite.
    """

    outcome: Outcome
    measured: float | None = None
    num_examples: int = 0
    note: str = ""
    num_passed_over: int = 0

    def __str__(self) -> str:
        shown = self.note if self.measured is None else f"{self.note} {self.measured:.2g}"
        if self.num_passed_over:
            shown += f"{', ' if shown else ''}{self.num_passed_over} more passed over"
        return f"{self.outcome:<12}{self.num_examples or '':>8}  {shown}".rstrip()


@dataclass(frozen=True)
class Report:
    """The result of check_hook: verdicts by property. str() is their table, with the failures below."""

    hook: str
    claims: Claims | None
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if all properties that were checked hold."""
        return not self.failures

    def raise_if_failed(self) -> None:
        """Raise PropertyFailure with the report unless ok."""
        if not self.ok:
            raise PropertyFailure(f"\n{self}\n\n{OVERRIDE}")

    def __str__(self) -> str:
        width = max(map(len, self.verdicts), default=0)
        rows = [f"{name:<{width}}  {verdict}" for name, verdict in self.verdicts.items()]
        head = f"{self.hook}\n{'property':<{width}}  {'verdict':<12}{'examples':>8}  measured"
        return "\n".join([head, *rows, *(f"\n{failure}" for failure in self.failures)])
