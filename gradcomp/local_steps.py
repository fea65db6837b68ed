"""Local steps: every rank trains by itself for a while; then all average how far their weights have gone.

    H local steps     every rank with its own optimizer and data
    exchange          pseudo-gradient = common weights − own weights, averaged over the ranks, compressed
    outer step        the outer optimizer applies the average to the common weights, on every rank alike

With fragments, a part of the weights is exchanged at a time, in turn. With a delay, an exchange is under way
during the next local steps.

Sources: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017
(averaging); Douillard et al., "DiLoCo", 2023, algorithm 1 (outer optimizer), and "Streaming DiLoCo", 2025
(fragments and delay).
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .comm.bucket import Hook
from .comm.consistency import require_all_ranks, require_same_on_all_ranks
from .comm.process_group import device_for, resolve_group
from .comm.reduced_values import ReducedValues
from .reducer import broadcast_coalesced
from .reducer.average import Averaging
from .rules import COUNT, described

__all__ = ["LocalSteps"]

_COUNTS = ("num_steps", "num_since", "num_exchanges")
_KEYS = ("every", *_COUNTS, "common", "outer_optimizer", "hook_state", "under_way")


@dataclass
class _Exchange:
    """An exchange that is under way."""

    fragment: int
    due: int  # the step after which it is applied
    moved: list[torch.Tensor]  # the pseudo-gradients, which become their averages
    weights: list[torch.Tensor] | None  # when the exchange began; None if it is applied at once
    averaging: Averaging | None = None  # None once the averages are known
    num_active: ReducedValues | None = None  # the number of ranks that take part
    scale: float = 1.0  # makes the averages those of the ranks that take part


class LocalSteps:
    """Trains a model with rare exchanges. Call step() after every step of the inner optimizer.

    model: the model, without DistributedDataParallel. Every rank has all weights. Rank 0's weights and
        buffers are copied to all ranks.
    outer_optimizer: an optimizer over the model's trainable parameters, which applies averaged
        pseudo-gradients; torchft's DiLoCo calls it so, too. None: SGD with learning rate 1, which makes the
        weights the average of all ranks' weights.
    every: local steps from one exchange of a weight to the next; torchft's sync_every.
    hook, state: as for register_comm_hook. Pseudo-gradients are averaged with them, and error feedback works
        from one exchange to the next. None: an all-reduce.
    fragments: parts of about equal size that are exchanged in turn, one every `every / fragments` steps.
    delay: local steps during which an exchange is under way; torchft's fragment_sync_delay. What a rank
        learns meanwhile stays in its weights.
    process_group: the ranks, without a hook; None for the default group. A hook has its group in its state.

    Memory: a copy of the weights, and a fragment's pseudo-gradients during its exchange. Buffers, such as
    BatchNorm's, stay each rank's own.

    Raises TypeError for another model or outer_optimizer, and for sharded weights; ValueError for numbers
    that don't fit; RuntimeError on every rank if the ranks' models or numbers differ.

    Example::

        local_steps = LocalSteps(model, every=50, hook=quantization_hook, state=QuantizationState(bits=4))
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            local_steps.step()
        local_steps.join()
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module,
        outer_optimizer: torch.optim.Optimizer | None = None,
        every: int = 50,
        hook: Hook | None = None,
        state: Any = None,
        fragments: int = 1,
        *,
        delay: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ):
        if not isinstance(model, nn.Module):
            raise TypeError(f"LocalSteps takes a model, got {described(model)}")
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        if any(isinstance(each, DTensor) for _, each in named):
            raise TypeError(
                "LocalSteps takes a model whose weights every rank has as a whole, but this one is sharded. "
                "With FSDP2 see gradcomp.fsdp"
            )
        _require_numbers(every, fragments, delay, len(named))
        self._names = [name for name, _ in named]
        self._weights: list[torch.Tensor] = [each for _, each in named]
        if outer_optimizer is None:
            outer_optimizer = torch.optim.SGD(self._weights, lr=1.0)
        self.outer_optimizer = _checked_optimizer(outer_optimizer, self._weights)
        self._every, self._delay = every, delay
        self._hook, self._state = hook, state
        self._process_group = process_group
        owner = process_group if hook is None else getattr(state, "process_group", state)
        self._group = group = resolve_group("LocalSteps", owner, "process_group")
        self._device = device_for(group, self._weights)
        require_all_ranks("LocalSteps", "train by local steps", group, "Make it on every rank")
        values = {
            "every": every,
            "fragments": fragments,
            "delay": delay,
            "parameters": [[name, list(each.shape), str(each.dtype)] for name, each in named],
            "hook": getattr(hook, "__qualname__", repr(hook)),
        }
        advice = "Give every rank the same model, hook and numbers"
        require_same_on_all_ranks("LocalSteps", values, group, self._device, advice)
        with torch.no_grad():
            broadcast_coalesced([*model.parameters(), *model.buffers()], 0, group)
            self._common = [each.detach().clone() for each in self._weights]
        self._fragments = _divided([each.numel() for each in self._weights], fragments)
        self._num_steps = self._num_since = self._num_exchanges = 0
        self._under_way: _Exchange | None = None

    @property
    def every(self) -> int:
        """Local steps from one exchange of a weight to the next. Assign to change it, on every rank alike."""
        return self._every

    @every.setter
    def every(self, value: int) -> None:
        _require_numbers(value, len(self._fragments), self._delay, len(self._weights))
        self._every = value

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> None:
        """Count a local step; begin or apply an exchange if it is time for it. Call it on every rank."""
        self._num_steps += 1
        self._num_since += 1
        if self._under_way is not None and self._num_steps >= self._under_way.due:
            self._apply()
        if self._num_since >= self._every // len(self._fragments):
            self._num_since = 0
            self._begin(is_active=True, delay=self._delay)
            if self._delay == 0:
                self._apply()

    @torch.inference_mode(False)
    @torch.no_grad()
    def restart(self) -> None:
        """Take the present weights as the common ones, after you have averaged or loaded them yourself.

        Call it on every rank. The weights must be equal on all ranks.
        """
        self._under_way, self._num_since = None, 0
        torch._foreach_copy_(self._common, self._weights)

    @torch.inference_mode(False)
    @torch.no_grad()
    def join(self) -> None:
        """Take part in the other ranks' exchanges until every rank has come here.

        Call it on every rank at the end: by a rank that has no more data, too, while others go on. It first
        gives what this rank has learned since its last exchanges. All ranks return with equal weights.
        """
        if self._under_way is not None:
            self._apply()
        num_left = len(self._fragments)
        while self._begin(is_active=num_left > 0, delay=0):
            self._apply()
            num_left -= 1

    def _begin(self, *, is_active: bool, delay: int) -> bool:
        """Begin to exchange the next fragment. Returns False, without an exchange, if no rank is active.

        is_active: False if this rank has nothing more to give.
        """
        what = "count the ranks that still train by local steps"
        given = [float(is_active)]
        num_active = ReducedValues(what, given, [self._group], self._device, dist.ReduceOp.SUM)
        if not is_active and not num_active.wait()[0]:
            return False
        fragment = self._num_exchanges % len(self._fragments)
        self._num_exchanges += 1
        where = self._fragments[fragment]
        weights = self._weights[where]
        moved = list(torch._foreach_sub(self._common[where], weights))
        snapshot = [each.detach().clone() for each in weights] if delay else None
        hook, state, keys = self._hook, self._state, None if self._hook is None else self._names[where]
        averaging = Averaging(moved, hook, state, self._process_group, keys=keys, waits_at_once=delay == 0)
        due = self._num_steps + delay
        self._under_way = _Exchange(fragment, due, moved, snapshot, averaging, num_active)
        return True

    def _finished(self) -> _Exchange:
        """Wait for the exchange under way, and return it."""
        exchange = self._under_way
        assert exchange is not None
        if exchange.averaging is not None and exchange.num_active is not None:
            exchange.averaging.wait()
            # Ranks that have joined give zeros, and don't count.
            exchange.scale = self._group.size() / exchange.num_active.wait()[0]
            exchange.averaging = exchange.num_active = None
        return exchange

    def _apply(self) -> None:
        """Take the outer step with the exchange under way."""
        exchange = self._finished()
        self._under_way = None
        where = self._fragments[exchange.fragment]
        weights, common = self._weights[where], self._common[where]
        if exchange.scale != 1.0:
            torch._foreach_mul_(exchange.moved, exchange.scale)
        gradients = [each.grad for each in self._weights]
        now = [] if exchange.weights is None else [each.detach().clone() for each in weights]
        torch._foreach_copy_(weights, common)
        try:
            for each in self._weights:
                each.grad = None
            for weight, moved in zip(weights, exchange.moved, strict=True):
                weight.grad = moved
            self.outer_optimizer.step()
        finally:
            for each, gradient in zip(self._weights, gradients, strict=True):
                each.grad = gradient
        torch._foreach_copy_(common, weights)
        if exchange.weights is not None:  # what this rank has learned during the exchange
            torch._foreach_add_(weights, list(torch._foreach_sub(now, exchange.weights)))

    # --- checkpoints ---

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return everything but the model and the inner optimizer, which are each rank's own: save one file
        per rank.

        every: the local steps between exchanges.
        num_steps, num_since, num_exchanges: counts of steps, steps since the last exchange, and exchanges.
        common: the common weights, by name.
        outer_optimizer: its state_dict.
        hook_state: the hook's state_dict; None for a hook without one.
        under_way: the exchange under way, with its averages: the host waits for it. None without one.
        """
        under_way: dict[str, Any] | None = None
        if self._under_way is not None:
            exchange = self._finished()
            under_way = {name: getattr(exchange, name) for name in ("fragment", "due", "scale")}
            for name in ("moved", "weights"):
                under_way[name] = [each.clone() for each in getattr(exchange, name) or ()]
        return {
            "every": self._every,
            **{name: getattr(self, f"_{name}") for name in _COUNTS},
            "common": {name: each.clone() for name, each in zip(self._names, self._common, strict=True)},
            "outer_optimizer": self.outer_optimizer.state_dict(),
            "hook_state": self._state.state_dict() if hasattr(self._state, "state_dict") else None,
            "under_way": under_way,
        }

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from state_dict(). Load the model's and the inner optimizer's, too.

        Raises KeyError for missing and unknown entries; ValueError for weights of another model, and the
        errors of the hook's state.
        """
        if not isinstance(state_dict, dict):
            raise ValueError(f"LocalSteps loads what state_dict() gives, got {described(state_dict)}")
        if set(state_dict) != set(_KEYS):
            raise KeyError(f"LocalSteps loads the entries {list(_KEYS)}, but got {list(state_dict)}")
        common = state_dict["common"]
        shapes = {name: tuple(each.shape) for name, each in zip(self._names, self._weights, strict=True)}
        if {name: tuple(each.shape) for name, each in common.items()} != shapes:
            raise ValueError(
                f"LocalSteps loads the weights of another model: the checkpoint has {list(common)[:5]}, this "
                f"model {self._names[:5]}, or their shapes differ"
            )
        if self._state is not None and state_dict["hook_state"] is not None:
            self._state.load_state_dict(state_dict["hook_state"])
        self.outer_optimizer.load_state_dict(state_dict["outer_optimizer"])
        torch._foreach_copy_(self._common, [common[name] for name in self._names])
        self.every = state_dict["every"]
        for name in _COUNTS:
            setattr(self, f"_{name}", COUNT(name, state_dict[name]))
        self._under_way = None
        if (saved := state_dict["under_way"]) is not None:
            own = self._common[self._fragments[saved["fragment"]]]
            moved, weights = ([torch.empty_like(each) for each in own] for _ in range(2))
            torch._foreach_copy_(moved, saved["moved"])
            torch._foreach_copy_(weights, saved["weights"])
            self._under_way = _Exchange(saved["fragment"], saved["due"], moved, weights, scale=saved["scale"])


def _require_numbers(every: Any, fragments: Any, delay: Any, num_weights: int) -> None:
    """Raise ValueError for numbers that don't fit one another or the model."""
    for name, value, least in (("every", every, 1), ("fragments", fragments, 1), ("delay", delay, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}, but must be an int and at least {least}")
    if not num_weights:
        raise ValueError("the model of LocalSteps has no trainable parameters")
    if fragments > num_weights:
        raise ValueError(f"fragments is {fragments}, but the model has {num_weights} trainable parameters")
    if every % fragments:
        raise ValueError(f"every is {every}, but must be a multiple of fragments, {fragments}")
    if delay >= every // fragments:
        raise ValueError(
            f"delay is {delay}, but must be below {every // fragments}, the steps between two exchanges: one "
            "exchange is under way at a time"
        )


def _checked_optimizer(optimizer: Any, weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Return the outer optimizer. Raises TypeError or ValueError unless it has exactly these weights."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"LocalSteps takes an optimizer as its outer_optimizer, got {described(optimizer)}")
    given = {id(each) for group in optimizer.param_groups for each in group["params"]}
    if given != set(map(id, weights)):
        raise ValueError(
            f"the outer_optimizer has {len(given)} parameters, which are not the model's {len(weights)} "
            "trainable ones: make it with model.parameters()"
        )
    return optimizer


def _divided(numels: list[int], fragments: int) -> list[slice]:
    """Divide weights into runs of about equal size, none of them empty."""
    sums, ends = list(accumulate(numels)), [0]
    for number in range(1, fragments):
        end = bisect_left(sums, sums[-1] * number / fragments) + 1
        ends.append(min(max(end, ends[-1] + 1), len(numels) - fragments + number))
    return [slice(start, stop) for start, stop in pairwise([*ends, len(numels)])]
