"""What the commands share: a parser, types of arguments, a user's callables, times and tables as text."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .hooks.named_hooks import NamedHook


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports an error in one line, then exits with status 2. Its help texts are aligned."""

    def __init__(self, **options: Any):
        aligned_help = partial(argparse.HelpFormatter, max_help_position=28)
        super().__init__(**{"formatter_class": aligned_help, **options})

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _number(accepts: Callable[[float], bool], described: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (accepts(value) and value < float("inf")):
            raise argparse.ArgumentTypeError(f"{text!r} is not {described}")
        return value

    return parse


positive = _number(lambda value: value > 0, "a number above 0")
not_negative = _number(lambda value: value >= 0, "a number of at least 0")


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def bytes_per_s(text: str) -> float:
    """Parse a bandwidth such as 200Mbit, 2.5Gbit/s, 10Gbps or 450GB/s, for argparse. A capital B is bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgG])([bB][iI][tT]|b|B)(?:/[sS]|ps)?", text.strip())
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a bandwidth; write it as 200Mbit or 10Gbit")
    bits = 8 if found[3] == "B" else 1
    return float(found[1]) * bits * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2].lower()] / 8


def hooks_named(text: str) -> tuple[NamedHook, ...]:
    """Parse names of hooks, separated by commas. "none" always comes first: all are compared with it."""
    try:
        named = [NamedHook.named(name.strip()) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return tuple(dict.fromkeys([NamedHook.named("none"), *named]))


def find_callable(name: str, what: str) -> Callable[..., Any]:
    """Return the callable of `module:callable`. Raises ValueError if there is none.

    what: the callable's purpose in one word, for messages.
    """
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} {name!r}: module {module!r} fails: {in_words(error)}") from error
    function: Any = getattr(found, attribute, None)
    if not callable(function):
        problem = "not callable" if hasattr(found, attribute) else "not there"
        raise ValueError(f"{what} {name!r}: {attribute!r} of module {module!r} is {problem}")
    return function  # type: ignore[no-any-return]


def in_words(error: BaseException) -> str:
    """Return an error's class and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def shown_seconds(value: float) -> str:
    """Return a time with its unit, in three digits."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (10, 1e3, "ms")):
        if value < limit:
            return f"{value * factor:.{1 if value * factor < 99.95 else 0}f} {unit}"
    return f"{value:.1f} s"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines. The first and last columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *middle, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, last]).rstrip())
    return lines
