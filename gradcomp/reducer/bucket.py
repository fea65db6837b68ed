"""Buckets of gradients: which parameters share one, and the memory that holds their gradients."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import torch

from gradcomp import ops
from gradcomp.layout import FlatLayout

from .parameters import check_gradient, expected_gradient


def assign_buckets(
    sizes_bytes: Sequence[int], keys: Sequence[Hashable], caps_bytes: tuple[float, float]
) -> list[list[int]]:
    """Divide tensors among buckets, in the order given. Returns the indices of each bucket's tensors.

    sizes_bytes: the tensors' sizes.
    keys: only tensors of one key (dtype and device) share a bucket. None: a bucket for this tensor alone.
    caps_bytes: the cap of a key's first bucket, and the cap of its others. A small first bucket lets
        communication start early.

    A bucket is full when it has reached its cap, as in torch's DDP: its last tensor may exceed the cap.
    Buckets come in the order in which they are full.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    full: list[list[int]] = []
    filled = dict.fromkeys(keys, 0.0)
    caps = dict.fromkeys(keys, caps_bytes[0])
    for index, (size, key) in enumerate(zip(sizes_bytes, keys, strict=True)):
        if key is None:
            full.append([index])
            continue
        open_buckets.setdefault(key, []).append(index)
        filled[key] += size
        if filled[key] >= caps[key]:
            full.append(open_buckets.pop(key))
            filled[key], caps[key] = 0.0, caps_bytes[1]
    return sorted([*full, *open_buckets.values()], key=max)


class Bucket:
    """One flat buffer, and a view of it for every parameter, in the parameter's memory order.

    indices: the parameters' indices in the Reducer.
    parameters: of one dtype on one device.
    names: for errors.
    as_view: gradients become views of the buffer.

    A view has its parameter's strides, so a channels-last gradient is stored in the buffer as in its own
    memory. A parameter with gaps or overlaps between its elements has a contiguous view.

    A step calls begin(), counts num_pending down as parameters become ready, calls fill(), and after the
    averaging write_back(). A position is a parameter's place in the bucket.
    """

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        as_view: bool = False,
    ):
        self.indices, self.parameters = list(indices), list(parameters)
        self._names, self._as_view = list(names), as_view
        numels = [parameter.numel() for parameter in parameters]
        self.buffer = torch.zeros(sum(numels), dtype=parameters[0].dtype, device=parameters[0].device)
        # Otherwise the first backward would compile.
        ops.compile_flatten(self.buffer.dtype, self.buffer.device, also_unflatten=not as_view)
        parts = self.buffer.split(numels)
        self.views = [_like(part, parameter) for part, parameter in zip(parts, parameters, strict=True)]
        self._addresses = [view.data_ptr() for view in self.views]
        self._expected = expected_gradient(parameters[0])
        self._apart: set[int] = set()  # positions of gradients that are never views
        self._runs: dict[tuple[int, int], tuple[FlatLayout, torch.Tensor, list[torch.Tensor]]] = {}
        self.begin()

    def keep_apart(self, indices: AbstractSet[int]) -> None:
        """Leave these parameters' gradients in memory of their own, with as_view, too."""
        self._apart = {position for position, index in enumerate(self.indices) if index in indices}

    def begin(self) -> None:
        """Begin a step: no parameter is ready."""
        self.num_pending = len(self.parameters)

    def fill(self, scale: float) -> None:
        """buffer = scale · the parameters' gradients; zeros where there are none.

        On CUDA in one launch, unless some gradients are in the buffer already. Raises RuntimeError for a
        gradient of another layout, dtype or device.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        self._check(gradients)
        if self._apart:
            gradients = self._moved_apart(gradients)
        absent = [view for view, gradient in zip(self.views, gradients, strict=True) if gradient is None]
        outside = self._outside(range(len(gradients)), gradients)
        if absent:
            torch._foreach_zero_(absent)
        if scale != 1.0:
            self._scale_held(set(outside), gradients, scale)
        for run in _runs(outside):
            layout, part, views = self._run(outside[run])
            members = [gradients[position] for position in outside[run]]
            ops.flatten(members, layout, out=part, scale=scale, parts=views)  # type: ignore[arg-type]
            if self._as_view:
                # At once: this frees the gradients' own memory before autograd makes the next gradients.
                for position, view in zip(outside[run], views, strict=True):
                    if position not in self._apart:
                        self.parameters[position].grad = view

    def _moved_apart(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Move the gradients that are in the buffer, and may not be views of it, to memory of their own."""
        inside = self._apart.difference(self._outside(range(len(gradients)), gradients))
        for position in inside:
            gradient = gradients[position]
            if gradient is not None:
                self.parameters[position].grad = gradient.clone()
        return [parameter.grad for parameter in self.parameters]

    def _scale_held(self, outside: set[int], gradients: Sequence[torch.Tensor | None], scale: float) -> None:
        """Scale the gradients that are in the buffer already.

        outside: positions of gradients elsewhere.
        """
        held = [
            view
            for position, view in enumerate(self.views)
            if gradients[position] is not None and position not in outside
        ]
        if len(held) == len(self.views):
            self.buffer.mul_(scale)
        elif held:
            ops.scale_(held, scale)

    def average_beyond(self, position: int, gradient: torch.Tensor | None) -> torch.Tensor:
        """Return a parameter's part of the buffer, flat, less this gradient. None counts as zeros."""
        view = self.views[position]
        beyond = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device)
        torch.sub(view, 0 if gradient is None else gradient, out=beyond)
        return beyond.as_strided((view.numel(),), (1,))

    def write_back(self, left_out: AbstractSet[int] = frozenset()) -> None:
        """Make parts of the buffer the gradients: as views, or copied to the gradients' own memory.

        left_out: the positions of parameters that keep the gradients they have.
        """
        positions = [position for position in range(len(self.parameters)) if position not in left_out]
        if self._as_view:
            for position in positions:
                if position not in self._apart and self.parameters[position].grad is not self.views[position]:
                    self.parameters[position].grad = self.views[position]
            positions = [position for position in positions if position in self._apart]
            if not positions:
                return
        gradients = [self._own_gradient(position) for position in positions]
        own = dict(zip(positions, gradients, strict=True))
        outside = self._outside(positions, gradients)
        for run in _runs(outside):
            layout, part, views = self._run(outside[run])
            ops.unflatten(part, layout, out=[own[position] for position in outside[run]], parts=views)

    def _own_gradient(self, position: int) -> torch.Tensor:
        """Return a parameter's .grad, in memory of its own, to write an average to. Makes one for None."""
        parameter = self.parameters[position]
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.empty_like(self.views[position], memory_format=torch.preserve_format)
            parameter.grad = gradient
        elif gradient.requires_grad:
            # With create_graph, the graph computes this rank's gradient, not the average.
            gradient = gradient.detach()
            parameter.grad = gradient
        return gradient

    def _check(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Raise RuntimeError for a gradient of another layout, dtype or device than the bucket's."""
        found = {(each.layout, each.dtype, each.device) for each in gradients if each is not None}
        if not found <= {self._expected}:
            for gradient, name in zip(gradients, self._names, strict=True):
                check_gradient(gradient, self._expected, name)

    def _outside(self, positions: Iterable[int], gradients: Iterable[torch.Tensor | None]) -> list[int]:
        """Return the positions of gradients outside the buffer."""
        # The address comes first: most gradients are outside, and it alone shows that.
        return [
            position
            for position, gradient in zip(positions, gradients, strict=True)
            if gradient is not None
            and (
                gradient.data_ptr() != self._addresses[position]
                or not is_same_memory(gradient, self.views[position])
            )
        ]

    def _run(self, positions: list[int]) -> tuple[FlatLayout, torch.Tensor, list[torch.Tensor]]:
        """Return consecutive parameters' layout, their part of the buffer, and their views."""
        key = (positions[0], positions[-1])
        if key not in self._runs:
            views = [self.views[position] for position in positions]
            layout = FlatLayout([view.shape for view in views], [view.stride() for view in views])
            start = views[0].storage_offset()
            self._runs[key] = layout, self.buffer[start : start + layout.numel], views
        return self._runs[key]


def _runs(positions: list[int]) -> Iterator[slice]:
    """Yield slices of an ascending list: runs of consecutive numbers."""
    start = 0
    if positions and positions[-1] - positions[0] + 1 == len(positions):
        start = len(positions)
        yield slice(0, start)
    for i in range(start + 1, len(positions) + 1):
        if i == len(positions) or positions[i] != positions[i - 1] + 1:
            yield slice(start, i)
            start = i


def _like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the part as a view of the parameter's shape, with its strides if they leave no gaps."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.shape, strides, part.storage_offset())


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same elements in the same order."""
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.shape == other.shape
