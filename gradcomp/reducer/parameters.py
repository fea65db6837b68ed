"""The parameters of a Reducer: names, fitting gradients, equality on all ranks, other Reducers with them."""

from __future__ import annotations

import gc
import inspect
import re
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradcomp.comm.bucket import Hooked, named_tensors
from gradcomp.comm.consistency import require_same_on_all_ranks
from gradcomp.comm.process_group import Explaining, ranks_of, require_group

from .autograd import listed

_OF_MODULES = [each.__code__ for each in (nn.Module.parameters, nn.Module.named_parameters)]


def named_parameters(
    params: Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
) -> tuple[list[str], list[torch.Tensor], list[tuple[str, torch.Tensor]]]:
    """Return names and tensors of the parameters that require gradients, each once, and the frozen pairs.

    Raises TypeError for anything but an iterable of parameters or of (name, parameter) pairs; ValueError if
    no parameter requires gradients, and for the parameters of a module that averages them itself.
    """
    module: Any = None
    if inspect.isgenerator(params) and params.gi_code in _OF_MODULES:
        module = inspect.getgeneratorlocals(params).get("self")
    for each in module.modules() if isinstance(module, nn.Module) else ():
        # torch's, gradcomp's or torchft's.
        if any(cls.__name__ == "DistributedDataParallel" for cls in type(each).__mro__):
            raise ValueError(
                f"Reducer got the parameters of a {type(module).__name__} in which a DistributedDataParallel "
                "averages gradients already: register the hook there (ddp.register_comm_hook), or leave that "
                "wrapper out"
            )
    averaged: dict[int, tuple[str, torch.Tensor]] = {}
    frozen: list[tuple[str, torch.Tensor]] = []
    for name, param in named_tensors("Reducer", params):
        require_plain(name, param)
        if not param.requires_grad:
            frozen.append((name, param))
        elif id(param) not in averaged:
            if not param.is_leaf:
                raise ValueError(
                    f"Reducer averages what backward accumulates, but {name} is computed from other tensors "
                    f"({param.grad_fn}) and has no .grad: pass the parameters that it is computed from"
                )
            if param.is_inference():
                raise RuntimeError(
                    f"parameter {name} was made in torch.inference_mode(), so no backward can use it. Build "
                    "the model outside of inference mode"
                )
            averaged[id(param)] = name, param
    if not averaged:
        raise ValueError(
            "Reducer got no parameter that requires gradients. If it was given model.parameters(), that may "
            "have been used up by an optimizer: call it again"
        )
    names, tensors = map(list, zip(*averaged.values(), strict=True))
    return names, tensors, frozen


def require_plain(name: str, tensor: torch.Tensor, what: str = "parameter") -> None:
    """Raise TypeError for a DTensor."""
    # Importing the module takes long, and a DTensor exists only where it has been imported.
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(tensor, module.DTensor):
        raise TypeError(
            f"{what} {name} is a DTensor. Models of FSDP2 (fully_shard) and tensor parallelism average their "
            "own gradients: leave DistributedDataParallel and the Reducer out, or shard such a model over a "
            "2-D mesh"
        )


def check_gradient(
    gradient: torch.Tensor | None,
    expected: tuple[torch.layout, torch.dtype, torch.device],
    shape: torch.Size,
    name: str,
) -> None:
    """Raise RuntimeError for a gradient of another layout, dtype, device or shape than expected."""
    if gradient is None or (
        (gradient.layout, gradient.dtype, gradient.device) == expected and gradient.shape == shape
    ):
        return
    if gradient.layout != expected[0]:
        raise RuntimeError(
            f"parameter {name} has a {'dense' if gradient.layout == torch.strided else 'sparse'} gradient: "
            "name parameters with sparse gradients, and only those, in Reducer(sparse_params=...)"
        )
    raise RuntimeError(
        f"the gradient of parameter {name} is {gradient.dtype} on {gradient.device}, of shape "
        f"{list(gradient.shape)}, but its bucket has {expected[1]} on {expected[2]}, of shape {list(shape)}. "
        "Likely cause: a hook or other code has converted or moved the gradient, or replaced its .data"
    )


# Hooks for which the state None means the default group. Other hooks may get their group elsewhere.
_ALL_REDUCE_HOOKS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")

_UNNAMED = re.compile(r"(functools\.partial\(|<[\w.]+ object at ).*(?=\))")


def agree_on_order(order: Sequence[int], device: torch.device, group: dist.ProcessGroup) -> list[int]:
    """Return rank 0's order, on every rank."""
    agreed = torch.tensor(order, dtype=torch.int64, device=device)
    with Explaining.of("get rank 0's order of buckets", group):
        dist.broadcast(agreed, group_src=0, group=group)
    # Waits for the device, once in a Reducer's life: the host cuts the buckets.
    result: list[int] = agreed.tolist()
    return result


class Agreement:
    """Compares the ranks: parameters and options at construction, options and hooks in the first step.

    group: the process group of the hook's state, as the ranks have compared it.
    """

    def __init__(self, options: dict[str, Any], group: dist.ProcessGroup, device: torch.device):
        self._options, self._group, self._device = options | {"world size": group.size()}, group, device
        self.group: Any = self  # no step has compared the ranks

    def verify(self, names: Sequence[str], params: Sequence[torch.Tensor]) -> None:
        """Raise RuntimeError on every rank unless all have the same parameters and options."""
        # Buckets hold gradients in their parameters' memory order.
        shapes = [
            (name, tuple(each.shape), str(each.dtype), *(() if each.is_contiguous() else [each.stride()]))
            for name, each in zip(names, params, strict=True)
        ]
        values = {"parameters that require gradients": shapes} | self._options
        advice = "Build the same model on every rank, and give the Reducer or wrapper the same options"
        require_same_on_all_ranks("what the Reducer was given", values, self._group, self._device, advice)

    def expect(self, hooked: Hooked) -> None:
        """Compare the ranks again in the next step. Raises ValueError for a group that torch doesn't know."""
        require_group(common_name_of(hooked.hook), _group_of(hooked), "state's process group")
        self.group = self

    def require(self, hooked: Hooked) -> None:
        """Raise RuntimeError on every rank unless all have the same hook, options and groups.

        If the state has got another group since, raise it on the ranks where that group has other ranks.
        """
        group, (hook, state) = _group_of(hooked), hooked
        is_group = state is None or isinstance(state, dist.ProcessGroup)
        others = None if group is None else ranks_of(group)
        values = self._options | {
            "hook": None if hook is None else common_name_of(hook),
            "the state's type": None if is_group else common_name_of(type(state)),
            "the state's process group": None if others is None else f"ranks {others}",
        }
        advice = "Register the same hook on every rank, with the same options"
        if self.group is self:
            whose = "what the Reducer averages with"
            require_same_on_all_ranks(whose, values, self._group, self._device, advice)
        ranks = ranks_of(self._group)
        if others is not None and sorted(ranks) != sorted(others):
            raise RuntimeError(
                f"the communication hook {common_name_of(hook)} averages over the ranks {others}, but the "
                f"parameters are averaged over {ranks}. Give the hook's state the process group that "
                "DistributedDataParallel or the Reducer has; None means the default group"
            )
        self.group = hooked.group


def _group_of(hooked: Hooked) -> dist.ProcessGroup | None:
    """Return the process group that the hook averages over; None if its state does not tell."""
    group, tells = hooked.group or dist.group.WORLD, hooked.group is not None or hooked.can("process_group")
    if hooked.state is None and hooked.hook is not None:
        name = common_name_of(hooked.hook)
        tells = name.endswith(_ALL_REDUCE_HOOKS) and "default_hooks" in name
    return group if tells and isinstance(group, dist.ProcessGroup) else None


def common_name_of(function: Any) -> str:
    """Return a name that all processes have for a function: without addresses, and __main__'s as __main__."""
    if isinstance(function, partial):
        return f"partial of {common_name_of(function.func)}"
    name = getattr(function, "__qualname__", None)
    if not isinstance(name, str):
        return f"an instance of {common_name_of(type(function))}"
    # A spawned process calls its parent's __main__ __mp_main__.
    module = "__main__" if function.__module__ == "__mp_main__" else function.__module__
    # A compress wrapper's name contains the repr of a hook without a name, with addresses.
    return f"{module}.{_UNNAMED.sub('...', name)}"


_live_lock = threading.RLock()
_live: weakref.WeakSet[Sharing] = weakref.WeakSet()  # of the Reducers that are neither closed nor deleted


class Sharing:
    """Tells a Reducer which other live Reducers average some of its parameters, too.

    Their gradients stay in memory of their own: a gradient that is a view of one Reducer's bucket is changed
    by that bucket's averaging before the other Reducer has read it.

    others: of these Reducers.
    is_stepping: whether the Reducer is within a step.
    """

    def __init__(self, params: Sequence[torch.Tensor], names: Sequence[str], group: dist.ProcessGroup):
        self._names, self._group = names, group
        self._index_of = {id(param): index for index, param in enumerate(params)}
        self.is_stepping = False
        with _live_lock:
            if any(map(self._common, _live)):
                # Python would free a Reducer in a cycle of garbage at a different time on each rank, so the
                # ranks would see different Reducers.
                gc.collect()
            self.others = weakref.WeakSet(filter(self._common, _live))

    def open(self) -> None:
        """Begin sharing: the Reducer is constructed, and will average."""
        with _live_lock:
            for other in self.others:
                other.others.add(self)
            _live.add(self)

    def require_same_ranks(self) -> None:
        """Raise RuntimeError if another Reducer is averaging one of the parameters over other ranks."""
        with _live_lock:
            others = list(self.others)
        for other in others:
            if other.is_stepping and set(ranks_of(other._group)) != set(ranks_of(self._group)):
                name = self._names[min(self._common(other))]
                raise RuntimeError(
                    f"parameter {name} is being averaged by two Reducers in one "
                    f"backward, over the ranks {ranks_of(other._group)} and {ranks_of(self._group)}: its "
                    ".grad can't be both means. Likely cause: an earlier Reducer or wrapper was kept. Call "
                    "close() on that Reducer (on a wrapper's reducer: ddp.reducer.close()), or delete it"
                )

    @staticmethod
    def require_averaged(found: Iterable[int], named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise RuntimeError for gradients of this rank's own, unless another live Reducer averages them.

        found: the ids of parameters that have such gradients.
        named: names and parameters; those without a name here may stay each rank's own.
        """
        with _live_lock:
            own = set(found).difference(*(each._index_of for each in _live))
        if names := [name for name, param in named if id(param) in own]:
            raise RuntimeError(
                f"{listed(names)} not averaged, and have gradients of this rank's own: they were added, "
                "replaced or unfrozen (requires_grad_, load_state_dict(assign=True), a new layer) after "
                "the module was wrapped, or the Reducer constructed. Wrap or construct again after such a "
                "change; for parameters that are meant to stay each rank's own, call DistributedDataParallel."
                "_set_params_and_buffers_to_ignore_for_model(module, names) before, or leave them out of the "
                "Reducer's params"
            )

    def close(self) -> None:
        """End sharing: this Reducer will average nothing more."""
        with _live_lock:
            _live.discard(self)
            for other in self.others:
                other.others.discard(self)

    def _common(self, other: Sharing) -> set[int]:
        """Return this Reducer's indices of the parameters that both have."""
        return {self._index_of[each] for each in self._index_of.keys() & other._index_of.keys()}
