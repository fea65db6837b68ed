"""The rules for values in options and checkpoints, each as a test and in words for an error message."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

import torch

from gradcomp.layout import MAX_BLOCK_SIZE


def plain(value: Any) -> Any:
    """Convert a numpy scalar to a Python scalar, because torch.load refuses numpy's. Keep other values."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def described(value: Any) -> str:
    """Describe an argument for a message: short, and without the values of tensors."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if value is None or isinstance(value, bool | int | float | str | type):
        return repr(value)[:100]
    return f"an object of type {type(value).__name__}"


@dataclass(frozen=True)
class Rule:
    """A requirement on a value.

    requirement: the requirement in words, for the error message "… must be <requirement>".
    accepts: the test of a Python scalar.
    convert: converts an accepted value to the type in which it is stored.
    """

    requirement: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value

    def __call__(self, name: str, value: Any) -> Any:
        """Return the value to store. Raises ValueError, with the name, for a value that isn't accepted."""
        value = plain(value)
        if not self.accepts(value):
            raise ValueError(f"{name} is {value!r}, but must be {self.requirement}")
        return self.convert(value)


def checked_field(default: Any, rule: Rule, *, is_compared: bool = True, called: str = "") -> Any:
    """Return a field of a frozen dataclass of options. `check_fields` checks the field's value by the rule.

    is_compared: False to ignore the field when options are compared by ==, or between ranks.
    called: the users' name of the option, for errors; by default the field's.
    """
    return field(default=default, compare=is_compared, metadata={"rule": rule, "called": called})


def check_fields(options: Any) -> None:
    """Check a frozen dataclass's fields by their rules, and store the values that the rules return.

    Call it in ``__post_init__``. Raises ValueError for a value that a rule refuses.
    """
    for each in fields(options):
        if "rule" in each.metadata:
            rule, name = each.metadata["rule"], each.metadata["called"] or each.name
            object.__setattr__(options, each.name, rule(name, getattr(options, each.name)))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def is_whole(value: Any) -> bool:
    """Return whether a value is an int, or a float without a fraction."""
    return type(value) is int or (type(value) is float and value.is_integer())


FLAG = Rule("True or False", lambda value: type(value) is bool)
FACTOR_DTYPE = Rule(
    "None, torch.bfloat16, torch.float16 or torch.int8",
    lambda value: value in (None, torch.bfloat16, torch.float16, torch.int8),
)
SIXTEEN_BITS = Rule(
    "None, torch.bfloat16 or torch.float16", lambda value: value in (None, torch.bfloat16, torch.float16)
)
BITS = Rule("4, 8 or 16", lambda value: type(value) is int and value in (4, 8, 16))
WEIGHT_BITS = Rule(
    "8; for 16 use torch's MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
    lambda value: type(value) is int and value == 8,
)
START_BITS = Rule("None, 4 or 8", lambda value: value is None or (type(value) is int and value in (4, 8)))
FEEDBACK = Rule("True, False or None", lambda value: value is None or type(value) is bool)
BLOCK_SIZE = Rule(
    f"an even number of elements from 2 to {MAX_BLOCK_SIZE}: longer blocks don't fit the kernels' registers, "
    "and would save less than 0.1 % of the bytes",
    lambda value: type(value) is int and 2 <= value <= MAX_BLOCK_SIZE and value % 2 == 0,
)
RANK = Rule("an int and at least 1", lambda value: type(value) is int and value >= 1)
RATE = Rule("a number of at least 0", lambda value: _is_number(value) and value >= 0, float)
EPSILON = Rule(
    "a finite number of at least 0", lambda value: _is_number(value) and 0 <= value < math.inf, float
)
SCALE = Rule("finite and positive", lambda value: _is_number(value) and 0 < value < math.inf, float)
COUNT = Rule("a whole number of at least 0", lambda value: is_whole(value) and value >= 0, int)
WHOLE = Rule("a whole number", is_whole, int)
SEED = Rule("an int between 0 and 2**32 - 1", lambda value: type(value) is int and 0 <= value < 2**32)
FREQUENCY = Rule("a whole number", is_whole, lambda value: max(1, int(value)))
