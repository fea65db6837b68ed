"""How a state identifies a parameter, within a run and in a checkpoint.

Within a run a parameter has an index. A checkpoint says which parameter an index stands for:

    by its name           if number_parameters has been called
    by its first bucket   otherwise: the n-th bucket that brought new parameters, and their shapes in it

First buckets are checked: if a resumed run's first bucket has other shapes, the order of parameters has
changed, and the checkpoint's indices from that bucket on are not used.
"""

import gc
import re
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

Shape = tuple[int, ...]
# Wrappers add these parts to a parameter's name: the first two anywhere, DDP's part at the beginning.
_WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_checkpoint_wrapped_module)\.")
_DDP = "module."


@dataclass
class FirstBucket:
    """The indices and shapes of the unnamed parameters that one bucket was the first to bring."""

    indices: list[int]
    shapes: list[Shape]


class ParameterIdentity:
    """The indices of a state's parameters, and their names or first buckets, which other runs share."""

    def __init__(self) -> None:
        self._index_of: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()
        self._name_of: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
        self._index_of_name: dict[str, int] = {}
        self._first_buckets: list[FirstBucket] = []
        # A checkpoint's first buckets that no bucket of this run has matched yet.
        self._awaited: list[FirstBucket] = []
        self._next_index = 0

    def name(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give parameters their names, without the parts that wrappers add.

        A name is not given twice: if another living tensor has it, that tensor's model shares the state.

        Raises TypeError for anything but pairs of a name and a tensor; ValueError if a checkpoint has these
        names, but buckets have brought the parameters already.
        """
        pairs = [_pair(each) for each in named_parameters]
        names = [_WRAPPERS.sub("", name) for name, _ in pairs]
        while names and all(name.startswith(_DDP) for name in names):
            names = [_WRAPPERS.sub("", name.removeprefix(_DDP)) for name in names]
        if not set(names).isdisjoint(self._name_of.values()):
            gc.collect()  # frees a deleted model that still has these names, perhaps on some ranks only
        owners = {name: parameter for parameter, name in self._name_of.items()}
        for name, (_, parameter) in zip(names, pairs, strict=True):
            if owners.setdefault(name, parameter) is not parameter or parameter in self._name_of:
                continue
            index = self._index_of.get(parameter)
            if index is not None and self._index_of_name.setdefault(name, index) != index:
                raise ValueError(
                    f"a bucket has brought {name} already, without its name, and the checkpoint has a memory "
                    "of that name: call number_parameters before the first step"
                )
            self._name_of[parameter] = name

    def share_names(self, other: "ParameterIdentity") -> None:
        """Copy the names of living parameters from another identity."""
        self._name_of.update(other._name_of.items())

    @property
    def knows_any(self) -> bool:
        """True if a living parameter has an index or a name."""
        return bool(self._index_of) or bool(self._name_of)

    def index(self, parameter: torch.Tensor) -> int | None:
        """Return a parameter's index; None if no bucket has brought it."""
        return self._index_of.get(parameter)

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """Return a parameter's name; None without one."""
        return self._name_of.get(parameter)

    def are_new(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether none of these parameters has an index or a name."""
        return not any(each in self._index_of or each in self._name_of for each in parameters)

    def bind(self, parameters: Sequence[torch.Tensor], indices: Sequence[int]) -> None:
        """Give parameters the indices of deleted parameters."""
        self._index_of.update(zip(parameters, indices, strict=True))

    def indices_of(
        self, parameters: Sequence[torch.Tensor], shapes: Sequence[Shape]
    ) -> tuple[list[int], set[int]]:
        """Return (indices of a bucket's parameters, checkpoint's indices that turn out not to fit)."""
        unnamed: list[tuple[torch.Tensor, Shape]] = []
        for parameter, shape in zip(parameters, shapes, strict=True):
            if parameter in self._index_of:
                continue
            name = self._name_of.get(parameter)
            if name is None:
                unnamed.append((parameter, shape))
            else:
                index = self._index_of_name.setdefault(name, self._next_index)
                self._index_of[parameter] = index
                self._next_index = max(self._next_index, index + 1)
        unfit = self._add_first_bucket(unnamed) if unnamed else set()
        return [self._index_of[parameter] for parameter in parameters], unfit

    def _add_first_bucket(self, unnamed: list[tuple[torch.Tensor, Shape]]) -> set[int]:
        """Give new unnamed parameters their indices. Returns the checkpoint's indices that don't fit."""
        shapes = [shape for _, shape in unnamed]
        unfit: set[int] = set()
        if self._awaited and self._awaited[0].shapes == shapes:
            bucket = self._awaited.pop(0)
        else:
            unfit = {index for each in self._awaited for index in each.indices}
            self._awaited = []
            first, self._next_index = self._next_index, self._next_index + len(unnamed)
            bucket = FirstBucket(list(range(first, self._next_index)), shapes)
        self._first_buckets.append(bucket)
        self._index_of.update(zip((each for each, _ in unnamed), bucket.indices, strict=True))
        return unfit

    def of(self, indices: Iterable[int]) -> dict[str, Any]:
        """Return the "names" and "first_buckets" of these indices for a checkpoint, in plain types."""
        chosen = set(indices)
        names = {index: name for name, index in self._index_of_name.items() if index in chosen}
        buckets = []
        for each in (*self._first_buckets, *self._awaited):
            pairs = zip(each.indices, each.shapes, strict=True)
            kept = [pair for pair in pairs if pair[0] in chosen and pair[0] not in names]
            if kept:
                buckets.append({"parameters": [index for index, _ in kept], "shapes": [s for _, s in kept]})
        # A tuple, because torch.distributed.checkpoint splits lists.
        return {"names": dict(sorted(names.items())), "first_buckets": tuple(buckets)}

    def load(self, saved: dict[str, Any]) -> None:
        """Replace all indices by a checkpoint's.

        Living parameters without a name get the checkpoint's indices if all first buckets have the
        checkpoint's shapes. Otherwise they lose their index until a bucket brings them again.
        """
        loaded = [
            FirstBucket(list(each["parameters"]), list(each["shapes"])) for each in saved["first_buckets"]
        ]
        alive = dict(self._index_of.items())
        mine = [each for each in self._first_buckets if set(each.indices) & set(alive.values())]
        self._index_of_name = {name: index for index, name in saved["names"].items()}
        self._next_index = 1 + max(
            [*saved["names"], *(i for each in loaded for i in each.indices)], default=-1
        )
        self._index_of.clear()
        self._first_buckets, self._awaited = [], loaded
        if mine and [each.shapes for each in mine] == [each.shapes for each in loaded]:
            self._first_buckets, self._awaited = loaded, []
            now = {
                old: new
                for before, after in zip(mine, loaded, strict=True)
                for old, new in zip(before.indices, after.indices, strict=True)
            }
            self._index_of.update({each: now[index] for each, index in alive.items() if index in now})


def _pair(given: Any) -> tuple[str, torch.Tensor]:
    """Return a name and its tensor. Raises TypeError for anything else."""
    if isinstance(given, tuple) and len(given) == 2:
        name, parameter = given
        if isinstance(name, str) and isinstance(parameter, torch.Tensor):
            return name, parameter
    raise TypeError(
        f"number_parameters takes model.named_parameters(), pairs of a name and a tensor, got "
        f"{type(given).__name__}"
    )
