"""What a state remembers of one bucket, and the part of a bucket that such a memory belongs to."""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from .compressor import Compressor, State, with_scaled_errors
from .grad_bucket import real_shape

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.

Shape = tuple[int, ...]
# Tensors by the name of a state's entry and the index of the parameter.
ByParameter = dict[str, dict[int, torch.Tensor]]


@dataclass
class Memory:
    """What is remembered of one bucket.

    options, dtype: what its compressor depends on, beside the shapes.
    index: the bucket's index, on which its random choices depend.
    shapes, parameter_indices, parameters: one entry per parameter, in the bucket's order. parameters is None
    for a loaded memory until a bucket brings its parameters.
    compressor, device, make: the compressor, from the first compressed step on, its device, and what made
    it.
    saved: the state that the compressor will load once it is made.
    is_warmed_up: whether the compressor of the steps after the first ones has been warmed up.
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
    make: Callable[..., Compressor] | None = None
    is_warmed_up: bool = False

    @property
    def state(self) -> State | None:
        """The state of the compressor, or the one that it will start from."""
        return self.saved if self.compressor is None else self.compressor.state()

    def own_state(self) -> State | None:
        """Return the state in tensors that nothing else refers to."""
        return _copied(self.saved) if self.compressor is None else self.compressor.state()

    def put_away(self) -> None:
        """Take the state out of the compressor, which is not needed any more."""
        if self.compressor is not None:
            self.saved, self.compressor = self.compressor.state() or None, None

    def scale_errors(self, factor: float) -> None:
        """Multiply the errors, wherever they are."""
        if self.compressor is not None:
            self.compressor.scale_errors(factor)
        elif self.saved is not None:
            self.saved = with_scaled_errors(self.saved, factor)

    @property
    def is_empty(self) -> bool:
        """True if nothing has been compressed or loaded yet."""
        return self.compressor is None and self.saved is None

    @property
    def numels(self) -> list[int]:
        """The number of elements of each parameter."""
        return list(map(math.prod, self.shapes))

    @property
    def offsets(self) -> dict[int, int]:
        """The offset of each parameter in the bucket, by parameter index."""
        return dict(zip(self.parameter_indices, accumulate(self.numels, initial=0), strict=False))

    @property
    def made_for(self) -> tuple[Any, ...]:
        """The values that its compressor depends on."""
        return self.options, self.dtype, self.shapes

    def is_for(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether it belongs to these parameters, in this order."""
        refs = self.parameters
        return (
            refs is not None
            and len(refs) == len(parameters)
            and all(ref() is parameter for ref, parameter in zip(refs, parameters, strict=True))
        )

    def is_still_for(self, parameters: Sequence[torch.Tensor], dtype: torch.dtype, options: Any) -> bool:
        """Return whether it belongs to these parameters, in this order, and nothing has changed."""
        if not (self.dtype == dtype and self.is_for(parameters) and self.options == options):
            return False
        # Real parameters' shapes are the gradients'; those of complex ones take longer to tell.
        shapes: list[Shape] = [parameter.shape for parameter in parameters]
        return shapes == self.shapes or list(map(real_shape, parameters)) == self.shapes

    @property
    def is_dead(self) -> bool:
        """True if its parameters were once known, and all have been deleted since."""
        return self.parameters is not None and all(ref() is None for ref in self.parameters)

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
        gradcomp's buckets don't say. The Reducer calls CompressedAveraging.take_back once it knows what no
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
