"""How much tests try: every day a part, and everything with HYPOTHESIS_PROFILE=deep, as a nightly run does.

PROFILE is also the name of Hypothesis' profile; see conftest.py.
"""

import os
from collections.abc import Sequence
from itertools import chain, combinations, product
from typing import Any, TypeVar

PROFILE = os.environ.get("HYPOTHESIS_PROFILE") or "everyday"
if PROFILE not in ("everyday", "deep"):
    raise ValueError(f"HYPOTHESIS_PROFILE is {PROFILE}, but must be everyday or deep")
IS_DEEP = PROFILE == "deep"

_T = TypeVar("_T")


def everyday(part: _T, deep: _T) -> _T:
    """Return the first argument every day, and the second one deep."""
    return deep if IS_DEEP else part


def mixed(*lists: Sequence[Any], together: int = 1) -> list[tuple[Any, ...]]:
    """Return combinations of one element from each list: deep, all of them; every day, a few.

    Every day each element occurs in some combination. together=2: each pair of elements of two lists does.
    """
    assert all(lists), "without elements there is no combination"
    everything = list(product(*lists))
    if IS_DEEP:
        return everything

    def groups(combination: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return set(combinations(enumerate(combination), together))

    indices = list(product(*(range(len(each)) for each in lists)))
    missing = set(chain.from_iterable(map(groups, indices)))
    chosen = []
    while missing:
        # Ties go to the combination of which the chosen ones share the least.
        best = max(indices, key=lambda each: (len(groups(each) & missing), -_overlap(each, chosen)))
        chosen.append(best)
        missing -= groups(best)
    return [tuple(each[i] for each, i in zip(lists, index, strict=True)) for index in sorted(chosen)]


def _overlap(combination: tuple[int, ...], chosen: Sequence[tuple[int, ...]]) -> int:
    return sum(a == b for other in chosen for a, b in zip(combination, other, strict=True))
