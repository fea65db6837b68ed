"""The integer and predicate arithmetic of PTX, on Python's integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KINDS = ("b", "u", "s", "f", "bf", "f16x", "bf16x")
_WIDTHS = {kind + bits: int(bits) for kind in _KINDS for bits in ("2", "8", "16", "32", "64")}


def compute(name: str, types: tuple[str, ...], values: list[Any]) -> Any:
    """Return an integer or predicate operation's result; None for one that is not of integers."""
    kind = types[-1] if types else ""
    if name == "cvt":
        kind = types[-2] if len(types) > 1 else kind
        source = types[-1]
        if source.startswith(("f", "bf")) or kind.startswith(("f", "bf")):
            return None
        return wrap(wrap(values[0], source), kind)
    if name in ("mul", "mad") and "wide" in types:
        product = wrap(values[0], kind) * wrap(values[1], kind)
        return product + (values[2] if name == "mad" else 0)
    if name in ("setp", "set"):
        a, b = (wrap(value, kind) for value in values[:2])
        compare: Mapping[str, bool] = {
            "eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b,
        }  # fmt: skip
        return compare.get(types[0])
    a = wrap(values[0], kind)
    b = wrap(values[1], kind) if len(values) > 1 else 0
    bits = width_of(kind)
    if name == "mul" and "hi" in types:
        return wrap((a * b) >> bits, kind)
    if name == "shr":
        return wrap((a if kind.startswith("s") else a & ((1 << bits) - 1)) >> min(values[1], bits), kind)
    operations = {
        "mov": lambda: a, "add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b,
        "mad": lambda: a * b + wrap(values[2], kind), "and": lambda: a & b, "or": lambda: a | b,
        "xor": lambda: a ^ b, "not": lambda: (not a) if kind == "pred" else ~a,
        "shl": lambda: a << min(values[1], bits),
        "min": lambda: min(a, b), "max": lambda: max(a, b), "neg": lambda: -a, "abs": lambda: abs(a),
        "div": lambda: int(a / b) if b else None, "rem": lambda: a - int(a / b) * b if b else None,
        "bfe": lambda: (a >> b) & ((1 << values[2]) - 1),
    }  # fmt: skip
    result = operations.get(name, lambda: None)()
    return None if result is None else bool(result) if kind == "pred" else wrap(result, kind)


def width_of(kind: str) -> int:
    """Return the bits of a type."""
    return _WIDTHS.get(kind, 64)


def wrap(value: Any, kind: str) -> Any:
    """Return the value as an integer of this type, signed unless the type is unsigned."""
    if kind == "pred":
        return bool(value)
    bits = width_of(kind)
    value = int(value) & ((1 << bits) - 1)
    return value if kind.startswith("u") or value < 1 << (bits - 1) else value - (1 << bits)
