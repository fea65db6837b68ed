"""Average a list of tensors once, through any hook, outside of autograd."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from gradcomp.comm.bucket import GradBucket, Hook, Hooked, as_real, memory_layout, require_hook, result_of
from gradcomp.comm.pipeline import PipelinedFuture, drop
from gradcomp.comm.process_group import Explaining, joined_group, resolve_group
from gradcomp.device import has_streams, require_no_capture
from gradcomp.hooks import default_hooks
from gradcomp.rules import described

from .broadcast import is_expanded


@torch.inference_mode(False)  # where later steps find what the hook keeps
@torch.no_grad()
def average_(
    tensors: Sequence[torch.Tensor],
    hook: Hook | None = None,
    state: Any = None,
    process_group: dist.ProcessGroup | None = None,
    *,
    keys: Sequence[Hashable] | None = None,
) -> Sequence[torch.Tensor]:
    """Replace tensors by their mean over the ranks, in place, through any hook. Returns them.

    tensors: the same shapes and dtypes in the same order on every rank, such as pseudo-gradients. The tensors
        of a dtype and device form one bucket.
    hook: None for an all-reduce.
    process_group: the all-reduce's group. A hook has its group in its state.
    keys: one per tensor, such as names: the state's memory finds its tensor by the key in every call, in any
        order of the list. The same on every rank, each with the same repr. None: by the place in the list.
        An error is then forgotten when a tensor of another shape or dtype comes in its place.

    Raises TypeError for anything but a list of floating-point or complex tensors, for conjugated, negated or
    expanded views, and for a hook that can't be called; ValueError unless there is one distinct key per
    tensor, for a process group with a hook, and for a state without one; RuntimeError for a hook that returns
    no Future, or one with another number of elements, and while a CUDA graph is captured.

    Example::

        gradcomp.average_([old - new for old, new in zip(before, after)], powerSGD_hook.powerSGD_hook, state)
    """
    _check(tensors, keys)
    hooked = hooked_for("average_", hook, state, process_group)
    parameters, ordered = _known(tensors, hooked, keys)
    whose, group = f"{hooked.name} in average_", joined_group(hooked.group)
    Averaging(ordered, parameters, hooked, whose, group, waits_at_once=True).wait()
    return tensors


def hooked_for(whose: str, hook: Any, state: Any, process_group: dist.ProcessGroup | None) -> Hooked:
    """Return a hook with its state; an all-reduce without a hook. Raises average_'s errors."""
    if hook is None:
        if state is not None:
            raise ValueError(f"{whose} has a state, {described(state)}, without the hook that takes it")
        return Hooked(default_hooks.allreduce_hook, resolve_group(whose, process_group))
    if process_group is not None:
        raise ValueError(f"{whose} takes the process group of a hook in its state, not as process_group")
    require_hook(hook, state, whose)
    return Hooked(hook, state)


class Averaging:
    """An average of tensors that is under way.

    tensors: floating-point or complex; they become their average over the ranks.
    parameters: one per tensor, in its shape, by which the state knows it.
    whose, group: the hook's name in messages, and its ranks.
    indices: the first bucket's index, and the step from one bucket's index to the next.
    waits_at_once: whether wait() is the next call. Otherwise the host doesn't wait here.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        hooked: Hooked,
        whose: str,
        group: dist.ProcessGroup | None,
        *,
        indices: tuple[int, int] = (0, 1),
        waits_at_once: bool,
    ):
        self._hooked, (self._hook, state) = hooked, hooked
        pairs_of: dict[tuple[torch.dtype, torch.device], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for parameter, tensor in zip(parameters, tensors, strict=True):
            pairs_of.setdefault((tensor.dtype, tensor.device), []).append((parameter, tensor))
        # Tensors with their flat buffer, the parts of it that are theirs, and the future of its average.
        self._buckets: list[tuple[Any, torch.Tensor, Any, Explaining, Any]] = []
        for number, ((dtype, device), pairs) in enumerate(pairs_of.items()):
            index = indices[0] + number * indices[1]
            known, members = map(list, zip(*pairs, strict=True))
            layout = memory_layout(known, as_real=False)
            buffer = torch.empty(layout.numel, dtype=dtype, device=device)
            parts = layout.parts(buffer)
            torch._foreach_copy_(parts, members)
            # On a CPU the last bucket's hook waits for all collectives.
            is_last = number == len(pairs_of) - 1 and (waits_at_once or has_streams(device))
            given: Any = GradBucket(index, buffer, known, is_last)
            operation = Explaining.averaging(index, whose, group)
            try:
                with operation:
                    future = self._hook(state, given)
            except BaseException:
                drop(average for *_, average in self._buckets)
                raise
            self._buckets.append((members, buffer, parts, operation, future))
        self._ends_step = bool(self._buckets) and not is_last

    def advance(self) -> None:
        """On a CPU, wait for the collective under way, and begin the next one, if the hook has several."""
        for *_, future in self._buckets:
            if isinstance(future, PipelinedFuture):
                future.advance()

    @torch.no_grad()
    def wait(self) -> None:
        """Write the averages to the tensors."""
        for members, buffer, parts, operation, future in self._buckets:
            wire = as_real(buffer)
            with operation:
                result = result_of(future, self._hook, wire)
            if result.data_ptr() != wire.data_ptr():
                wire.copy_(result)
            # Inference tensors change in inference mode alone.
            with torch.inference_mode(any(member.is_inference() for member in members)), torch.no_grad():
                torch._foreach_copy_(members, parts)
        if self._ends_step:  # no bucket has said that it is the last
            self._hooked.tell("end_step")
        self._buckets, self._ends_step = [], False


def _check(tensors: Sequence[torch.Tensor], keys: Sequence[Hashable] | None) -> None:
    """Raise TypeError for anything but averageable tensors, and ValueError for unusable keys."""
    if isinstance(tensors, (torch.Tensor, Iterator)):  # an iterator would be used up here
        advice = ": average_([tensor])" * isinstance(tensors, torch.Tensor)
        raise TypeError(f"average_ takes a list of tensors, got {described(tensors)}{advice}")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
            found = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"average_ takes floating-point or complex tensors, got {found}")
        if tensor.is_conj() or tensor.is_neg() or is_expanded(tensor):
            text = "average_ can't write to a conjugated, negated or expanded view: give it a .clone()"
            raise TypeError(text)
        require_no_capture("average_ can't average tensors", tensor.device)
    if keys is not None and (len(keys) != len(tensors) or len(set(map(repr, keys))) != len(keys)):
        given = f"{list(keys)} for {len(tensors)} tensors"
        raise ValueError(f"average_ takes one key per tensor, each another one: got {given}")


# By state and key or place, the meta parameters by which a state knows tensors.
_known_of: MutableMapping[Any, dict[Hashable, torch.Tensor]] = WeakIdKeyDictionary()


def _known(
    tensors: Sequence[torch.Tensor], hooked: Hooked, keys: Sequence[Hashable] | None
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return the parameters that hooks see, row-major as strides may differ between ranks; and their tensors.

    With keys they are in an order independent of the list's. The choice must not depend on which objects are
    alive: ranks collect garbage at different times.
    """
    if hooked.state is None or isinstance(hooked.state, dist.ProcessGroup):
        return [t if t.is_contiguous() else t.new_empty(t.shape, device="meta") for t in tensors], tensors
    known, names = _known_of.setdefault(hooked.state, {}), list[Hashable](range(len(tensors)))
    if keys is not None:
        order = sorted(range(len(keys)), key=lambda place: repr(keys[place]))
        names, tensors = [repr(keys[place]) for place in order], [tensors[place] for place in order]
    new = []
    for name, tensor in zip(names, tensors, strict=True):
        parameter = known.get(name)
        if parameter is None or (parameter.shape, parameter.dtype) != (tensor.shape, tensor.dtype):
            known[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            new.append((f"average_({name})", known[name]))
    if new and keys is not None:
        hooked.tell("number_parameters", new)  # in checkpoints, too; a model's parameters have other names
    return [known[name] for name in names], tensors
