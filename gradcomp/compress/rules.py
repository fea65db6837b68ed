"""What a value of an option, or of a checkpoint, has to be: in words for an error message, and as a test."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.


def plain(value: Any) -> Any:
    """Python's scalar for one of numpy's, which torch.load refuses; anything else as it is."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


@dataclass(frozen=True)
class Rule:
    """What a value has to be: in words for an error message, and as a test of a Python scalar.

    convert: to the one type in which the value is kept.
    """

    requirement: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value

    def __call__(self, name: str, value: Any) -> Any:
        """The value as it is kept. Raises ValueError, with the name, for one that isn't accepted."""
        value = plain(value)
        if not self.accepts(value):
            raise ValueError(f"{name} is {value!r}, but must be {self.requirement}")
        return self.convert(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def is_whole(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


FLAG = Rule("True or False", lambda value: type(value) is bool)
RANK = Rule("an int and at least 1", lambda value: type(value) is int and value >= 1)
RATE = Rule("a number of at least 0", lambda value: _is_number(value) and value >= 0, float)
EPSILON = Rule(
    "a finite number of at least 0", lambda value: _is_number(value) and 0 <= value < math.inf, float
)
COUNT = Rule("a whole number of at least 0", lambda value: is_whole(value) and value >= 0, int)
WHOLE = Rule("a whole number", is_whole, int)
SEED = Rule("an int between 0 and 2**32 - 1", lambda value: type(value) is int and 0 <= value < 2**32)
FREQUENCY = Rule("a whole number", is_whole, lambda value: max(1, int(value)))
