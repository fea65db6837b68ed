"""What PowerSGD remembers of every bucket, and whose it is.

DDP arranges its buckets anew after a model's first step, and a resumed run starts with a new model: all its
gradients come in one bucket once, and then in the saved run's buckets. So a memory is kept for parameters, by
number, in the order in which DDP first showed them (the same in every run of a script):

    first step of a run      bucket 0: 0 1 2 3 4 5 6 7
    from then on             bucket 0: 7 6 5     bucket 1: 4 3 2     bucket 2: 1 0

A bucket with the parameters of several memories is worked on memory by memory, as if DDP had arranged it so. Where
it comes again in the next step (the run was resumed with larger buckets), the memories become one.
"""

import math
import weakref
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from gradcomp import ops
from gradcomp.layout import LowRankLayout

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.


@dataclass
class Memory:
    """One bucket's.

    kind: what its plan depends on, beside the shapes. shapes, numbers: of its parameters, in the bucket's order.
    plan: from the first compressed step on. saved: a checkpoint's "error" and "directions" for a plan yet to
    be made.
    """

    kind: dict[str, Any]
    shapes: list[tuple[int, ...]]
    numbers: list[int]
    parameters: list[weakref.ref[torch.Tensor]] | None = None
    plan: "ops.LowRankPlan | None" = None
    saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        kept = {"error": None, "directions": None} if self.saved is None else self.saved
        if self.plan is not None:
            kept = {"error": self.plan.error(), "directions": self.plan.directions()}
        return {
            "kind": dict(self.kind),
            "shapes": list(self.shapes),
            "parameters": list(self.numbers),
            **kept,
        }

    @property
    def is_empty(self) -> bool:
        return self.plan is None and self.saved is None

    @property
    def layout(self) -> LowRankLayout:
        if self.kind["square"]:
            return LowRankLayout.square(sum(map(math.prod, self.shapes)), self.kind["rank"])
        return LowRankLayout(self.shapes, self.kind["rank"], self.kind["min_compression_rate"])

    @property
    def number_at(self) -> dict[int, int]:
        """The number of the parameter that starts at a place of the bucket."""
        sizes = list(map(math.prod, self.shapes))
        starts = accumulate(sizes[:-1], initial=0)
        return {
            start: number for start, number, size in zip(starts, self.numbers, sizes, strict=True) if size
        }

    def take_over(self, others: Sequence["Memory"]) -> None:
        """What other memories, with the same parameters together, have. Square views' directions are lost."""
        errors: dict[int, torch.Tensor] = {}
        directions: dict[int, torch.Tensor] = {}
        for other in others:
            kept = other.state_dict()
            if kept["error"] is None:
                return
            parts = kept["error"].split(list(map(math.prod, other.shapes)))
            errors.update(zip(other.numbers, parts, strict=True))
            number_at = other.number_at
            for matrix, direction in zip(other.layout.matrices, kept["directions"], strict=True):
                directions[number_at[matrix.offset]] = direction
        number_at = self.number_at
        self.saved = {"error": torch.cat([errors[number] for number in self.numbers]), "directions": None}
        if not self.kind["square"]:
            self.saved["directions"] = [directions[number_at[m.offset]] for m in self.layout.matrices]


@dataclass
class Share:
    """The part of a bucket that belongs to the memory `index`; places: of its tensors, if not the whole bucket."""

    index: int
    memory: Memory
    places: list[slice] | None = None

    def gather(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer if self.places is None else torch.cat([buffer[place] for place in self.places])

    def scatter(self, flat: torch.Tensor, buffer: torch.Tensor) -> None:
        if self.places is not None:
            parts = flat.split([place.stop - place.start for place in self.places])
            for place, part in zip(self.places, parts, strict=True):
                buffer[place] = part


class BucketMemories:
    """The memories of all buckets of a model, by the index of the bucket."""

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}
        self._numbers: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()
        # Whether a loaded run's first step is over, in which buckets may still change.
        self._is_arranged = False

    def shares(self, bucket: dist.GradBucket, kind: dict[str, Any]) -> tuple[list[Share], dict[int, Memory]]:
        """(How to share the bucket out, memories that had to go because the layout has changed)."""
        index, parameters = bucket.index(), bucket.parameters()
        # DDP shows complex gradients as real ones.
        shapes = [(*each.shape, 2) if each.is_complex() else tuple(each.shape) for each in parameters]
        before = self._memories
        memory = before.get(index)
        if memory is None or not self._is_for(memory, kind, shapes, parameters):
            numbers = self._numbers_of(parameters)
            shares = self._of_checkpoint(kind, shapes, numbers)
            memory = Memory(kind, shapes, numbers, list(map(weakref.ref, parameters)))
            if shares and not self._is_arranged:
                self._is_arranged = bucket.is_last()
                return shares, {}
            if shares:
                memory.take_over([share.memory for share in shares])
                before = {i: old for i, old in before.items() if all(old is not s.memory for s in shares)}
        self._memories = {**before, index: memory}
        if bucket.is_last():
            self._memories = {i: kept for i, kept in self._memories.items() if i <= index}
        lost = {i: old for i, old in before.items() if self._memories.get(i) is not old and not old.is_empty}
        return [Share(index, memory)], lost

    def _is_for(
        self,
        memory: Memory,
        kind: dict[str, Any],
        shapes: list[tuple[int, ...]],
        parameters: Sequence[torch.Tensor],
    ) -> bool:
        if memory.kind != kind or memory.shapes != shapes:
            return False
        if memory.parameters is not None:
            pairs = zip(memory.parameters, parameters, strict=True)
            if all(ref() is parameter for ref, parameter in pairs):
                return True
            if not any(parameter in self._numbers for parameter in parameters):
                # Other tensors in the same places: a model made anew, or tensors that live for one step.
                self._numbers.update(zip(parameters, memory.numbers, strict=True))
        if self._numbers_of(parameters) != memory.numbers:
            return False
        memory.parameters = list(map(weakref.ref, parameters))
        return True

    def _numbers_of(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        new = [parameter for parameter in parameters if parameter not in self._numbers]
        if new:
            first = 1 + max(self._numbers.values(), default=-1)
            self._numbers.update(zip(new, range(first, first + len(new)), strict=True))
        return [self._numbers[parameter] for parameter in parameters]

    def _of_checkpoint(
        self, kind: dict[str, Any], shapes: list[tuple[int, ...]], numbers: list[int]
    ) -> list[Share]:
        """The loaded memories that a bucket with these parameters consists of; none if they aren't just these."""
        ends = list(accumulate(math.prod(shape) for shape in shapes))
        places = {
            number: (shape, slice(end - math.prod(shape), end))
            for number, shape, end in zip(numbers, shapes, ends, strict=True)
        }
        shares = []
        for index, memory in sorted(self._memories.items()):
            found = [places[number] for number in memory.numbers if number in places]
            if memory.parameters is None and memory.kind == kind and memory.shapes == [s for s, _ in found]:
                shares.append(Share(index, memory, [place for _, place in found]))
        covered = sorted(number for share in shares for number in share.memory.numbers)
        return shares if covered == sorted(numbers) else []

    def state_dict(self) -> dict[int, dict[str, Any]]:
        return {index: memory.state_dict() for index, memory in self._memories.items()}

    def load_state_dict(self, state_dict: dict[int, dict[str, Any]]) -> None:
        """Take the place of all memories. The parameters seen so far keep their numbers."""
        self._memories, self._is_arranged = {}, False
        for index, saved in state_dict.items():
            memory = Memory(dict(saved["kind"]), list(saved["shapes"]), list(saved["parameters"]))
            if saved["error"] is not None:
                memory.saved = {name: saved[name] for name in ("error", "directions")}
            self._memories[index] = memory
