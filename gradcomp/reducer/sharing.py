"""Live Reducers that average the same parameters: they leave those gradients in memory of their own.

A gradient that is a view of one Reducer's bucket is changed there while that bucket is being averaged, before
another Reducer has read it.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from . import errors

_lock = threading.RLock()
_all: weakref.WeakSet[Sharing] = weakref.WeakSet()  # of the Reducers that are neither closed nor deleted


class Sharing:
    """Tells a Reducer which of its parameters other live Reducers average as well.

    Parameters are known by their indices. is_stepping: whether the Reducer is within a step.
    """

    def __init__(self, params: Sequence[torch.Tensor], names: Sequence[str], group: dist.ProcessGroup):
        self._names, self._group = names, group
        self._index_of = {id(param): index for index, param in enumerate(params)}
        self._others: list[tuple[weakref.ref[Sharing], set[int]]] = []
        self.is_stepping = False
        with _lock:
            is_shared = any(each._common(self) for each in _all)
        if is_shared:
            # A Reducer in a cycle of garbage ends here, not at another time on every rank: a collective that
            # only some ranks issue never completes.
            gc.collect()
        with _lock:
            self._others = [(weakref.ref(each), common) for each in _all if (common := self._common(each))]

    def open(self) -> None:
        """Begin sharing: the Reducer is constructed, and will average."""
        with _lock:
            for reference, _ in self._others:
                other = reference()
                if other is not None:
                    other._others.append((weakref.ref(self), other._common(self)))
            _all.add(self)

    @property
    def num_others(self) -> int:
        """The number of other live Reducers with parameters of this one."""
        return len(self._others)

    def indices(self) -> set[int]:
        """Return the parameters that other Reducers have, too, of those that are still live."""
        self._others = [(other, common) for other, common in self._others if other() in _all]
        return set().union(*(common for _, common in self._others))

    def require_same_ranks(self) -> None:
        """Raise RuntimeError if another Reducer is averaging one of the parameters over other ranks."""
        for reference, common in self._others:
            other = reference()
            if other is not None and other.is_stepping:
                theirs, ours = (dist.get_process_group_ranks(each._group) for each in (other, self))
                if sorted(theirs) != sorted(ours):
                    raise RuntimeError(errors.averaged_twice(self._names[min(common)], theirs, ours))

    def close(self) -> None:
        """End sharing: this Reducer averages nothing any more."""
        with _lock:
            _all.discard(self)

    def _common(self, other: Sharing) -> set[int]:
        """Return the indices here of the parameters that both have."""
        return {self._index_of[each] for each in self._index_of.keys() & other._index_of.keys()}
