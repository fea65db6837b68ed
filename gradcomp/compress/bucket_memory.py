"""What a state remembers of every bucket, and whose it is.

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
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from .compressor import Compressor, State
from .grad_bucket import real_shape

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.

Shape = tuple[int, ...]
# By the name of a state's entry and the number of the parameter.
ByParameter = dict[str, dict[int, torch.Tensor]]


@dataclass
class Memory:
    """What is remembered of one bucket.

    options, dtype: what its compressor depends on, beside the shapes. index: the bucket's, on which its random choices depend.
    shapes, numbers, parameters: of its parameters, in the bucket's order; parameters is None for a memory that was loaded and
    has not met them yet. compressor: from the first compressed step on, on this device. saved: the state of a compressor that is
    yet to be made.
    """

    options: Any
    dtype: torch.dtype
    index: int
    shapes: list[Shape]
    numbers: list[int]
    parameters: list[weakref.ref[torch.Tensor]] | None = None
    compressor: Compressor | None = None
    saved: State | None = None
    device: torch.device | None = None

    @property
    def state(self) -> State | None:
        """What its compressor has to keep, or would start from."""
        return self.saved if self.compressor is None else self.compressor.state()

    def own_state(self) -> State | None:
        """The state in tensors that nobody else has."""
        return _copied(self.saved) if self.compressor is None else self.compressor.state()

    @property
    def is_empty(self) -> bool:
        return self.compressor is None and self.saved is None

    @property
    def numels(self) -> list[int]:
        return list(map(math.prod, self.shapes))

    @property
    def offsets(self) -> dict[int, int]:
        """The element of the bucket at which each parameter, by its number, starts."""
        return dict(zip(self.numbers, accumulate(self.numels, initial=0), strict=False))

    @property
    def made_for(self) -> tuple[Any, ...]:
        """What its compressor depends on."""
        return self.options, self.dtype, self.shapes

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

    def is_elements(self, value: Any) -> bool:
        """Whether an entry of a state has an element for each of the bucket's."""
        return isinstance(value, torch.Tensor) and tuple(value.shape) == (sum(self.numels),)

    def by_parameter(self) -> tuple[ByParameter, ByParameter]:
        """(Entries with an element per element, entries with a tensor per tensor) of the state, by the parameter's number."""
        elements: ByParameter = {}
        tensors: ByParameter = {}
        for name, value in (self.state or {}).items():
            if self.is_elements(value):
                elements[name] = dict(zip(self.numbers, value.split(self.numels), strict=True))
            elif isinstance(value, list):
                pairs = zip(self.numbers, value, strict=True)
                tensors[name] = {number: each for number, each in pairs if each is not None}
        return elements, tensors

    def take(self, elements: ByParameter, tensors: ByParameter) -> None:
        """Continue from what by_parameter gave of other memories. What no memory has is zero, or None."""
        saved: State = {}
        for name, of_number in elements.items():
            known = [of_number[number] for number in self.numbers if number in of_number]
            if known:
                pairs = zip(self.numbers, self.numels, strict=True)
                parts = [of_number[n] if n in of_number else known[0].new_zeros(numel) for n, numel in pairs]
                saved[name] = torch.cat(parts)
        if not saved:
            return
        for name, of_number in tensors.items():
            saved[name] = [of_number.get(number) for number in self.numbers]
        self.saved = saved


@dataclass
class BucketPart:
    """The part of a bucket that belongs to a memory. slices: of its tensors, if not the whole bucket in order."""

    memory: Memory
    slices: list[slice] | None = None

    def unused(self, bucket: dist.GradBucket) -> list[int]:
        """Its tensors, by index, that this rank's backward has not used, so far as a hook can know.

        torch's DDP calls a hook before it writes averages: a parameter without a gradient was not used. Our buckets don't
        tell; the Reducer gives back what wasn't used when all ranks have told (CompressedAveraging.take_back).
        """
        if not isinstance(bucket, dist.GradBucket) or all(p.grad is not None for p in bucket.parameters()):
            return []
        unused = {id(parameter) for parameter in bucket.parameters() if parameter.grad is None}
        return [index for index, ref in enumerate(self.memory.parameters or ()) if id(ref()) in unused]

    def gather(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer if self.slices is None else torch.cat([buffer[each] for each in self.slices])

    def scatter(self, flat: torch.Tensor, buffer: torch.Tensor) -> None:
        if self.slices is not None:
            parts = flat.split([each.stop - each.start for each in self.slices])
            for each, part in zip(self.slices, parts, strict=True):
                buffer[each] = part


class BucketMemories:
    """The memories of all buckets that come with a state."""

    def __init__(self) -> None:
        self._memories: dict[tuple[int, ...], Memory] = {}  # by the numbers of the parameters
        self._of_last_step: dict[int, Memory] = {}  # by the index of the bucket
        self._numbers: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()
        # Buckets that were averaged memory by memory: where one comes again, its memories become one.
        self._divided_once: set[frozenset[int]] = set()

    def parts_of(self, bucket: dist.GradBucket, options: Any) -> tuple[list[BucketPart], list[Memory]]:
        """(The parts of the bucket by memory, memories that had to go because shapes or options have changed)."""
        index, parameters = bucket.index(), bucket.parameters()
        dtype, shapes = bucket.buffer().dtype, list(map(real_shape, parameters))
        memory = self._of_last_step.get(index)
        lost: list[Memory] = []
        made_for = (options, dtype, shapes)
        if memory is None or memory.made_for != made_for or not memory.is_for(parameters):
            numbers = self._numbers_of(parameters, index, shapes)
            memory = Memory(options, dtype, index, shapes, numbers, list(map(weakref.ref, parameters)))
            found = self._memories.get(tuple(numbers))
            if found is not None and found.made_for == made_for:
                found.index, found.parameters, memory = index, memory.parameters, found
            else:
                parts, lost = self._memories_of(memory)
                divided = self._divided(memory, parts)
                if divided and frozenset(numbers) not in self._divided_once:
                    self._divided_once.add(frozenset(numbers))
                    return divided, lost
                self._take_over(memory, parts)
                before = self._of_last_step.get(index)
                is_unclaimed = before is not None and self._memories.get(tuple(before.numbers)) is before
                if before is not None and is_unclaimed and before.is_dead and not before.is_empty:
                    lost.append(before)
            self._of_last_step[index] = memory
        if bucket.is_last():
            self._of_last_step = {i: kept for i, kept in self._of_last_step.items() if i <= index}
            self._forget_the_dead()
        return [BucketPart(memory)], lost

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

    def _memories_of(self, memory: Memory) -> tuple[list[Memory], list[Memory]]:
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
            fits = other.made_for[:2] == memory.made_for[:2] and all(shapes[n] == shape_of[n] for n in common)
            if is_needed and fits:
                parts.append(other)
                continue
            del self._memories[key]
            if not other.is_empty:
                lost.append(other)
        return parts, lost

    def _divided(self, memory: Memory, parts: list[Memory]) -> list[BucketPart]:
        """The bucket's parts, if it consists of just these memories; else none."""
        if sorted(number for part in parts for number in part.numbers) != sorted(memory.numbers):
            return []
        offsets = memory.offsets
        refs = dict(zip(memory.numbers, memory.parameters or (), strict=True))
        divided = []
        for part in sorted(parts, key=lambda part: part.index):
            part.parameters = [refs[number] for number in part.numbers]
            pairs = zip(part.numbers, part.numels, strict=True)
            slices = [slice(offsets[number], offsets[number] + numel) for number, numel in pairs]
            divided.append(BucketPart(part, slices))
        return divided

    def _take_over(self, memory: Memory, parts: list[Memory]) -> None:
        """Make it the memory of its parameters; what is left of the parts waits for the buckets of their others."""
        elements: ByParameter = {}
        tensors: ByParameter = {}
        for part in parts:
            del self._memories[tuple(part.numbers)]
            of_part = part.by_parameter()
            for merged, given in zip((elements, tensors), of_part, strict=True):
                for name, of_number in given.items():
                    merged.setdefault(name, {}).update(of_number)
            left = [i for i, number in enumerate(part.numbers) if number not in memory.numbers]
            if left and not part.is_empty:
                rest = Memory(
                    part.options,
                    part.dtype,
                    part.index,
                    [part.shapes[i] for i in left],
                    [part.numbers[i] for i in left],
                    None if part.parameters is None else [part.parameters[i] for i in left],
                )
                rest.take(*of_part)
                self._memories[tuple(rest.numbers)] = rest
        memory.take(elements, tensors)
        self._memories[tuple(memory.numbers)] = memory

    def _forget_the_dead(self) -> None:
        """Forget memories whose parameters are no more, but for those of the step that ends."""
        of_step = list(map(id, self._of_last_step.values()))
        dead = [key for key, each in self._memories.items() if each.is_dead and id(each) not in of_step]
        for key in dead:
            del self._memories[key]

    def digest_of_common(self) -> str:
        """What tells whether other ranks have loaded the same, of what is the same on every rank."""
        digest = hashlib.sha256()
        for memory in self._memories.values():
            for value in (memory.saved or {}).values():
                if memory.is_elements(value):
                    continue
                for each in value if isinstance(value, list) else [value]:
                    if each is not None:
                        on_cpu = each.detach().cpu().contiguous()
                        digest.update(ctypes.string_at(on_cpu.data_ptr(), on_cpu.nbytes))
        return digest.hexdigest()[:16]

    def saved(self) -> list[Memory]:
        """All memories without their compressors and parameters, in the order of their buckets."""
        ordered = sorted(self._memories.values(), key=lambda memory: memory.index)
        return [
            Memory(each.options, each.dtype, each.index, each.shapes, each.numbers, saved=each.own_state())
            for each in ordered
        ]

    def load(self, memories: Iterable[Memory]) -> None:
        """Take the place of all memories. The parameters seen so far keep their numbers."""
        self._of_last_step, self._divided_once = {}, set()
        self._memories = {tuple(memory.numbers): memory for memory in memories}


def _copied(state: State | None) -> State | None:
    """A copy of a state and its tensors."""

    def copy(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(copy, value))
        return value.clone() if isinstance(value, torch.Tensor) else value

    return None if state is None else {name: copy(value) for name, value in state.items()}
