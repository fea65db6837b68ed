"""Checkpoints of local steps."""

import os
from typing import Any

import torch

from ..comm.bucket import Hooked
from ..rules import COUNT, described
from .weights import CommonWeights, OwnWeights, Tensors, local_of

_COUNTS = ("num_since", "num_exchanges")


class SavedSteps:
    """What LocalSteps keeps from step to step, and its checkpoints."""

    _own: OwnWeights
    _common: CommonWeights
    _fragments: list[list[str]]
    _hooked: Hooked
    _under_way: Any
    _every: int
    _delay: int

    def _apply(self) -> None:
        raise NotImplementedError

    def _counts(self) -> dict[str, int]:
        return {"every": self._every, **{name: getattr(self, f"_{name}") for name in _COUNTS}}

    def _set(self, counts: dict[str, int]) -> None:
        self._under_way, self._every = None, counts["every"]
        for name in _COUNTS:
            setattr(self, f"_{name}", counts[name])
        self._num_begun = counts["num_exchanges"]

    @torch.inference_mode(False)
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return everything but the model and the inner optimizer, which are each rank's own.

        An exchange under way is applied first: save the model's weights afterwards. Call it on every rank
        after the same step.

        common: the common weights, by name; DTensors if the model is sharded.
        outer: the outer optimizer's tensors in the weights' shapes, by what they are and name; likewise.
        plain: a tuple of (counts, the rest of the outer optimizer's state).
        hook_state: a tuple of the hook's state_dict; None without one, and for a sharded model: save
            per_rank_state_dict(state) under a name of the shard.
        """
        if self._under_way is not None:
            self._apply()
        has_state = self._hooked.can("state_dict") and not self._own.is_sharded
        tensors, rest = self._common.optimizer_state()
        wrapped = {
            what: {name: self._common.distributed(name, each.clone()) for name, each in by_name.items()}
            for what, by_name in {"common": self._common.shards, **tensors}.items()
        }
        return {
            "common": wrapped.pop("common"),
            "outer": wrapped,
            "plain": (self._counts(), rest),
            "hook_state": (self._hooked.state.state_dict(),) if has_state else None,
        }

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from state_dict(). Load the model's and the inner optimizer's, too.

        Raises KeyError for missing and unknown entries; ValueError for another model or outer optimizer, and
        for a hook's errors without the hook; and the errors of the hook's state. After an error nothing is
        changed.
        """
        keys = {"common", "outer", "plain", "hook_state"}
        if not isinstance(state_dict, dict):
            raise ValueError(f"LocalSteps loads what state_dict() gives, got {described(state_dict)}")
        if set(state_dict) != keys:
            raise KeyError(f"LocalSteps loads the entries {sorted(keys)}, but got {list(state_dict)}")
        common, (given, rest), hook_state = (state_dict[name] for name in ("common", "plain", "hook_state"))
        self._common.require_like(common)
        for each in state_dict["outer"].values():
            self._common.require_like({**common, **each})
        if hook_state is not None and not self._hooked.can("load_state_dict"):
            raise ValueError(
                "the checkpoint has the errors of a hook, which would be lost in a LocalSteps without it: "
                'give it the hook and its state, or set the entry "hook_state" to None'
            )
        require_numbers(given["every"], len(self._fragments), self._delay, len(self._own.params))
        counts = {"every": given["every"], **{name: COUNT(name, given[name]) for name in _COUNTS}}
        outer = {
            what: {n: local_of(t) for n, t in each.items()} for what, each in state_dict["outer"].items()
        }
        before = self._common.optimizer_state()
        self._common.load_optimizer(outer, rest)
        try:
            if hook_state is not None:
                self._hooked.state.load_state_dict(hook_state[0])
        except BaseException:
            self._common.load_optimizer(*before)
            raise
        self._common.load(common)
        self._set(counts)

    def load_from_dcp(
        self, checkpoint_id: str | os.PathLike[str], key: str = "local_steps", *, storage_reader: Any = None
    ) -> None:
        """Load what torch.distributed.checkpoint has saved of state_dict() under the key, on every rank.

        Sites and shards may be others than those that saved. Only load files you trust; see
        compress.load_from_dcp. Raises the errors of load_state_dict.
        """
        import torch.distributed.checkpoint as dcp  # takes half a second

        reader = storage_reader or dcp.FileSystemReader(checkpoint_id)
        target: dict[str, Any] = {f"{key}.plain": None}
        found: dict[str, Tensors] = {"common": {}}
        for saved in reader.read_metadata().state_dict_metadata:
            kind, _, rest = saved.removeprefix(f"{key}.").partition(".")
            what, _, name = f"common.{rest}".partition(".") if kind == "common" else rest.partition(".")
            if saved.startswith((f"{key}.common.", f"{key}.outer.")) and name in self._own.params:
                local = torch.empty_like(self._common.shards[name])
                target[saved] = found.setdefault(what, {})[name] = self._common.distributed(name, local)
        dcp.load(target, storage_reader=reader)
        common, plain = found.pop("common"), target[f"{key}.plain"]
        self.load_state_dict({"common": common, "outer": found, "plain": plain, "hook_state": None})


def require_numbers(every: Any, fragments: Any, delay: Any, num_weights: int) -> None:
    """Raise ValueError for numbers that don't fit one another or the model."""
    for name, value, least in (("every", every, 1), ("fragments", fragments, 1), ("delay", delay, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}, but must be an int and at least {least}")
    if fragments > num_weights:
        raise ValueError(f"fragments is {fragments}, but the model has {num_weights} trainable parameters")
    if every % fragments:
        raise ValueError(f"every is {every}, but must be a multiple of fragments, {fragments}")
    if delay >= every // fragments:
        raise ValueError(
            f"delay is {delay}, but must be below {every // fragments}, the steps between two exchanges: one "
            "exchange is under way at a time"
        )
