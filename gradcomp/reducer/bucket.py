"""Buckets of gradients: which parameters share one, and what a communication hook sees of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch

from gradcomp import ops
from gradcomp.layout import FlatLayout

# On the CPU scaling while copying saves a pass over memory, copying all and then scaling the buffer saves a call
# per tensor. With so many elements per tensor, the mean of a bucket, the former is faster.
FUSED_NUMEL = 1 << 14
FLATTENED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class GradBucket:
    """A bucket as communication hooks see it, with the methods of ``torch.distributed.GradBucket``.

    buffer: the gradients one after another, 1-D, undivided. The hook's result, of as many elements, takes its
    place.
    """

    def __init__(self, index: int, buffer: torch.Tensor, parameters: Sequence[torch.Tensor], is_last: bool):
        self._index, self._buffer, self._parameters, self._is_last = index, buffer, parameters, is_last

    def index(self) -> int:
        """Its place in the order in which buckets are averaged, from 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put another tensor of as many elements in the buffer's place (of another dtype, say)."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """The parts of the current buffer in the parameters' shapes."""
        parts = self._buffer.split([parameter.numel() for parameter in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether this is the step's last bucket."""
        return self._is_last


def assign_buckets(
    sizes_bytes: Sequence[int], kinds: Sequence[Hashable], caps_bytes: tuple[float, float]
) -> list[list[int]]:
    """Share tensors out into buckets, in the order given: [numbers of a bucket's tensors].

    sizes_bytes: of the tensors. kinds: only tensors of one kind (dtype, device) share a bucket; None: a bucket for
    this tensor alone. caps_bytes: of a kind's first bucket, which should be small so that communication starts
    early, and of its others. A tensor larger than the cap has a bucket to itself. Buckets come in the
    order in which they are full.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    full: list[list[int]] = []
    filled = dict.fromkeys(kinds, 0.0)
    caps = dict.fromkeys(kinds, caps_bytes[0])
    for number, (size, kind) in enumerate(zip(sizes_bytes, kinds, strict=True)):
        if kind is None:
            full.append([number])
            continue
        bucket = open_buckets.setdefault(kind, [])
        if bucket and filled[kind] + size > caps[kind]:
            full.append(bucket)
            bucket = open_buckets[kind] = []
            filled[kind], caps[kind] = 0.0, caps_bytes[1]
        bucket.append(number)
        filled[kind] += size
    return sorted([*full, *open_buckets.values()], key=max)


class Bucket:
    """A bucket's memory: one flat buffer, and a view of it for every parameter, in that parameter's memory order.

    parameters: of one dtype on one device. numbers: theirs in the reducer. A view has its parameter's strides,
    so a channels-last gradient lies in the buffer as it lies in memory; a parameter whose elements have gaps or
    overlap has a contiguous view.
    """

    def __init__(self, numbers: Sequence[int], parameters: Sequence[torch.Tensor]):
        self.numbers, self.parameters = list(numbers), list(parameters)
        numels = [parameter.numel() for parameter in parameters]
        self.buffer = torch.zeros(sum(numels), dtype=parameters[0].dtype, device=parameters[0].device)
        parts = self.buffer.split(numels)
        self.views = [_like(part, parameter) for part, parameter in zip(parts, parameters, strict=True)]
        self._addresses = [view.data_ptr() for view in self.views]
        self._layouts: dict[tuple[int, int], FlatLayout] = {}

    def fill(self, scale: float) -> None:
        """buffer = scale · the parameters' gradients; zeros where there are none.

        On CUDA in one launch, unless some gradients lie in the buffer already.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        outside: list[int] = []
        for i, gradient in enumerate(gradients):
            if gradient is None:
                self.views[i].zero_()
            elif not self._holds(i, gradient):
                outside.append(i)
        scaled = set() if scale == 1.0 else set(range(len(gradients)))
        if outside:
            scaled -= self._gather(outside, [gradients[i] for i in outside], scale)  # type: ignore[misc]
        if len(scaled) == len(gradients):
            self.buffer.mul_(scale)
        elif scaled:
            torch._foreach_mul_([self.views[i] for i in sorted(scaled)], scale)

    def give(self, chosen: Iterable[int]) -> None:
        """Write the chosen parameters' parts of the buffer to their gradients, which keep their own memory."""
        outside: list[int] = []
        gradients: list[torch.Tensor] = []
        for i in chosen:
            gradient = self.parameters[i].grad
            if gradient is None:
                gradient = torch.empty_like(self.views[i], memory_format=torch.preserve_format)
                self.parameters[i].grad = gradient
            if not self._holds(i, gradient):
                outside.append(i)
                gradients.append(gradient)
        if not outside:
            return
        if not self._has_kernels(outside) or not all(map(self._fits, outside, gradients)):
            torch._foreach_copy_(gradients, [self.views[i] for i in outside])
            return
        layout, part = self._part(outside)
        ops.unflatten(part, layout, out=[_flat(gradient) for gradient in gradients])

    def alias(self, chosen: Iterable[int]) -> None:
        """Make the chosen parameters' gradients views of the buffer."""
        for i in chosen:
            self.parameters[i].grad = self.views[i]

    def _holds(self, i: int, gradient: torch.Tensor) -> bool:
        # Most don't, and their address alone tells.
        return gradient.data_ptr() == self._addresses[i] and is_same_memory(gradient, self.views[i])

    def _gather(self, chosen: list[int], gradients: list[torch.Tensor], scale: float) -> set[int]:
        """Copy these gradients to their parts of the buffer; those of them that are scaled by then."""
        views = [self.views[i] for i in chosen]
        if self._has_kernels(chosen):
            ordered = [
                gradient
                if self._fits(i, gradient)
                else torch.empty_strided(
                    view.shape, view.stride(), dtype=view.dtype, device=view.device
                ).copy_(gradient)
                for i, gradient, view in zip(chosen, gradients, views, strict=True)
            ]
            layout, part = self._part(chosen)
            ops.flatten([_flat(gradient) for gradient in ordered], layout, out=part, scale=scale)
            return set(chosen)
        is_fused = not self.buffer.is_cuda and self.buffer.numel() >= FUSED_NUMEL * len(self.views)
        if scale == 1.0 or not is_fused:
            torch._foreach_copy_(views, gradients)
            return set()
        for gradient, view in zip(gradients, views, strict=True):
            torch.mul(gradient, scale, out=view)
        return set(chosen)

    def _has_kernels(self, chosen: list[int]) -> bool:
        """Whether one launch copies these parts: the kernels take neighbours."""
        if not ops.runs_triton(self.buffer.device) or self.buffer.dtype not in FLATTENED:
            return False
        return chosen[-1] - chosen[0] + 1 == len(chosen)

    def _fits(self, i: int, gradient: torch.Tensor) -> bool:
        """Whether the gradient's elements lie in memory as in the buffer."""
        view = self.views[i]
        return gradient.stride() == view.stride() or (gradient.is_contiguous() and view.is_contiguous())

    def _part(self, chosen: list[int]) -> tuple[FlatLayout, torch.Tensor]:
        """The neighbours' layout and part of the buffer."""
        key = (chosen[0], chosen[-1])
        if key not in self._layouts:
            self._layouts[key] = FlatLayout([(self.views[i].numel(),) for i in chosen])
        layout = self._layouts[key]
        start = self.views[chosen[0]].storage_offset()
        return layout, self.buffer[start : start + layout.numel]


def _like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    # Its strides if its elements fill a piece of memory in some order, else contiguous ones.
    strides = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.shape, strides, part.storage_offset())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without gaps as it lies in memory, 1-D."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.shape == other.shape
