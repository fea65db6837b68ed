"""The progress of a long check: a line on a terminal, overwritten with every example, cleared at the end."""

from __future__ import annotations

import shutil
import sys
from types import TracebackType

__all__ = ["Progress"]


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
