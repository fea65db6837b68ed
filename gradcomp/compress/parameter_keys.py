"""The keys by which a state knows parameters, within a run and in checkpoints.

A parameter's key is its name if number_parameters has been called. Otherwise it is the place where a bucket
first brought it, "#3 of first bucket 1 (9f86d081)": the fourth parameter of the second bucket that brought
new parameters. The digest is of the shapes in this bucket and in those before it: if another run's first
buckets differ, its keys differ, too, and no parameter gets another one's errors.
"""

import gc
import hashlib
import re
from collections.abc import Iterable, MutableMapping, Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.bucket import named_tensors

Shape = tuple[int, ...]
# Wrappers add these parts to a parameter's name: the first two anywhere, DDP's part at the beginning.
_WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_checkpoint_wrapped_module)\.")
_DDP = "module."
_UNNAMED = "#"


def is_name(key: str) -> bool:
    """Return whether a parameter's key is its name."""
    return not key.startswith(_UNNAMED)


def without_wrappers(name: str) -> str:
    """Return a parameter's name without the parts that torch.compile and checkpoint_wrapper add."""
    return _WRAPPERS.sub("", name)


def draw_of(keys: Iterable[str]) -> int:
    """Return a 32-bit number that random choices for these parameters depend on, but not their order."""
    return int(hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()[:8], 16)


class ParameterKeys:
    """The keys of a state's parameters. No two living parameters have the same key."""

    def __init__(self) -> None:
        self._key_of: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
        self._first_buckets: list[str] = []  # their digests
        # The keys of parameters that live in this step; parameters may be deleted between steps.
        self.of_step: set[str] = set()

    def known(self) -> set[str]:
        """Return the keys of living parameters."""
        return set(self._key_of.values())

    def get(self, parameter: torch.Tensor) -> str | None:
        """Return a parameter's key; None without one."""
        return self._key_of.get(parameter)

    def name(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, str]]:
        """Give parameters their names as keys, without the parts that wrappers add.

        A name is not given twice: if another living tensor has it, that tensor's model shares the state.

        Returns the changed keys: pairs of (a parameter's key so far, its name).
        """
        pairs = named_tensors("number_parameters", named_parameters, needs_names=True)
        names = [without_wrappers(name) for name, _ in pairs]
        while names and all(name.startswith(_DDP) for name in names):
            names = [without_wrappers(name.removeprefix(_DDP)) for name in names]
        self.of_step.clear()
        taken = self._taken_of(names)
        changed = []
        for name, (_, parameter) in zip(names, pairs, strict=True):
            before = self._key_of.get(parameter)
            if name in taken or (before is not None and is_name(before)):
                continue
            if before is not None:
                changed.append((before, name))
            self._key_of[parameter] = name
            taken.add(name)
        return changed

    def keys_of(self, parameters: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> list[str]:
        """Return the keys of a bucket's parameters. New ones get theirs.

        shapes: the parameters' shapes in hooks.
        """
        new = [pair for pair in zip(parameters, shapes, strict=True) if pair[0] not in self._key_of]
        if new:
            keys = self._of_first_bucket([shape for _, shape in new])
            self._key_of.update(zip((parameter for parameter, _ in new), keys, strict=True))
        found = [self._key_of[parameter] for parameter in parameters]
        self.of_step.update(found)
        return found

    def _of_first_bucket(self, shapes: list[Shape]) -> list[str]:
        """Return the keys of new parameters: of deleted ones, if the program has rebuilt its model."""
        digest, number = "", 0
        while True:
            own = hashlib.sha256(f"{digest} {list(map(tuple, shapes))}".encode()).hexdigest()[:8]
            if number == len(self._first_buckets):
                self._first_buckets.append(own)
            digest = self._first_buckets[number]
            keys = [f"{_UNNAMED}{i} of first bucket {number} ({own})" for i in range(len(shapes))]
            if digest == own and not self._taken_of(keys):
                return keys
            number += 1

    def _taken_of(self, keys: Sequence[str]) -> set[str]:
        """Return those of the keys that living parameters have."""
        if not set(keys).intersection(self._key_of.values()) <= self.of_step:
            gc.collect()  # frees a deleted model that still has these keys, perhaps on some ranks only
            self.of_step = self.known()
        return set(keys).intersection(self._key_of.values())
