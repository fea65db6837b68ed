"""Which memory belongs to which bucket, also after the buckets have changed.

DDP rearranges its buckets after a model's first step, and a resumed run starts with a new model: all its
gradients come in one bucket once, and then in the saved run's buckets. So a memory belongs to parameters, by
their indices (parameter_identity.py says which parameter an index stands for):

    first step of a run      bucket 0: 0 1 2 3 4 5 6 7
    from then on             bucket 0: 7 6 5     bucket 1: 4 3 2     bucket 2: 1 0

A bucket that consists of the parameters of several memories is averaged memory by memory, as if DDP had
arranged it so. If it comes once more (the run was resumed with larger buckets), the memories are merged. In
any other arrangement every parameter takes its error along. Two models that share a state have separate
memories.
"""

import ctypes
import hashlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .bucket_memory import BucketPart, ByParameter, Memory
from .grad_bucket import real_shape
from .parameter_identity import ParameterIdentity

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.


class BucketMemories:
    """The memories of all buckets that a state's hook averages."""

    def __init__(self) -> None:
        self.identity = ParameterIdentity()
        self._memories: dict[tuple[int, ...], Memory] = {}  # by parameter indices
        # By bucket index, which is a hint only: torch gives 0 to all buckets of a static graph's first step.
        self._of_step: dict[int, Memory] = {}
        self._of_last_step: dict[int, Memory] = {}
        # Buckets that were averaged memory by memory. If one comes again, its memories are merged.
        self._divided_once: set[frozenset[int]] = set()

    def parts_of(self, bucket: dist.GradBucket, options: Any) -> tuple[list[BucketPart], list[Memory], int]:
        """Return (the bucket's parts by memory, memories dropped because shapes or options have changed, the
        number of a checkpoint's parameters whose memory was dropped because nobody knows which they are).
        """
        index, parameters = bucket.index(), bucket.parameters()
        dtype = bucket.buffer().dtype
        memory = self._of_last_step.get(index)
        lost: list[Memory] = []
        num_unidentified = 0
        if memory is None or not memory.is_still_for(parameters, dtype, options):
            shapes = list(map(real_shape, parameters))
            made_for = (options, dtype, shapes)
            indices, num_unidentified = self._indices_of(parameters, index, shapes)
            memory = Memory(options, dtype, index, shapes, indices, list(map(weakref.ref, parameters)))
            found = self._memories.get(tuple(indices))
            if found is not None and found.made_for == made_for:
                found.index, found.parameters, memory = index, memory.parameters, found
            else:
                parts, lost = self._memories_of(memory)
                divided = self._divided(memory, parts)
                if divided and frozenset(indices) not in self._divided_once:
                    self._divided_once.add(frozenset(indices))
                    return divided, lost, num_unidentified
                self._take_over(memory, parts)
                before = self._of_last_step.get(index)
                if before is not None and self._is_unclaimed(before):
                    lost.append(before)
        self._of_step[index] = memory
        return [BucketPart(memory)], lost, num_unidentified

    def end_step(self) -> None:
        """Forget the memories of deleted parameters, except those of the step that ends."""
        self._of_last_step, self._of_step = self._of_step, {}
        of_step = list(map(id, self._of_last_step.values()))
        dead = [key for key, each in self._memories.items() if each.is_dead and id(each) not in of_step]
        for key in dead:
            del self._memories[key]

    def _is_unclaimed(self, memory: Memory) -> bool:
        """Return whether a memory still has something to keep, but its parameters have been deleted."""
        is_current = self._memories.get(tuple(memory.parameter_indices)) is memory
        return is_current and memory.is_dead and not memory.is_empty

    def memory_of(self, parameter: torch.Tensor) -> tuple[Memory, int] | None:
        """Return (a parameter's memory, the parameter's offset in it); None if it has no memory."""
        i = self.identity.index(parameter)
        for memory in self._memories.values():
            if i in memory.parameter_indices:
                return memory, memory.offsets[i]
        return None

    def _indices_of(
        self, parameters: Sequence[torch.Tensor], index: int, shapes: list[tuple[int, ...]]
    ) -> tuple[list[int], int]:
        """Return (the indices of a bucket's parameters, the number of unidentified ones: see parts_of)."""
        if self.identity.are_new(parameters):
            for memory in self._memories.values():
                if memory.is_dead and (memory.index, memory.shapes) == (index, shapes):
                    # New tensors in the positions of deleted ones: the model was made anew.
                    self.identity.bind(parameters, memory.parameter_indices)
                    break
        indices, unfit = self.identity.indices_of(parameters, shapes)
        lost = [each for each in self._loaded() if not unfit.isdisjoint(each.parameter_indices)]
        for memory in lost:
            del self._memories[tuple(memory.parameter_indices)]
        return indices, sum(len(memory.shapes) for memory in lost if not memory.is_empty)

    @property
    def have_parameters(self) -> bool:
        """True if buckets have brought parameters, or somebody has named some that still exist."""
        return self.identity.knows_any or any(memory.parameters for memory in self._memories.values())

    def _loaded(self) -> list[Memory]:
        """Return the loaded memories that no bucket has brought the parameters of."""
        return [memory for memory in self._memories.values() if memory.parameters is None]

    def unclaimed(self) -> list[str]:
        """Return the names (or else shapes) of the parameters whose loaded memory no bucket has claimed."""
        found = []
        for memory in self._loaded():
            if not memory.is_empty:
                names = self.identity.of(memory.parameter_indices)["names"]
                pairs = zip(memory.parameter_indices, memory.shapes, strict=True)
                found += [names.get(i, f"one of shape {list(shape)}") for i, shape in pairs]
        return found

    def _memories_of(self, memory: Memory) -> tuple[list[Memory], list[Memory]]:
        """Return (the memories of its parameters, the memories dropped for other shapes or options)."""
        shape_of = dict(zip(memory.parameter_indices, memory.shapes, strict=True))
        parts: list[Memory] = []
        lost: list[Memory] = []
        for key, other in list(self._memories.items()):
            shapes = dict(zip(other.parameter_indices, other.shapes, strict=True))
            common = shapes.keys() & shape_of.keys()
            if not common:
                continue
            # A loaded memory that is empty still says how the saved run had arranged its buckets.
            is_needed = not other.is_empty or other.parameters is None
            fits = other.made_for[:2] == memory.made_for[:2] and all(shapes[i] == shape_of[i] for i in common)
            if is_needed and fits:
                parts.append(other)
                continue
            del self._memories[key]
            if not other.is_empty:
                lost.append(other)
        return parts, lost

    def _divided(self, memory: Memory, parts: list[Memory]) -> list[BucketPart]:
        """Return the bucket's parts if it consists of exactly these memories, else an empty list."""
        if sorted(i for part in parts for i in part.parameter_indices) != sorted(memory.parameter_indices):
            return []
        offsets = memory.offsets
        refs = dict(zip(memory.parameter_indices, memory.parameters or (), strict=True))
        divided = []
        for part in sorted(parts, key=lambda part: part.index):
            part.parameters = [refs[i] for i in part.parameter_indices]
            pairs = zip(part.parameter_indices, part.numels, strict=True)
            slices = [slice(offsets[i], offsets[i] + numel) for i, numel in pairs]
            divided.append(BucketPart(part, slices))
        return divided

    def _take_over(self, memory: Memory, parts: list[Memory]) -> None:
        """Make it the memory of its parameters; a part's other parameters keep the remainder of that part."""
        elements: ByParameter = {}
        tensors: ByParameter = {}
        for part in parts:
            del self._memories[tuple(part.parameter_indices)]
            entries = part.by_parameter()
            for merged, given in zip((elements, tensors), entries, strict=True):
                for name, by_index in given.items():
                    merged.setdefault(name, {}).update(by_index)
            indices = part.parameter_indices
            left = [position for position, i in enumerate(indices) if i not in memory.parameter_indices]
            if left and not part.is_empty:
                remainder = Memory(
                    part.options,
                    part.dtype,
                    part.index,
                    [part.shapes[position] for position in left],
                    [indices[position] for position in left],
                    None if part.parameters is None else [part.parameters[position] for position in left],
                )
                remainder.take(*entries)
                self._memories[tuple(remainder.parameter_indices)] = remainder
        memory.take(elements, tensors)
        self._memories[tuple(memory.parameter_indices)] = memory

    def common_digest(self) -> str:
        """Return a digest of the loaded entries that must be the same on every rank."""
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

    def scale_errors(self, factor: float) -> None:
        """Multiply all errors."""
        for memory in self._memories.values():
            memory.scale_errors(factor)

    def put_away(self) -> None:
        """Take the memories out of their compressors, which were made for another group or device."""
        for memory in self._memories.values():
            memory.put_away()

    def saved(self) -> tuple[dict[str, Any], list[Memory]]:
        """Return (which parameters the indices stand for, all memories in the order of their buckets).

        The memories are without their compressors and parameters.
        """
        memories = [
            Memory(m.options, m.dtype, m.index, m.shapes, m.parameter_indices, saved=m.own_state())
            for m in sorted(self._memories.values(), key=lambda memory: memory.index)
        ]
        return self.identity.of(i for memory in memories for i in memory.parameter_indices), memories

    def load(self, identity: dict[str, Any], memories: Iterable[Memory]) -> None:
        """Replace all memories by these."""
        self.identity.load(identity)
        self._of_step, self._of_last_step, self._divided_once = {}, {}, set()
        self._memories = {tuple(memory.parameter_indices): memory for memory in memories}
