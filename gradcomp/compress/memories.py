"""The memory of one bucket, and which memory belongs to a bucket after the buckets have changed.

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
import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from ..comm.bucket import real_shape
from .compressor import BucketSpec, Compressor, State, with_scaled_errors
from .parameter_identity import ParameterIdentity

Shape = tuple[int, ...]
# Tensors by the name of a state's entry and the index of the parameter.
ByParameter = dict[str, dict[int, torch.Tensor]]


@dataclass
class Memory:
    """What a state keeps of one bucket from step to step.

    It is empty before its first compressed step; live while a compressor has its state, and saved otherwise.
    A checkpoint's memory is loaded until a bucket brings its parameters. It is dead once these are deleted.

    options, dtype: its compressor's options, and the bucket's dtype.
    index: the bucket's index; random choices depend on it.
    shapes, parameter_indices, parameters: one entry per parameter, in the bucket's order. parameters is None
        for a loaded memory.
    compressor, device: a live memory's compressor, and the device that it was made for.
    saved: the state that the next compressor will load; None for an empty and for a live memory.
    """

    options: Any
    dtype: torch.dtype
    index: int
    shapes: list[Shape]
    parameter_indices: list[int]
    parameters: list[weakref.ref[torch.Tensor]] | None = None
    compressor: Compressor | None = None
    saved: State | None = None
    device: torch.device | None = None
    _is_warmed_up: bool = False

    @property
    def is_empty(self) -> bool:
        """True if nothing has been compressed or loaded yet."""
        return self.compressor is None and self.saved is None

    @property
    def is_loaded(self) -> bool:
        """True if it came from a checkpoint, and no bucket has brought its parameters yet."""
        return self.parameters is None

    @property
    def is_dead(self) -> bool:
        """True if its parameters were once known, and all have been deleted since."""
        return self.parameters is not None and all(ref() is None for ref in self.parameters)

    def live_compressor(
        self, kind: type[Compressor], device: torch.device, world_size: int, seed: int
    ) -> Compressor:
        """Return its compressor of this class on this device; a new one, which loads its state, if need be.

        world_size: of the group that will average. seed: for the new compressor's random choices.
        """
        if self.device != device or type(self.compressor) is not kind:
            self.put_away()
        if self.compressor is None:
            make: Any = kind  # a subclass takes options, too
            self.compressor = make(self._spec(device, world_size, seed), self.options)
            self.device = device
            saved, self.saved = self.saved, None
            if saved is not None:
                self.compressor.load(saved)
        return self.compressor

    def put_away(self) -> None:
        """Save the compressor's state, and drop the compressor."""
        if self.compressor is not None:
            self.saved, self.compressor = self.compressor.state() or None, None

    def warm_up(self, kind: type[Compressor], device: torch.device, world_size: int) -> None:
        """Warm up the class of its later compressor, once."""
        if not self._is_warmed_up:
            self._is_warmed_up = True
            kind.warm_up(self._spec(device, world_size, 0), self.options)

    def _spec(self, device: torch.device, world_size: int, seed: int) -> BucketSpec:
        return BucketSpec(tuple(self.shapes), self.dtype, device, world_size, seed)

    @property
    def state(self) -> State | None:
        """The state of the compressor, or the one that it will start from."""
        return self.saved if self.compressor is None else self.compressor.state()

    def own_state(self) -> State | None:
        """Return the state in tensors that nothing else refers to."""
        return _copied(self.saved) if self.compressor is None else self.compressor.state()

    def scale_errors(self, factor: float) -> None:
        """Multiply the errors, wherever they are."""
        if self.compressor is not None:
            self.compressor.scale_errors(factor)
        elif self.saved is not None:
            self.saved = with_scaled_errors(self.saved, factor)

    @property
    def numels(self) -> list[int]:
        """The number of elements of each parameter."""
        return list(map(math.prod, self.shapes))

    @property
    def offsets(self) -> dict[int, int]:
        """The offset of each parameter in the bucket, by parameter index."""
        return dict(zip(self.parameter_indices, accumulate(self.numels, initial=0), strict=False))

    @property
    def compressor_depends_on(self) -> tuple[Any, ...]:
        """The options, dtype and shapes: a compressor of others can't load its state."""
        return self.options, self.dtype, self.shapes

    def is_for(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether it belongs to these parameters, in this order."""
        refs = self.parameters
        return (
            refs is not None
            and len(refs) == len(parameters)
            and all(ref() is parameter for ref, parameter in zip(refs, parameters, strict=True))
        )

    def is_unchanged_for(self, parameters: Sequence[torch.Tensor], dtype: torch.dtype, options: Any) -> bool:
        """Return whether it belongs to these parameters, in this order, and nothing has changed."""
        if not (self.dtype == dtype and self.is_for(parameters) and self.options == options):
            return False
        # Real parameters' shapes are the gradients'; those of complex ones take longer to tell.
        shapes: list[Shape] = [parameter.shape for parameter in parameters]
        return shapes == self.shapes or list(map(real_shape, parameters)) == self.shapes

    def is_elements(self, value: Any) -> bool:
        """Return whether an entry of a state has one element per element of the bucket."""
        return isinstance(value, torch.Tensor) and tuple(value.shape) == (sum(self.numels),)

    def by_parameter(self) -> tuple[ByParameter, ByParameter]:
        """Split the state's entries by parameter index.

        Returns (entries with one element per element, entries with one tensor per parameter).
        """
        elements: ByParameter = {}
        tensors: ByParameter = {}
        for name, value in (self.state or {}).items():
            if self.is_elements(value):
                elements[name] = dict(zip(self.parameter_indices, value.split(self.numels), strict=True))
            elif isinstance(value, list):
                pairs = zip(self.parameter_indices, value, strict=True)
                tensors[name] = {i: each for i, each in pairs if each is not None}
        return elements, tensors

    def take(self, elements: ByParameter, tensors: ByParameter) -> None:
        """Continue from other memories' by_parameter. What none of them has becomes zero, or None."""
        saved: State = {}
        for name, by_index in elements.items():
            known = [by_index[i] for i in self.parameter_indices if i in by_index]
            if known:
                pairs = zip(self.parameter_indices, self.numels, strict=True)
                parts = [by_index[i] if i in by_index else known[0].new_zeros(numel) for i, numel in pairs]
                saved[name] = torch.cat(parts)
        if not saved:
            return
        for name, by_index in tensors.items():
            saved[name] = [by_index.get(i) for i in self.parameter_indices]
        self.saved = saved


@dataclass
class BucketPart:
    """The part of a bucket that belongs to a memory.

    slices: the slices of the bucket that hold its tensors; None if the part is the whole bucket in order.
    """

    memory: Memory
    slices: list[slice] | None = None

    def unused(self, bucket: dist.GradBucket) -> list[int]:
        """Return the positions of its tensors that this rank's backward has not used, if that can be known.

        torch's DDP calls a hook before it writes averages, so a parameter without a gradient was not used.
        gradcomp's buckets don't say. The Reducer calls CompressorState.take_back once it knows what no
        rank has used.
        """
        if not isinstance(bucket, dist.GradBucket) or all(p.grad is not None for p in bucket.parameters()):
            return []
        unused = {id(parameter) for parameter in bucket.parameters() if parameter.grad is None}
        return [index for index, ref in enumerate(self.memory.parameters or ()) if id(ref()) in unused]

    def gather(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the part's elements, flat: the buffer itself if the part is the whole bucket."""
        return buffer if self.slices is None else torch.cat([buffer[each] for each in self.slices])

    def scatter(self, flat: torch.Tensor, buffer: torch.Tensor) -> None:
        """Write what gather returned back to the buffer."""
        if self.slices is not None:
            parts = flat.split([each.stop - each.start for each in self.slices])
            for each, part in zip(self.slices, parts, strict=True):
                buffer[each] = part


def _copied(state: State | None) -> State | None:
    """Copy a state with its tensors."""

    def copy(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(copy, value))
        return value.clone() if isinstance(value, torch.Tensor) else value

    return None if state is None else {name: copy(value) for name, value in state.items()}


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
        if memory is None or not memory.is_unchanged_for(parameters, dtype, options):
            shapes = list(map(real_shape, parameters))
            indices, num_unidentified = self._indices_of(parameters, index, shapes)
            memory = Memory(options, dtype, index, shapes, indices, list(map(weakref.ref, parameters)))
            found = self._memories.get(tuple(indices))
            if found is not None and found.compressor_depends_on == memory.compressor_depends_on:
                found.index, found.parameters, memory = index, memory.parameters, found
            else:
                parts, lost = self._memories_of(memory)
                divided = self._divided(memory, parts)
                if divided and frozenset(indices) not in self._divided_once:
                    self._divided_once.add(frozenset(indices))
                    return divided, lost, num_unidentified
                self._take_from(memory, parts)
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
        return [memory for memory in self._memories.values() if memory.is_loaded]

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
            is_needed = not other.is_empty or other.is_loaded
            fits = (other.options, other.dtype) == (memory.options, memory.dtype) and all(
                shapes[i] == shape_of[i] for i in common
            )
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

    def _take_from(self, memory: Memory, parts: list[Memory]) -> None:
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
