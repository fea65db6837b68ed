"""What PowerSGD remembers of every bucket, and whose it is.

DDP arranges its buckets anew after a model's first step, and a resumed run starts with a new model: all its gradients come
in one bucket once, and then in the saved run's buckets. So a memory belongs to parameters, by number, in the order in which
DDP first showed them (the same in every run of a script):

    first step of a run      bucket 0: 0 1 2 3 4 5 6 7
    from then on             bucket 0: 7 6 5     bucket 1: 4 3 2     bucket 2: 1 0

A bucket that consists of the parameters of several memories is worked on memory by memory, as if DDP had arranged it so; if
it comes once more (the run was resumed with larger buckets), the memories become one. In any other arrangement every
parameter takes its error along. Two models that share a state have memories of their own.
"""

import ctypes
import hashlib
import math
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from gradcomp import ops
from gradcomp.compress.grad_bucket import real_shape
from gradcomp.layout import LowRankLayout

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.

ByParameter = dict[int, torch.Tensor]


def layout_of(kind: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]) -> LowRankLayout:
    """Which tensors of a bucket with these shapes are compressed; kind as in Memory."""
    if kind["square"]:
        return LowRankLayout.square(sum(map(math.prod, shapes)), kind["rank"])
    return LowRankLayout(shapes, kind["rank"], kind["min_compression_rate"])


@dataclass
class Memory:
    """What is remembered of one bucket.

    kind: what its plan depends on, beside the shapes. index: the bucket's, on which its random projections depend. shapes,
    numbers, parameters: of its parameters, in the bucket's order; parameters is None for a memory that was loaded and has not
    met them yet. plan: from the first compressed step on. saved: "error" and "directions" for a plan yet to be made.
    """

    kind: dict[str, Any]
    index: int
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
        return layout_of(self.kind, self.shapes)

    @property
    def offsets(self) -> dict[int, int]:
        """Where each parameter, by its number, starts in the bucket."""
        starts = accumulate(map(math.prod, self.shapes), initial=0)
        return dict(zip(self.numbers, starts, strict=False))

    @property
    def number_at(self) -> dict[int, int]:
        """The number of the parameter that starts at a place of the bucket."""
        sizes = dict(zip(self.numbers, map(math.prod, self.shapes), strict=True))
        return {start: number for number, start in self.offsets.items() if sizes[number]}

    def is_for(self, parameters: Sequence[torch.Tensor]) -> bool:
        refs = self.parameters
        return (
            refs is not None
            and len(refs) == len(parameters)
            and all(ref() is parameter for ref, parameter in zip(refs, parameters, strict=True))
        )

    @property
    def is_dead(self) -> bool:
        """Whether it has met its parameters, and they are no more."""
        return self.parameters is not None and all(ref() is None for ref in self.parameters)

    def by_parameter(self) -> tuple[ByParameter, ByParameter]:
        """(errors, directions of the matrices), by the parameter's number; a square view's directions are nobody's."""
        kept = self.state_dict()
        if kept["error"] is None:
            return {}, {}
        parts = kept["error"].split(list(map(math.prod, self.shapes)))
        errors = dict(zip(self.numbers, parts, strict=True))
        if self.kind["square"] or kept["directions"] is None:
            return errors, {}
        number_at = self.number_at
        starts = (number_at[matrix.offset] for matrix in self.layout.matrices)
        return errors, dict(zip(starts, kept["directions"], strict=True))

    def take(self, errors: ByParameter, directions: ByParameter) -> None:
        """Continue from these. A parameter without an error has none; directions are taken if all are there."""
        known = [errors[number] for number in self.numbers if number in errors]
        if not known:
            return
        sizes = dict(zip(self.numbers, map(math.prod, self.shapes), strict=True))
        parts = [
            errors[number] if number in errors else known[0].new_zeros(sizes[number])
            for number in self.numbers
        ]
        self.saved = {"error": torch.cat(parts), "directions": None}
        if not self.kind["square"]:
            number_at = self.number_at
            wanted = [number_at[matrix.offset] for matrix in self.layout.matrices]
            if all(number in directions for number in wanted):
                self.saved["directions"] = [directions[number] for number in wanted]


@dataclass
class Share:
    """The part of a bucket that belongs to a memory. places: of its tensors, if not the whole bucket in order."""

    memory: Memory
    places: list[slice] | None = None

    def matrices_left_out(self, bucket: dist.GradBucket) -> list[int]:
        """Which of the layout's matrices consist of parameters that this rank's backward has not used.

        torch's DDP calls a hook before it writes averages: a parameter without a gradient was not used. Our buckets don't
        tell; the Reducer gives back what wasn't used when all ranks have told (PowerSGDState.take_back).
        """
        if not isinstance(bucket, dist.GradBucket) or all(p.grad is not None for p in bucket.parameters()):
            return []
        unused = {id(parameter) for parameter in bucket.parameters() if parameter.grad is None}
        of_memory = zip(self.memory.numbers, self.memory.parameters or (), strict=True)
        used = {number for number, ref in of_memory if id(ref()) not in unused}
        if self.memory.kind["square"]:
            return [] if used else list(range(len(self.memory.layout.matrices)))
        number_at = self.memory.number_at
        matrices = enumerate(self.memory.layout.matrices)
        return [index for index, matrix in matrices if number_at[matrix.offset] not in used]

    def gather(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer if self.places is None else torch.cat([buffer[place] for place in self.places])

    def scatter(self, flat: torch.Tensor, buffer: torch.Tensor) -> None:
        if self.places is not None:
            parts = flat.split([place.stop - place.start for place in self.places])
            for place, part in zip(self.places, parts, strict=True):
                buffer[place] = part


class BucketMemories:
    """The memories of all buckets that are registered with a state."""

    def __init__(self) -> None:
        self._memories: dict[tuple[int, ...], Memory] = {}  # by the numbers of the parameters
        self._of_last_step: dict[int, Memory] = {}  # by the index of the bucket
        self._numbers: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()
        # Buckets that were worked on memory by memory: where one comes again, its memories become one.
        self._shared_out: set[frozenset[int]] = set()

    def shares(self, bucket: dist.GradBucket, kind: dict[str, Any]) -> tuple[list[Share], list[Memory]]:
        """(The parts of the bucket by memory, memories that had to go because shapes or options have changed)."""
        index, parameters = bucket.index(), bucket.parameters()
        shapes = list(map(real_shape, parameters))
        memory = self._of_last_step.get(index)
        lost: list[Memory] = []
        if memory is None or (memory.kind, memory.shapes) != (kind, shapes) or not memory.is_for(parameters):
            numbers = self._numbers_of(parameters, index, shapes)
            memory = Memory(kind, index, shapes, numbers, list(map(weakref.ref, parameters)))
            found = self._memories.get(tuple(numbers))
            if found is not None and (found.kind, found.shapes) == (kind, shapes):
                found.index, found.parameters, memory = index, memory.parameters, found
            else:
                parts, lost = self._parts_of(memory)
                places = self._places(memory, parts)
                if places and frozenset(numbers) not in self._shared_out:
                    self._shared_out.add(frozenset(numbers))
                    return places, lost
                self._take_over(memory, parts)
                before = self._of_last_step.get(index)
                is_unclaimed = before is not None and self._memories.get(tuple(before.numbers)) is before
                if before is not None and is_unclaimed and before.is_dead and not before.is_empty:
                    lost.append(before)
            self._of_last_step[index] = memory
        if bucket.is_last():
            self._of_last_step = {i: kept for i, kept in self._of_last_step.items() if i <= index}
            self._forget_the_dead()
        return [Share(memory)], lost

    def memory_of(self, parameter: torch.Tensor) -> tuple[Memory, int] | None:
        """(The memory that a parameter belongs to, where it starts there)."""
        number = self._numbers.get(parameter)
        for memory in self._memories.values():
            if number in memory.numbers:
                return memory, memory.offsets[number]
        return None

    def _numbers_of(
        self, parameters: Sequence[torch.Tensor], index: int, shapes: list[tuple[int, ...]]
    ) -> list[int]:
        new = [parameter for parameter in parameters if parameter not in self._numbers]
        if len(new) == len(parameters):
            for memory in self._memories.values():
                if memory.is_dead and (memory.index, memory.shapes) == (index, shapes):
                    # Other tensors in the places of those that are no more: a model made anew.
                    self._numbers.update(zip(parameters, memory.numbers, strict=True))
                    return list(memory.numbers)
        if new:
            # A loaded memory's numbers are for the parameters to come.
            met = (n for memory in self._memories.values() if memory.parameters for n in memory.numbers)
            first = 1 + max([*self._numbers.values(), *met], default=-1)
            self._numbers.update(zip(new, range(first, first + len(new)), strict=True))
        return [self._numbers[parameter] for parameter in parameters]

    def _parts_of(self, memory: Memory) -> tuple[list[Memory], list[Memory]]:
        """(The memories that its parameters belong to, those that are forgotten as they have other shapes or options)."""
        shape_of = dict(zip(memory.numbers, memory.shapes, strict=True))
        parts: list[Memory] = []
        lost: list[Memory] = []
        for key, other in list(self._memories.items()):
            shapes = dict(zip(other.numbers, other.shapes, strict=True))
            common = shapes.keys() & shape_of.keys()
            if not common:
                continue
            # A loaded memory that is empty still tells how the saved run has arranged its buckets.
            is_needed = not other.is_empty or other.parameters is None
            fits = other.kind == memory.kind and all(shapes[n] == shape_of[n] for n in common)
            if is_needed and fits:
                parts.append(other)
                continue
            del self._memories[key]
            if not other.is_empty:
                lost.append(other)
        return parts, lost

    def _places(self, memory: Memory, parts: list[Memory]) -> list[Share]:
        """The bucket's parts, if it consists of just these memories; else none."""
        if sorted(number for part in parts for number in part.numbers) != sorted(memory.numbers):
            return []
        offsets = memory.offsets
        refs = dict(zip(memory.numbers, memory.parameters or (), strict=True))
        shares = []
        for part in sorted(parts, key=lambda part: part.index):
            part.parameters = [refs[number] for number in part.numbers]
            pairs = zip(part.numbers, part.shapes, strict=True)
            places = [slice(offsets[number], offsets[number] + math.prod(shape)) for number, shape in pairs]
            shares.append(Share(part, places))
        return shares

    def _take_over(self, memory: Memory, parts: list[Memory]) -> None:
        """Make it the memory of its parameters; what is left of the parts waits for the buckets of their others."""
        errors: ByParameter = {}
        directions: ByParameter = {}
        for part in parts:
            del self._memories[tuple(part.numbers)]
            of_part = part.by_parameter()
            errors.update(of_part[0])
            directions.update(of_part[1])
            left = [i for i, number in enumerate(part.numbers) if number not in memory.numbers]
            if left and not part.is_empty:
                rest = Memory(
                    part.kind,
                    part.index,
                    [part.shapes[i] for i in left],
                    [part.numbers[i] for i in left],
                    None if part.parameters is None else [part.parameters[i] for i in left],
                )
                rest.take(*of_part)
                self._memories[tuple(rest.numbers)] = rest
        memory.take(errors, directions)
        self._memories[tuple(memory.numbers)] = memory

    def _forget_the_dead(self) -> None:
        """Forget memories whose parameters are no more, but for those of the step that ends."""
        of_step = list(map(id, self._of_last_step.values()))
        dead = [key for key, each in self._memories.items() if each.is_dead and id(each) not in of_step]
        for key in dead:
            del self._memories[key]

    def digest_of_directions(self) -> str:
        """What tells whether other ranks have loaded the same directions, which every rank projects on."""
        digest = hashlib.sha256()
        for memory in self._memories.values():
            for direction in (memory.saved or {}).get("directions") or ():
                on_cpu = direction.detach().cpu().contiguous()
                digest.update(ctypes.string_at(on_cpu.data_ptr(), on_cpu.nbytes))
        return digest.hexdigest()[:16]

    def state_dict(self) -> dict[int, dict[str, Any]]:
        ordered = sorted(self._memories.values(), key=lambda memory: memory.index)
        return {number: memory.state_dict() for number, memory in enumerate(ordered)}

    def load_state_dict(self, state_dict: Mapping[int, dict[str, Any]]) -> None:
        """Take the place of all memories. The parameters seen so far keep their numbers."""
        self._memories, self._of_last_step, self._shared_out = {}, {}, set()
        for index, saved in state_dict.items():
            memory = Memory(dict(saved["kind"]), index, list(saved["shapes"]), list(saved["parameters"]))
            if saved["error"] is not None:
                memory.saved = {name: saved[name] for name in ("error", "directions")}
            self._memories[tuple(memory.numbers)] = memory
