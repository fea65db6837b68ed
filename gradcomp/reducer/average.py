"""Average a list of tensors once, through any hook, outside of autograd."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from gradcomp import ops
from gradcomp.compress.grad_bucket import GradBucket, as_real
from gradcomp.compress.hook import Hook, result_of
from gradcomp.compress.process_group import resolve_group
from gradcomp.hooks import default_hooks
from gradcomp.layout import FlatLayout


@torch.no_grad()
def average_(
    tensors: Sequence[torch.Tensor],
    hook: Hook | None = None,
    state: Any = None,
    process_group: dist.ProcessGroup | None = None,
    *,
    keys: Sequence[Hashable] | None = None,
) -> Sequence[torch.Tensor]:
    """Replace tensors by their mean over the ranks, in place, as hook(state, bucket) averages gradients. Returns them.

    tensors: the same shapes and dtypes in the same order on every rank (pseudo-gradients, say); those of a dtype
    and device form one bucket. hook: None for an all-reduce. process_group: of that all-reduce; a hook has its own
    in its state.
    keys: one per tensor, names say, by which the state's memory finds its tensor in every call, whatever the list's order;
        the same on every rank, each with the same repr. None: a tensor that comes again is known by itself, and from then on
        has its place for itself; new tensors take the places of the others of their shape and dtype, in the order of the list.

    Raises TypeError for what isn't a floating-point or complex tensor, or a list of such; ValueError for keys that are not
    one per tensor or not distinct; RuntimeError for a hook that returns no Future, or one with another number of elements.

    Example::

        gradcomp.average_([old - new for old, new in zip(before, after)], powerSGD_hook.powerSGD_hook, state)
    """
    if isinstance(tensors, torch.Tensor):
        raise TypeError("average_ takes a list of tensors, got a tensor: average_([tensor])")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
            found = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"average_ takes floating-point or complex tensors, got {found}")
    if keys is not None and (len(keys) != len(tensors) or len(set(map(repr, keys))) != len(keys)):
        raise ValueError(
            f"average_ takes one key per tensor, each another one: got {list(keys)} for {len(tensors)} tensors"
        )
    chosen: Hook = default_hooks.allreduce_hook if hook is None else hook
    if hook is None:
        state = resolve_group("average_", process_group)
    elif process_group is not None:
        raise ValueError("average_ takes the process group of a hook in its state, not as process_group")
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for parameter, tensor in _with_parameters(tensors, state, keys):
        kinds.setdefault((tensor.dtype, tensor.device), []).append((parameter, tensor))
    for index, pairs in enumerate(kinds.values()):
        parameters, members = map(list, zip(*pairs, strict=True))
        layout = FlatLayout((member.numel(),) for member in members)
        buffer = torch.empty(layout.numel, dtype=members[0].dtype, device=members[0].device)
        ops.gather(members, layout, out=_parts(buffer, members))
        bucket = GradBucket(index, buffer, parameters, is_last=index == len(kinds) - 1)
        result = result_of(chosen(state, bucket), chosen, as_real(buffer))
        if buffer.is_complex():
            as_real(buffer).copy_(result)
            result = buffer
        ops.scatter(_parts(result, members), layout, out=members)
    return tensors


def _parts(buffer: torch.Tensor, members: list[torch.Tensor]) -> list[torch.Tensor]:
    parts = buffer.split([member.numel() for member in members])
    return [part.view(member.shape) for part, member in zip(parts, members, strict=True)]


class _Place:
    """What a state knows a tensor by from call to call: a parameter without memory of its own.

    order: of the bucket, the same on every rank. tensor: the one that was here last. stays: whether it has come twice; then
    the place is nobody else's.
    """

    def __init__(self, tensor: torch.Tensor, order: tuple[int, str]):
        self.parameter = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self.order, self.tensor, self.stays = order, weakref.ref(tensor), False

    def suits(self, tensor: torch.Tensor) -> bool:
        return self.parameter.shape == tensor.shape and self.parameter.dtype == tensor.dtype


class _Places:
    """The places of all tensors that are averaged with a state.

    Which tensor has which place must not depend on what lives on a rank: garbage is collected at other times on others.
    """

    def __init__(self) -> None:
        self._with_key: dict[Hashable, _Place] = {}
        self._without: list[_Place] = []
        self._num_made = 0

    def of(self, tensors: Sequence[torch.Tensor], keys: Sequence[Hashable] | None) -> list[_Place]:
        """Each tensor's place."""
        if keys is not None:
            return [self._of_key(tensor, key) for tensor, key in zip(tensors, keys, strict=True)]
        # The memory of a tensor that is no more goes with it.
        self._without = [place for place in self._without if not place.stays or place.tensor() is not None]
        owned = {id(place.tensor()): place for place in self._without if place.tensor() is not None}
        known = [place if (place := owned.get(id(t))) and place.suits(t) else None for t in tensors]
        taken = {id(place) for place in known if place is not None}
        places = []
        for tensor, own in zip(tensors, known, strict=True):
            place = own or self._of_new(tensor, taken)
            place.tensor, place.stays = weakref.ref(tensor), own is not None
            taken.add(id(place))
            places.append(place)
        return places

    def _of_key(self, tensor: torch.Tensor, key: Hashable) -> _Place:
        place = self._with_key.get(key)
        if place is None or not place.suits(tensor):
            place = self._with_key[key] = _Place(tensor, (1, repr(key)))
        return place

    def _of_new(self, tensor: torch.Tensor, taken: set[int]) -> _Place:
        """The first free place that suits a tensor which comes for the first time."""
        for place in self._without:
            if not place.stays and id(place) not in taken and place.suits(tensor):
                return place
        self._num_made += 1
        self._without.append(_Place(tensor, (0, f"{self._num_made:020}")))
        return self._without[-1]


_places_of: MutableMapping[Any, _Places] = WeakIdKeyDictionary()


def _with_parameters(
    tensors: Sequence[torch.Tensor], state: Any, keys: Sequence[Hashable] | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(What a hook sees as its parameter, the tensor), in an order that doesn't depend on the list's."""
    if state is None or isinstance(state, dist.ProcessGroup):
        return [(tensor, tensor) for tensor in tensors]
    places = _places_of.setdefault(state, _Places()).of(tensors, keys)
    pairs = sorted(zip(places, tensors, strict=True), key=lambda pair: pair[0].order)
    return [(place.parameter, tensor) for place, tensor in pairs]
