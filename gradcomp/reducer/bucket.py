"""Buckets of gradients: which parameters share one, their memory, and their average over the ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.comm.all_reduce import average_in_place, start_all_reduce
from gradcomp.comm.bucket import GradBucket, Hooked, as_real, memory_layout, require_hook, result_of
from gradcomp.comm.exchange import SUM, has_delay
from gradcomp.comm.process_group import Explaining, resolve_group
from gradcomp.hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from gradcomp.layout import FlatLayout

from .parameters import check_gradient


def assign_buckets(
    sizes_bytes: Sequence[int], keys: Sequence[Hashable], caps_bytes: tuple[float, float]
) -> list[list[int]]:
    """Divide tensors of these sizes among buckets, in order. Returns the indices of each bucket's tensors.

    keys: only tensors of one key (dtype and device) share a bucket.
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
        open_buckets.setdefault(key, []).append(index)
        filled[key] += size
        if filled[key] >= caps[key]:
            full.append(open_buckets.pop(key))
            filled[key], caps[key] = 0.0, caps_bytes[1]
    return sorted([*full, *open_buckets.values()], key=max)


# Consecutive parameters of a bucket: their positions, layout, part of the buffer, and views.
_Run = tuple[slice, FlatLayout, torch.Tensor, list[torch.Tensor]]


class Bucket:
    """One flat buffer, and a view of it for every parameter, in memory_layout.

    indices: the Reducer's indices of the bucket's parameters, which have one dtype and device.
    sent_in: the buffer's dtype, if the parameters are floating-point; None for the parameters' own.

    A step calls fill(), and after the averaging write_back(). A position is a parameter's place in a bucket.

    views: the bucket's own. Gradients are other tensors on their memory: code that replaces a gradient's
        .data, as Module.to() does, doesn't reach the views.
    owner_of: the names by the addresses of the views, of all buckets of a step.
    """

    def __init__(
        self,
        indices: Sequence[int],
        params: Sequence[torch.Tensor],
        all_names: Sequence[str],
        sent_in: torch.dtype | None = None,
    ):
        self.indices = list(indices)
        self.parameters = parameters = [params[index] for index in indices]
        self._names = names = [all_names[index] for index in indices]
        layout = memory_layout(parameters, as_real=False)
        dtype, device = parameters[0].dtype, parameters[0].device
        self.is_rounded = sent_in is not None and dtype.is_floating_point and ops.runs_triton(device)
        self.buffer = torch.zeros(layout.numel, dtype=sent_in if self.is_rounded else dtype, device=device)
        # Otherwise the first backward would compile.
        ops.compile_flatten(dtype, self.buffer.dtype, device)
        self.views = layout.parts(self.buffer)
        self._given = [view.detach() for view in self.views]
        self._addresses = [view.data_ptr() for view in self.views]
        self.owner_of = {at: name for at, name in zip(self._addresses, names, strict=True) if at}
        self._expected = torch.strided, dtype, device
        self._run_of: dict[tuple[int, int], _Run] = {}  # by the first and the last position

    def fill(self, scale: float, as_view: bool = False) -> None:
        """buffer = scale · the parameters' gradients; zeros where there are none.

        as_view: gradients become views of the buffer; otherwise they have, or get, memory of their own.

        On CUDA in one launch, unless some gradients are in the buffer already. Raises RuntimeError for a
        gradient of another layout, dtype, device or (as_view) shape, or in another parameter's memory.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        found = {(each.layout, each.dtype, each.device) for each in gradients if each is not None}
        if not found <= {self._expected}:
            self._check(gradients)
        absent = [view for view, gradient in zip(self.views, gradients, strict=True) if gradient is None]
        outside = self._outside(gradients)
        if absent:
            torch._foreach_zero_(absent)
        is_in_place = len(outside) + len(absent) < len(gradients)  # without as_view: views of an earlier step
        if (is_in_place and not as_view) or not self.owner_of.keys().isdisjoint(outside.values()):
            self._take_out(gradients, outside, as_view)
        if scale != 1.0 and len(outside) + len(absent) < len(gradients):
            pairs = enumerate(zip(self.views, gradients, strict=True))
            held = [view for i, (view, each) in pairs if each is not None and i not in outside]
            if len(held) == len(self.views):
                self.buffer.mul_(scale)
            else:
                ops.scale_(held, scale)
        for where, layout, part, views in self._runs(sorted(outside)):
            if as_view and tuple([each.shape for each in gradients[where]]) != layout.shapes:  # type: ignore[union-attr]
                self._check(gradients)
            ops.flatten(gradients[where], layout, out=part, scale=scale, parts=views)  # type: ignore[arg-type]
            if as_view:
                # At once: this frees the gradients' own memory before autograd makes the next gradients.
                for position in range(where.start, where.stop):
                    self._give(position)

    def _check(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for gradient, view, name in zip(gradients, self.views, self._names, strict=True):
            check_gradient(gradient, self._expected, view.shape, name)

    def _give(self, position: int) -> None:
        """Make the parameter's part of the buffer its gradient."""
        if not self._given[position].is_set_to(self.views[position]):
            self._given[position] = self.views[position].detach()
        self.parameters[position].grad = self._given[position]

    def _take_out(self, gradients: list[torch.Tensor | None], outside: dict[int, int], as_view: bool) -> None:
        """Copy the gradients that may not stay in the buffer, or are there in another order of elements.

        Raises RuntimeError for a gradient in another parameter's part, of this or another bucket.
        """
        for position, address in enumerate(() if as_view else self._addresses):
            if gradients[position] is not None:
                outside.setdefault(position, address)
        for position, address in outside.items():
            name, owner = self._names[position], self.owner_of.get(address)
            if owner == name:
                gradients[position] = gradients[position].clone()  # type: ignore[union-attr]
                self.parameters[position].grad = gradients[position]
            elif owner is not None:
                raise RuntimeError(
                    f"the gradient of parameter {name} is in the memory of the gradient of {owner}, from "
                    "where its .grad or .grad.data was assigned. With gradient_as_bucket_view every gradient "
                    "is a bucket's memory of its own: assign a clone()"
                )

    def average_beyond(self, position: int, gradient: torch.Tensor | None) -> torch.Tensor:
        """Return a parameter's part of the buffer, flat, less this gradient. None counts as zeros."""
        view = self.views[position]
        beyond = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device)
        torch.sub(view, 0 if gradient is None else gradient, out=beyond)
        return beyond.as_strided((view.numel(),), (1,))

    def write_back(self, left_out: AbstractSet[int] = frozenset(), as_view: bool = False) -> None:
        """Make parts of the buffer the gradients: as views, or copied to the gradients' own memory.

        left_out: the positions of parameters that keep the gradients they have.
        """
        copied = set(range(len(self.parameters))) - left_out
        if as_view:
            for position in copied:
                gradient, address = self.parameters[position].grad, self._addresses[position]
                if self._given[position] is not gradient or gradient.data_ptr() != address:
                    self._give(position)
            return
        own: list[torch.Tensor | None] = [None] * len(self.parameters)
        for position in copied:
            gradient = self.parameters[position].grad
            if gradient is None or gradient.is_inference():
                gradient = torch.empty_like(self.views[position], dtype=self._expected[1])
                self.parameters[position].grad = gradient
            elif gradient.requires_grad:
                # With create_graph, the graph computes this rank's gradient, not the average.
                gradient = gradient.detach()
                self.parameters[position].grad = gradient
            own[position] = gradient
        for where, layout, part, views in self._runs(list(self._outside(own))):
            ops.unflatten(part, layout, out=own[where], parts=views)  # type: ignore[arg-type]

    def _outside(self, gradients: Sequence[torch.Tensor | None]) -> dict[int, int]:
        """Return the positions and addresses of gradients that are not their part of the buffer."""
        # The address comes first: most gradients are outside, and it alone shows that.
        return {
            position: address
            for position, gradient in enumerate(gradients)
            if gradient is not None
            and (
                (address := gradient.data_ptr()) != self._addresses[position]
                or not gradient.is_set_to(self.views[position])
            )
        }

    def _runs(self, positions: list[int]) -> Iterator[_Run]:
        """Yield ascending positions in runs of consecutive ones: each has one piece of the buffer."""
        start = 0
        while start < len(positions):
            stop = start + 1
            if positions[-1] - positions[start] == len(positions) - 1 - start:
                stop = len(positions)
            while stop < len(positions) and positions[stop] == positions[stop - 1] + 1:
                stop += 1
            ends = positions[start], positions[stop - 1]
            if ends not in self._run_of:
                where = slice(ends[0], ends[1] + 1)
                views = self.views[where]
                layout = FlatLayout([view.shape for view in views], [view.stride() for view in views])
                offset = views[0].storage_offset()
                self._run_of[ends] = where, layout, self.buffer[offset : offset + layout.numel], views
            yield self._run_of[ends]
            start = stop


Pending = torch.futures.Future[torch.Tensor] | dist.Work  # of a hook or exchanges; of an all-reduce


class BucketCommunicator:
    """Assigns parameters, known by their indices, to buckets, and averages the buckets.

    caps_bytes: see assign_buckets.
    wants_views, as_view: whether gradients shall become views of the buckets, and whether the step's do.
    sparse: parameters with sparse gradients, which are in no bucket.
    divisor: without a hook, sums of gradients are divided by it; at first the group's size.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        group: dist.ProcessGroup,
        caps_bytes: tuple[float, float],
        wants_views: bool,
        sparse: set[int],
    ):
        self.params, self.names, self.sparse = params, names, sparse
        self._group, self.caps_bytes = group, caps_bytes
        self.wants_views = self.as_view = wants_views
        self.hooked, self._hooks_name = Hooked(None, None), Hooked(None, None).name
        self._sent_in: torch.dtype | None = None  # what buckets are rounded to
        self.divisor = group.size()
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[int, int] = {}  # a parameter's bucket

    @torch.no_grad()
    @torch.inference_mode(False)
    def build(self, order: Iterable[int]) -> None:
        """Assign the parameters, in this order, to new buckets. Gradients that are views move there."""
        indices = [index for index in order if index not in self.sparse]
        params = [self.params[index] for index in indices]
        sizes = [param.numel() * param.element_size() for param in params]
        keys = [(param.dtype, param.device) for param in params]
        self.buckets = []
        for positions in assign_buckets(sizes, keys, self.caps_bytes):
            chosen = [indices[position] for position in positions]
            self.buckets.append(Bucket(chosen, self.params, self.names, self._sent_in))
        self.bucket_of = {index: number for number, each in enumerate(self.buckets) for index in each.indices}
        owner_of = {at: name for bucket in self.buckets for at, name in bucket.owner_of.items()}
        for bucket in self.buckets:
            bucket.owner_of = owner_of
            if self.as_view:
                bucket.fill(1.0, as_view=True)

    def register(self, hooked: Hooked) -> None:
        """Average with a hook. On kernels no 16-bit hook is called: fill() rounds the gradients."""
        require_hook(hooked.hook, hooked.state)
        if self.hooked.hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        for hook, dtype in ((fp16_compress_hook, torch.float16), (bf16_compress_hook, torch.bfloat16)):
            if hooked.hook is hook and not self.wants_views:
                self._sent_in, self._group = dtype, resolve_group(hooked.name, hooked.state, "state")
                self.build([index for bucket in self.buckets for index in bucket.indices])
        self.hooked, self._hooks_name = hooked, hooked.name

    @torch.no_grad()
    def start(self, number: int, is_last: bool) -> Pending:
        """Fill a bucket and start its averaging.

        is_last: whether the step's later buckets, if any, are left out.
        """
        bucket, (hook, state) = self.buckets[number], self.hooked
        operation = Explaining.averaging(number, self._hooks_name, self._group)
        is_plain = hook is None or bucket.is_rounded
        # The division comes first: the sum may overflow where the mean does not.
        divisor = self.divisor if hook is None else self._group.size()
        bucket.fill(1 / divisor if is_plain else 1.0, self.as_view)
        if is_plain and not has_delay(bucket.buffer, self._group):
            if hook is not None:  # not every back end sums in 16 bits
                return start_all_reduce(bucket.buffer, self._group, operation)
            # Not dist.all_reduce: its Python is cold after a large copy, and takes longer than all the rest.
            with operation:
                return self._group.allreduce([bucket.buffer], SUM)
        given: Any = GradBucket(number, bucket.buffer.detach(), bucket.parameters, is_last)
        if is_plain:
            return average_in_place(given, self._group, operation, divisor=1)
        with operation:
            future: Pending = hook(state, given)
        return future

    def finish(
        self, number: int, pending: Pending, kept: set[int], gradients_before: Mapping[int, torch.Tensor]
    ) -> None:
        """Wait for a bucket's average, and write it to the gradients of its parameters.

        kept: unused parameters. A state with take_back gets their averages, flat, less what this rank gave.
        gradients_before: gradients of unused parameters that were in the bucket's own memory.
        """
        bucket, hook = self.buckets[number], self.hooked.hook
        with Explaining.averaging(number, self._hooks_name, self._group):
            if hook is None or bucket.is_rounded:
                pending.wait()  # averaged in place
            else:
                buffer = as_real(bucket.buffer)
                result = result_of(pending, hook, buffer)
                if result.data_ptr() != buffer.data_ptr():
                    buffer.copy_(result)
        left_out = {position for position, index in enumerate(bucket.indices) if index in kept}
        for position in sorted(left_out) if left_out and self.hooked.can("take_back") else ():
            parameter = bucket.parameters[position]
            before = None if self.as_view else parameter.grad
            before = gradients_before.get(bucket.indices[position], before)
            self.hooked.state.take_back(parameter, bucket.average_beyond(position, before))
        bucket.write_back(left_out, self.as_view)


def average_rows(parameter: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the mean over the ranks of a parameter's sparse gradient, coalesced; None counts as zeros.

    Gathers the rows that have a gradient, and their indices, padded to the longest list. Only gloo can
    all-reduce sparse tensors. Moves W · (longest list) rows. The host waits for the number of rows.
    """
    shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros(shape, dtype=dtype, device=device, layout=torch.sparse_coo)
    gradient = gradient.detach().coalesce()
    rows = gradient.indices()[0]
    values = gradient.values().reshape(len(rows), *shape[1:])
    count = torch.tensor([len(rows)], dtype=torch.int64, device=device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    gathered = []
    with Explaining.of(f"average a sparse gradient of shape {list(shape)}", group):
        dist.all_gather(counts, count, group=group)
        lengths = [int(each) for each in counts]
        for mine in (rows, values):
            padded = mine.new_zeros(max(lengths), *mine.shape[1:])
            padded[: len(mine)] = mine
            everyone = [torch.empty_like(padded) for _ in lengths]
            dist.all_gather(everyone, padded, group=group)
            gathered.append(torch.cat([each[:num] for each, num in zip(everyone, lengths, strict=True)]))
    rows, values = gathered[0][None], gathered[1] / group.size()
    mean = torch.sparse_coo_tensor(rows, values, shape, dtype=dtype, device=device, check_invariants=False)
    return mean.coalesce()
