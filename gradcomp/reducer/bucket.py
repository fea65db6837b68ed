"""Buckets of gradients: which parameters share one, and the memory that they lie in."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch

from gradcomp import ops
from gradcomp.layout import FlatLayout

from .parameters import check_gradient, kind_of_gradient


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

    parameters: of one dtype on one device. numbers: theirs in the reducer. names: for errors. as_view: gradients
    become views of the buffer. A view has its parameter's strides, so a channels-last gradient lies in the buffer as
    it lies in memory; a parameter whose elements have gaps or overlap has a contiguous view.

    In a step: begin(), num_pending counted down as parameters become ready, fill(), and after the averaging
    give(places). A place is a parameter's in the bucket.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        as_view: bool = False,
    ):
        self.numbers, self.parameters = list(numbers), list(parameters)
        self._names, self._as_view = list(names), as_view
        numels = [parameter.numel() for parameter in parameters]
        self.buffer = torch.zeros(sum(numels), dtype=parameters[0].dtype, device=parameters[0].device)
        parts = self.buffer.split(numels)
        self.views = [_like(part, parameter) for part, parameter in zip(parts, parameters, strict=True)]
        self._addresses = [view.data_ptr() for view in self.views]
        self._kind = kind_of_gradient(parameters[0])
        self._layouts: dict[tuple[int, int], FlatLayout] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a step: no parameter is ready."""
        self.num_pending = len(self.parameters)

    def fill(self, scale: float) -> None:
        """buffer = scale · the parameters' gradients; zeros where there are none.

        On CUDA in one launch, unless some gradients lie in the buffer already. Raises RuntimeError for a gradient of
        another layout, dtype or device.
        """
        outside: list[int] = []
        gradients: list[torch.Tensor] = []
        absent: list[torch.Tensor] = []
        held: list[torch.Tensor] = []
        for place, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None:
                absent.append(self.views[place])
                continue
            check_gradient(gradient, self._kind, self._names[place])
            if self._holds(place, gradient):
                held.append(self.views[place])
            else:
                outside.append(place)
                gradients.append(gradient)
        if absent:
            torch._foreach_zero_(absent)
        if scale != 1.0 and len(held) == len(self.views):
            self.buffer.mul_(scale)
        elif scale != 1.0 and held:
            torch._foreach_mul_(held, scale)
        for run in _runs(outside):
            self._gather(outside[run], gradients[run], scale)

    def average_beyond(self, place: int, gradient: torch.Tensor | None) -> torch.Tensor:
        """A parameter's part of the buffer less this gradient, flat, as it lies there; None counts as zeros."""
        view = self.views[place]
        beyond = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device)
        torch.sub(view, 0 if gradient is None else gradient, out=beyond)
        return beyond.as_strided((view.numel(),), (1,))

    def give(self, places: Iterable[int]) -> None:
        """Make these parameters' gradients the buffer's parts: views of it, or in the memory that they have."""
        if self._as_view:
            for place in places:
                if self.parameters[place].grad is not self.views[place]:
                    self.parameters[place].grad = self.views[place]
            return
        outside: list[int] = []
        gradients: list[torch.Tensor] = []
        for place in places:
            gradient = self.parameters[place].grad
            if gradient is None:
                gradient = torch.empty_like(self.views[place], memory_format=torch.preserve_format)
                self.parameters[place].grad = gradient
            elif gradient.requires_grad:
                # With create_graph its graph is that of this rank's gradient, not of the average.
                gradient = gradient.detach()
                self.parameters[place].grad = gradient
            if not self._holds(place, gradient):
                outside.append(place)
                gradients.append(gradient)
        for run in _runs(outside):
            chosen = outside[run]
            views = self.views[chosen[0] : chosen[-1] + 1]
            ops.scatter(views, self._layout(chosen), out=gradients[run])

    def _holds(self, place: int, gradient: torch.Tensor) -> bool:
        # Most don't, and their address alone tells.
        return gradient.data_ptr() == self._addresses[place] and is_same_memory(gradient, self.views[place])

    def _gather(self, neighbours: list[int], gradients: list[torch.Tensor], scale: float) -> None:
        views = self.views[neighbours[0] : neighbours[-1] + 1]
        ops.gather(gradients, self._layout(neighbours), out=views, scale=scale)
        if self._as_view:
            # At once: the memory of gradients that autograd has made anew is free before the next ones are made.
            for place, view in zip(neighbours, views, strict=True):
                self.parameters[place].grad = view

    def _layout(self, neighbours: list[int]) -> FlatLayout:
        key = (neighbours[0], neighbours[-1])
        if key not in self._layouts:
            self._layouts[key] = FlatLayout([(self.views[place].numel(),) for place in neighbours])
        return self._layouts[key]


def _runs(places: list[int]) -> Iterator[slice]:
    """The parts of an ascending list in which each number is one more than the last."""
    start = 0
    if places and places[-1] - places[0] + 1 == len(places):
        start = len(places)
        yield slice(0, start)
    for i in range(start + 1, len(places) + 1):
        if i == len(places) or places[i] != places[i - 1] + 1:
            yield slice(start, i)
            start = i


def _like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    # Its strides if its elements fill a piece of memory in some order, else contiguous ones.
    strides = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.shape, strides, part.storage_offset())


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.shape == other.shape
