"""Find the line of a program that issued a collective."""

from __future__ import annotations

import linecache
import sys
import threading
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

_GRADCOMP, _TORCH = Path(__file__).parents[2], Path(torch.__file__).parent

# Pairs of a function's code and a line number, innermost first.
CallSite = tuple[tuple[CodeType, int], ...]


@cache
def _owner(filename: str) -> str:
    """Classify a file as "plumbing" (between a collective's caller and this module), "library" or "user"."""
    path = Path(filename)
    if path.is_relative_to(_GRADCOMP / "testing") or filename == threading.__file__:
        return "plumbing"
    if path.is_relative_to(_TORCH):
        return "library" if path.is_relative_to(_TORCH / "distributed" / "algorithms") else "plumbing"
    return "library" if path.is_relative_to(_GRADCOMP) else "user"


def call_site() -> CallSite:
    """Find the calling line and, if that is in gradcomp or torch's hooks, the user's line that led to it."""
    lines: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = _owner(frame.f_code.co_filename)
        if owner == "user" or (owner == "library" and not lines):
            lines.append((frame.f_code, frame.f_lineno))
        if owner == "user":
            break
        frame = frame.f_back
    return tuple(lines)


def shown(site: CallSite, indent: str = "    ") -> str:
    """Format the call site as text, one line per line of code: file:line, function and source."""
    return "\n".join(
        f"{indent}{code.co_filename}:{line} in {code.co_name}: "
        f"{linecache.getline(code.co_filename, line).strip()}"
        for code, line in site
    )
