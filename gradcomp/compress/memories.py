"""Memories: the compressor or saved state of each bucket, and how they follow a change of buckets.

DDP rearranges its buckets after a model's first step. A resumed run starts with a new model, so its first
step has one bucket, and its later steps have the saved run's buckets. A memory therefore belongs to
parameters, by their indices (parameter_identity.py says which parameter an index stands for):

    first step of a run      bucket 0: 0 1 2 3 4 5 6 7
    later steps              bucket 0: 7 6 5     bucket 1: 4 3 2     bucket 2: 1 0

If a bucket has exactly the parameters of several memories, it is averaged memory by memory, as if each memory
had its own bucket. If that bucket comes a second time (the run was resumed with larger buckets), the memories
are merged. In any other arrangement every parameter keeps its own error. Two models that share a state have
separate memories.
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

from ..comm.bucket import ShardBucket, real_shape
from .compressor import BucketSpec, Compressor, MakesCompressors, State, with_scaled_errors
from .parameter_identity import ParameterIdentity

Shape = tuple[int, ...]
# Tensors by the name of a state's entry and the index of the parameter.
ByParameter = dict[str, dict[int, torch.Tensor]]


@dataclass
class Memory:
    """The compressor of one bucket, or the saved state that the bucket's next compressor will load.

    A memory is
        empty: before its first compressed step
        live: while it has a compressor
        saved: while it has a compressor's state instead
        loaded: if a checkpoint brought it, until a bucket brings its parameters
        dead: once its parameters have been deleted.

    options: the compressor's options.
    dtype: the bucket's dtype.
    index: the bucket's index; random choices depend on it.
    shapes, parameter_indices, parameters: one entry per parameter, in the bucket's order. parameters is None
        for a loaded memory.
    compressor, made_by: a live memory's compressor, and what has made it.
    saved: the state that the next compressor will load; None for an empty or live memory.
    device: the device that the compressor was made for.
    """

    options: Any
    dtype: torch.dtype
    index: int
    shapes: list[Shape]
    parameter_indices: list[int]
    parameters: list[weakref.ref[torch.Tensor]] | None = None
    compressor: Compressor | None = None
    made_by: MakesCompressors | None = None
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
        self,
        make: MakesCompressors,
        device: torch.device,
        seed: int,
        **ranks: Any,
    ) -> Compressor:
        """Return a compressor made by `make` on this device: the live one if it fits, else a new one.

        A new compressor loads the saved state.

        seed: the seed for a new compressor's random choices.
        ranks: world_size, ranks_per_node and has_delay; see BucketSpec.
        """
        if self.device != device or self.made_by is not make:
            self.save_and_drop_compressor()
        if self.compressor is None:
            self.compressor = _made(make, self._spec(device, seed, **ranks), self.options)
            self.device, self.made_by = device, make
            saved, self.saved = self.saved, None
            if saved is not None:
                self.compressor.load(saved)
        return self.compressor

    def save_and_drop_compressor(self) -> None:
        """Save the compressor's state, and drop the compressor."""
        if self.compressor is not None:
            self.saved, self.compressor = self.compressor.state() or None, None

    def warm_up(
        self,
        later: Iterable[MakesCompressors],
        device: torch.device,
        **ranks: Any,
    ) -> None:
        """Warm up what will make this bucket's compressors. Does nothing after the first call."""
        if not self._is_warmed_up:
            self._is_warmed_up = True
            for each in later:
                each.warm_up(self._spec(device, 0, **ranks), self.options)

    def _spec(self, device: torch.device, seed: int, **ranks: Any) -> BucketSpec:
        return BucketSpec(tuple(self.shapes), self.dtype, device, seed=seed, **ranks)

    @property
    def state(self) -> State | None:
        """The live compressor's state, or the saved state; None if empty."""
        return self.saved if self.compressor is None else self.compressor.state()

    def own_state(self) -> State | None:
        """Return a copy of the state."""
        return _copied(self.saved) if self.compressor is None else self.compressor.state()

    def scale_errors(self, factor: float) -> None:
        """Multiply the errors by factor, in the compressor or in the saved state."""
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
        """The options, dtype and shapes. A compressor can load the state only if all three are equal."""
        return self.options, self.dtype, self.shapes

    def is_for(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether the memory belongs to exactly these parameters, in this order."""
        refs = self.parameters
        return (
            refs is not None
            and len(refs) == len(parameters)
            and all(ref() is parameter for ref, parameter in zip(refs, parameters, strict=True))
        )

    def is_unchanged_for(self, parameters: Sequence[torch.Tensor], dtype: torch.dtype, options: Any) -> bool:
        """Return whether the memory belongs to these parameters, and dtype, options and shapes are equal."""
        if not (self.dtype == dtype and self.is_for(parameters) and self.options == options):
            return False
        # A real parameter has its gradient's shape. real_shape also handles complex ones, but takes longer.
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

    def load_by_parameter(self, elements: ByParameter, tensors: ByParameter) -> None:
        """Set the saved state from other memories' by_parameter, merged.

        elements: entries with one element per element. Parameters that are missing get zeros.
        tensors: entries with one tensor per parameter. Parameters that are missing get None.
        """
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
    """The part of a bucket that belongs to one memory.

    slices: the slices of the bucket that hold the part's tensors, in the memory's order; None if the part is
        the whole bucket.
    """

    memory: Memory
    slices: list[slice] | None = None

    def unused(self, bucket: dist.GradBucket) -> list[int]:
        """Return the positions of the part's tensors that this rank's backward has not used, as far as known.

        torch's DDP calls a hook before it writes averages, so a parameter without a gradient was not used.
        gradcomp's buckets don't tell: the list is empty, and the Reducer calls CompressorState.take_back for
        each parameter that no rank has used.
        """
        if not isinstance(bucket, dist.GradBucket) or all(p.grad is not None for p in bucket.parameters()):
            return []
        unused = {id(parameter) for parameter in bucket.parameters() if parameter.grad is None}
        return [index for index, ref in enumerate(self.memory.parameters or ()) if id(ref()) in unused]

    def gather(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the part's elements, flat: the buffer itself if the part is the whole bucket."""
        return buffer if self.slices is None else torch.cat([buffer[each] for each in self.slices])

    def scatter(self, flat: torch.Tensor, buffer: torch.Tensor) -> None:
        """Write the part's elements, flat, back to the buffer: the reverse of gather."""
        if self.slices is not None:
            parts = flat.split([each.stop - each.start for each in self.slices])
            for each, part in zip(self.slices, parts, strict=True):
                buffer[each] = part


def _made(make: MakesCompressors, bucket: BucketSpec, options: Any) -> Compressor:
    """Make a compressor. Raises TypeError if it lacks options, or counts no whole elements."""
    name = getattr(make, "__name__", type(make).__name__)
    try:
        made = make(bucket, options)
    except AttributeError as error:
        if options is None and "NoneType" in str(error):
            raise TypeError(f"{name} takes options, but CompressorState got none: {error}") from error
        raise
    if not isinstance(made.sent_numel, int):
        raise TypeError(
            f"{name}.sent_numel is {made.sent_numel!r}, but must be an int: the number of elements of an "
            "all-reduce that sends as many bytes"
        )
    return made


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
        # Buckets that have been averaged memory by memory. If such a bucket comes again, its memories merge.
        self._divided_once: set[frozenset[int]] = set()

    def parts_of(self, bucket: dist.GradBucket, options: Any) -> tuple[list[BucketPart], list[Memory], int]:
        """Divide a bucket among memories.

        Returns three values: the bucket's parts, one per memory; the memories that were dropped because
        shapes or options have changed; and the number of unidentified parameters. Those are parameters in a
        checkpoint that could not be matched with this run's, so that their memories were dropped.
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
                sources, lost = self._memories_of(memory)
                # A ShardBucket's tensors are in pieces, which can't be gathered part by part.
                divided = [] if isinstance(bucket, ShardBucket) else self._divided(memory, sources)
                if divided and frozenset(indices) not in self._divided_once:
                    self._divided_once.add(frozenset(indices))
                    return divided, lost, num_unidentified
                self._merge_into(memory, sources)
                before = self._of_last_step.get(index)
                if before is not None and self._is_unclaimed(before):
                    lost.append(before)
        self._of_step[index] = memory
        return [BucketPart(memory)], lost, num_unidentified

    def end_step(self) -> None:
        """Delete the dead memories, except the memories that the ending step has used."""
        self._of_last_step, self._of_step = self._of_step, {}
        of_step = list(map(id, self._of_last_step.values()))
        dead = [key for key, each in self._memories.items() if each.is_dead and id(each) not in of_step]
        for key in dead:
            del self._memories[key]

    def _is_unclaimed(self, memory: Memory) -> bool:
        """Return whether a memory's parameters have been deleted, but the memory still has a state."""
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
        """Return (indices of a bucket's parameters, number of unidentified parameters); see parts_of."""
        if self.identity.are_new(parameters):
            for memory in self._memories.values():
                if memory.is_dead and (memory.index, memory.shapes) == (index, shapes):
                    # New tensors take the positions of deleted tensors: the program has rebuilt its model.
                    self.identity.bind(parameters, memory.parameter_indices)
                    break
        indices, unfit = self.identity.indices_of(parameters, shapes)
        lost = [each for each in self._loaded() if not unfit.isdisjoint(each.parameter_indices)]
        for memory in lost:
            del self._memories[tuple(memory.parameter_indices)]
        return indices, sum(len(memory.shapes) for memory in lost if not memory.is_empty)

    @property
    def have_parameters(self) -> bool:
        """True if buckets have brought parameters, or number_parameters has named some that still exist."""
        return self.identity.knows_any or any(memory.parameters for memory in self._memories.values())

    def _loaded(self) -> list[Memory]:
        """Return the loaded memories."""
        return [memory for memory in self._memories.values() if memory.is_loaded]

    def unclaimed(self) -> list[str]:
        """Name the parameters whose loaded errors still wait for a bucket, by shape if there is no name."""
        found = []
        for memory in self._loaded():
            if not memory.is_empty:
                names = self.identity.of(memory.parameter_indices)["names"]
                pairs = zip(memory.parameter_indices, memory.shapes, strict=True)
                found += [names.get(i, f"one of shape {list(shape)}") for i, shape in pairs]
        return found

    def _memories_of(self, memory: Memory) -> tuple[list[Memory], list[Memory]]:
        """Find the memories that share parameters with a new memory. Drop those that don't fit.

        Returns (the memories that fit, the dropped memories with a state). A memory fits if its options,
        dtype and the shared parameters' shapes are equal. Empty memories are dropped, unless loaded.
        """
        shape_of = dict(zip(memory.parameter_indices, memory.shapes, strict=True))
        sources: list[Memory] = []
        lost: list[Memory] = []
        for key, other in list(self._memories.items()):
            shapes = dict(zip(other.parameter_indices, other.shapes, strict=True))
            common = shapes.keys() & shape_of.keys()
            if not common:
                continue
            # An empty loaded memory is needed, too: it shows the saved run's arrangement of buckets.
            is_needed = not other.is_empty or other.is_loaded
            fits = (other.options, other.dtype) == (memory.options, memory.dtype) and all(
                shapes[i] == shape_of[i] for i in common
            )
            if is_needed and fits:
                sources.append(other)
                continue
            del self._memories[key]
            if not other.is_empty:
                lost.append(other)
        return sources, lost

    def _divided(self, memory: Memory, sources: list[Memory]) -> list[BucketPart]:
        """Return a new memory's bucket divided into parts, one for each of its source memories.

        sources: memories. Unless they have exactly the bucket's parameters, the result is an empty list.
        """
        if sorted(i for each in sources for i in each.parameter_indices) != sorted(memory.parameter_indices):
            return []
        offsets = memory.offsets
        refs = dict(zip(memory.parameter_indices, memory.parameters or (), strict=True))
        divided = []
        for source in sorted(sources, key=lambda source: source.index):
            source.parameters = [refs[i] for i in source.parameter_indices]
            pairs = zip(source.parameter_indices, source.numels, strict=True)
            slices = [slice(offsets[i], offsets[i] + numel) for i, numel in pairs]
            divided.append(BucketPart(source, slices))
        return divided

    def _merge_into(self, memory: Memory, sources: list[Memory]) -> None:
        """Move the states of a new memory's parameters into it from other memories, and register it.

        sources: the other memories. Their remaining parameters get a new memory with the remaining state.
        """
        elements: ByParameter = {}
        tensors: ByParameter = {}
        for source in sources:
            del self._memories[tuple(source.parameter_indices)]
            entries = source.by_parameter()
            for merged, given in zip((elements, tensors), entries, strict=True):
                for name, by_index in given.items():
                    merged.setdefault(name, {}).update(by_index)
            indices = source.parameter_indices
            left = [position for position, i in enumerate(indices) if i not in memory.parameter_indices]
            if left and not source.is_empty:
                remainder = Memory(
                    source.options,
                    source.dtype,
                    source.index,
                    [source.shapes[position] for position in left],
                    [indices[position] for position in left],
                    None if source.parameters is None else [source.parameters[position] for position in left],
                )
                remainder.load_by_parameter(*entries)
                self._memories[tuple(remainder.parameter_indices)] = remainder
        memory.load_by_parameter(elements, tensors)
        self._memories[tuple(memory.parameter_indices)] = memory

    def common_digest(self) -> str:
        """Return a digest of the saved entries that must be the same on every rank."""
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
        """Multiply the errors of all memories by factor."""
        for memory in self._memories.values():
            memory.scale_errors(factor)

    def save_and_drop_compressors(self) -> None:
        """Save the states of all compressors, and drop the compressors, because the group has changed."""
        for memory in self._memories.values():
            memory.save_and_drop_compressor()

    def saved(self) -> tuple[dict[str, Any], list[Memory]]:
        """Return (the identity of the indexed parameters, copies of all memories in the order of buckets).

        The copies have a saved state, but no compressor and no parameters.
        """
        memories = [
            Memory(m.options, m.dtype, m.index, m.shapes, m.parameter_indices, saved=m.own_state())
            for m in sorted(self._memories.values(), key=lambda memory: memory.index)
        ]
        return self.identity.of(i for memory in memories for i in memory.parameter_indices), memories

    def load(self, identity: dict[str, Any], memories: Iterable[Memory]) -> None:
        """Replace all memories.

        identity, memories: as from `saved`.
        """
        self.identity.load(identity)
        self._of_step, self._of_last_step, self._divided_once = {}, {}, set()
        self._memories = {tuple(memory.parameter_indices): memory for memory in memories}
