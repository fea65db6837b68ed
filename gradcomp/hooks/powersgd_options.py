"""PowerSGD's options: their names, what each accepts, and what has to hold between them.

The constructor, assignments to a state's attributes, checkpoints and the comparison between ranks all go by these tables.
"""

import math
from collections.abc import Callable, Mapping
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


def _is_whole(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


FLAG = Rule("True or False", lambda value: type(value) is bool)
RANK = Rule("an int and at least 1", lambda value: type(value) is int and value >= 1)
RATE = Rule("a number of at least 0", lambda value: _is_number(value) and value >= 0, float)
EPSILON = Rule(
    "a finite number of at least 0", lambda value: _is_number(value) and 0 <= value < math.inf, float
)
COUNT = Rule("a whole number of at least 0", lambda value: _is_whole(value) and value >= 0, int)

OPTIONS = {
    "matrix_approximation_rank": RANK,
    "start_powerSGD_iter": Rule("a whole number", _is_whole, int),
    "min_compression_rate": RATE,
    "use_error_feedback": FLAG,
    "warm_start": FLAG,
    "orthogonalization_epsilon": EPSILON,
    "random_seed": Rule(
        "an int between 0 and 2**32 - 1", lambda value: type(value) is int and 0 <= value < 2**32
    ),
    "compression_stats_logging_frequency": Rule(
        "a whole number", _is_whole, lambda value: max(1, int(value))
    ),
    "batch_tensors_with_same_shape": FLAG,
}
PROGRESS = dict.fromkeys(
    ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report"), COUNT
)


def checked_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """All options from a mapping that has them, as they are kept. Raises ValueError for one that isn't accepted."""
    checked = {name: rule(name, values[name]) for name, rule in OPTIONS.items()}
    start = checked["start_powerSGD_iter"]
    if (checked["use_error_feedback"] or checked["warm_start"]) and start <= 1:
        raise ValueError(
            "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
            "because PowerSGD can only be applied after the first two iterations in DDP. "
            f"Got {start}."
        )
    return checked


def options_of(state: Any) -> dict[str, Any]:
    """A state's options by name, in the order of the table."""
    return {name: getattr(state, name) for name in OPTIONS}


def progress_of(state: Any) -> dict[str, int]:
    """How far a state has come: its step, and what it has counted."""
    return {name: getattr(state, name) for name in PROGRESS}
