"""Local steps: every rank trains by itself for a while; then all average how far their weights have gone.

    H local steps     every rank with its own optimizer and data
    exchange          pseudo-gradient = common weights − own weights, averaged over the ranks, compressed
    outer step        the outer optimizer applies the average to the common weights, on every rank alike

With fragments, a part of the weights is exchanged at a time, in turn. With a delay, an exchange is under way
during the next local steps. If FSDP2 shards the model within a site, each rank exchanges its shards with the
ranks of other sites that hold the same ones.

Sources: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017
(averaging); Douillard et al., "DiLoCo", 2023, algorithm 1 (outer optimizer), and "Streaming DiLoCo", 2025
(fragments and delay).
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable

from ..comm.bucket import Hook
from ..comm.consistency import difference, require_all_ranks, require_same_on_all_ranks
from ..comm.process_group import ExplainedError, device_for, ranks_of, resolve_group
from ..comm.reduced_values import ReducedValues
from ..comm.torch_private import tree_map_only
from ..compress.agreement import furthest, take_over
from ..compress.checkpoint import require_keys
from ..reducer import broadcast_coalesced
from ..reducer.average import Averaging, hooked_for
from ..reducer.parameters import common_name_of
from ..rules import COUNT, RANK, described
from .weights import CommonWeights, OwnWeights, Tensors, divided, local_of


@dataclass
class Exchange:
    """An average of pseudo-gradients that is under way, with numbers of ranks.

    moved: the pseudo-gradients, which become their averages.
    begun: the weights when it began; empty without a delay.
    counts: the numbers of ranks that mean to give something in the next exchange, and that do in this one;
        then every rank's number of exchanges.
    hooks_step: the number of the hook's step, if its state counts.
    num_steps: the number of local steps since it began.
    """

    moved: Tensors
    begun: Tensors
    counts: ReducedValues
    averaging: Averaging
    hooks_step: int | None
    num_steps: int = 0


class LocalSteps:
    """Trains a model with rare exchanges. Call step() after every step of the inner optimizer.

    model: the model, without DistributedDataParallel; whole, or sharded with fully_shard over a 1-D mesh of
        the ranks of a site. The first rank's weights and buffers are copied to all ranks.
    outer_optimizer: an optimizer over the model's trainable parameters, which applies averaged
        pseudo-gradients; torchft's DiLoCo calls it so, too. Its parameters become the common weights. None:
        SGD with learning rate 1, which makes the weights the average of all ranks' weights.
    every: local steps from one exchange of a weight to the next; torchft's sync_every.
    hook, state: as for register_comm_hook. Pseudo-gradients are averaged with them, and error feedback works
        from one exchange to the next. A state counts exchanges as its steps. None: an all-reduce.
    fragments: parts of about equal size that are exchanged in turn, one every `every / fragments` steps.
    delay: local steps during which an exchange is under way; torchft's fragment_sync_delay. What a rank
        learns meanwhile stays in its weights.
    process_group: the ranks, without a hook; None for the default group. A hook has its group in its state.
        For a sharded model one rank of every site: those that hold the same shards.

    Memory: a copy of the weights, at least in fp32, and a fragment's pseudo-gradients during its exchange.
    Buffers, such as BatchNorm's, stay each rank's own.

    Raises TypeError for another model, outer_optimizer or hook; ValueError for numbers and meshes that
    don't fit; RuntimeError on every rank if the ranks' models, hooks or numbers differ.

    Example::

        local_steps = LocalSteps(model, every=20, hook=quantization_hook, state=QuantizationState(bits=4))
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            local_steps.step()
        local_steps.join()
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        outer_optimizer: torch.optim.Optimizer | None = None,
        every: int = 20,
        hook: Hook | None = None,
        state: Any = None,
        fragments: int = 1,
        *,
        delay: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ):
        if not isinstance(model, nn.Module):
            raise TypeError(f"LocalSteps takes a model, got {described(model)}")
        if isinstance(model, Joinable):  # torch's DDP or ours
            raise TypeError(f"LocalSteps takes the model itself, got {described(model)}: pass its module")
        self._hooked = hooked_for("LocalSteps", hook, state, process_group)
        self._own = OwnWeights(model)
        numels = {name: each.numel() for name, each in self._own.params.items()}
        _require_numbers(every, fragments, delay, len(numels))
        self._every, self._delay, self._fragments = every, delay, divided(numels, fragments)
        self._num_since = self._num_exchanges = self._num_begun = self._num_active = 0
        self._under_way: Exchange | None = None
        self._common = CommonWeights(self._own.params, outer_optimizer)
        self.outer_optimizer: torch.optim.Optimizer = self._common.optimizer
        self._keys = self._own.keys()
        # The state may average the model's gradients, too.
        named = ((f"local_steps({name})", each) for name, each in self._keys.items())
        self._hooked.tell("number_parameters", named)
        self._meet(is_new=True)

    @property
    def every(self) -> int:
        """Local steps from one exchange of a weight to the next. Assign to change it, on every rank alike."""
        return self._every

    @every.setter
    def every(self, value: int) -> None:
        _require_numbers(value, len(self._fragments), self._delay, len(self._own.params))
        self._every = value

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> None:
        """Count a local step; begin or apply an exchange if it is time for it. Call it on every rank.

        Raises RuntimeError if the model has other trainable parameters than at construction, and the errors
        of a failed exchange. What a rank has learned then stays in its weights, for the next exchange.

        After an error call regroup() on every rank. An exchange that failed on one rank alone leaves it with
        other common weights: until then the later ones raise RuntimeError on every rank.
        """
        self._num_since += 1
        if (exchange := self._under_way) is not None:
            exchange.num_steps += 1
            if exchange.num_steps == self._delay:
                self._apply()
            elif exchange.num_steps == self._delay // 2:  # most hooks have two collectives
                exchange.averaging.advance()
        if self._num_since >= self._every // len(self._fragments):
            self._begin(gives=True, gives_again=True)
            self._num_since = 0
            if self._delay == 0:
                self._apply()

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
        while self._num_active:
            num_left -= 1
            gives_again = num_left > 0
            # The last fragment may have been exchanged in this very step.
            self._begin(gives=gives_again or (num_left == 0 and self._num_since > 0), gives_again=gives_again)
            self._apply()
        self._num_active, self._num_since = self._group.size(), 0

    @torch.inference_mode(False)
    @torch.no_grad()
    def regroup(self, process_group: dist.ProcessGroup) -> None:
        """Go on with another group, after ranks were lost or before others join, between two steps.

        Every rank of the group must call it, except new ranks, which construct a LocalSteps with the group.
        They take the common weights, the outer optimizer's state and the counts of a rank that has gone
        furthest, and the part of a hook's state that ranks share. Their errors are zero. So does a rank that
        an error has kept from an exchange which others have completed; its other weights stay.

        An exchange under way is completed, or dropped if it fails: what a rank has learned stays in its
        weights. With state.keep_undo = True the errors are then as before the exchange.

        Raises the errors of the constructor.
        """
        if self._under_way is not None:
            with suppress(RuntimeError):
                self._apply()
        self._hooked = self._hooked.regroup(process_group)
        self._meet(is_new=False)

    def _meet(self, *, is_new: bool) -> None:
        """Compare the ranks of the group, and take over what differs from a rank that has gone furthest."""
        has_state = self._hooked.can("process_group")  # otherwise the state is the group
        given = self._hooked.group if has_state else self._hooked.state
        self._group = group = resolve_group("LocalSteps", given, "process_group")
        self._device = device_for(group, self._common.shards.values())
        require_all_ranks("LocalSteps", "train by local steps", group, "Make it on every rank")
        source, most = furthest(1 if is_new else 2 + self._num_exchanges, group, self._device)
        are_all_new = most == 1
        tensors, rest = self._common.optimizer_state()
        values = {
            "every": self._every,
            "fragments": len(self._fragments),
            "delay": self._delay,
            "parameters": [[n, list(each.shape), str(each.dtype)] for n, each in self._own.params.items()],
            "place in the mesh of shards": self._own.place,
            "outer optimizer": [rest["class"], rest["groups"] if are_all_new else "taken over"],
            "hook": common_name_of(self._hooked.hook),
            "the state's type": common_name_of(type(self._hooked.state)) if has_state else None,
            "keep_undo": self._hooked.keep_undo,
        }
        advice = "Give every rank the same model, hook and numbers, and a group of ranks with the same shards"
        require_same_on_all_ranks("LocalSteps", values, group, self._device, advice)
        before = {name: each.clone() for name, each in self._common.shards.items()}
        others = [each if is_new else each.clone() for each in self._own.others()]
        sent = [each for each in (*self._common.shards.values(), *others) if each.numel()]
        broadcast_coalesced(sent, source, group)
        if not are_all_new:
            own = (self._counts(), tensors, rest)
            taken: list[Any] = [tree_map_only(torch.Tensor, torch.Tensor.cpu, own)]
            dist.broadcast_object_list(taken, group_src=source, group=group)
            counts, tensors, rest = taken[0]
            self._set(counts)
            self._common.load_optimizer(tensors, rest)
            if self._hooked.can("shared_state_dict"):
                take_over(self._hooked.state, source, group)
        common = self._common.shards.items()
        self._own.write({name: each for name, each in common if is_new or not each.equal(before[name])})
        self._num_active = group.size()

    # --- exchanges ---

    def _begin(self, *, gives: bool, gives_again: bool) -> None:
        """Begin to exchange the next fragment.

        gives: whether this rank may have learned something since the fragment's last exchange.
        gives_again: whether it takes part in the next exchange.
        """
        self._own.require_unchanged()
        weights = self._own.local(self._fragments[self._num_begun % len(self._fragments)])
        moved = self._common.minus(weights)
        begun = {name: each.clone() for name, each in weights.items()} if self._delay else {}
        numbers = [self._num_exchanges * (i == self._group.rank()) for i in range(self._group.size())]
        what, given = "count the ranks that still train by local steps", [gives_again, gives, *numbers]
        counts = ReducedValues(what, given, [self._group], self._device, dist.ReduceOp.SUM)
        self._num_begun += 1
        hooks_step = self._hooked.step
        try:
            averaging = self._average(moved, self._group.size() / self._num_active, waits_at_once=not begun)
        except BaseException:
            self._hooked.undo(hooks_step, all_know=True)  # by the exchanges' numbers
            raise
        self._under_way = Exchange(moved, begun, counts, averaging, hooks_step)

    def _average(self, moved: Tensors, factor: float, *, waits_at_once: bool) -> Averaging:
        """Multiply the pseudo-gradients of the last fragment begun, and begin to average them over the group.

        factor: makes the average one over the ranks that count. Those that have joined give zeros. Errors, of
            earlier exchanges, count as ever.
        """
        torch._foreach_mul_(list(moved.values()), factor)
        names, num_fragments = [name for name, each in moved.items() if each.numel()], len(self._fragments)
        return Averaging(
            [moved[name] for name in names],
            [self._keys[name] for name in names],
            self._hooked,
            f"{self._hooked.name} in LocalSteps",
            self._group,
            indices=((self._num_begun - 1) % num_fragments, num_fragments),
            waits_at_once=waits_at_once,
        )

    def _apply(self) -> None:
        """Complete the exchange under way, and take the outer step with it.

        Raises ExplainedError on every rank if the ranks have completed different numbers of exchanges.
        """
        exchange, self._under_way = self._under_way, None
        assert exchange is not None
        try:
            exchange.averaging.wait()
            num_active, num_gave, *numbers = map(round, exchange.counts.wait())
            if min(numbers) != max(numbers):
                text = difference("the number of completed exchanges", numbers, ranks_of(self._group))
                raise ExplainedError(
                    f"LocalSteps can't average: {text}, so their common weights differ. Likely cause: an "
                    "exchange failed on some ranks alone, which went on. Call regroup() on every rank"
                )
        except BaseException:
            self._hooked.undo(exchange.hooks_step, all_know=True)
            raise
        moved, size = exchange.moved, self._group.size()
        if 0 < num_gave < self._num_active:  # ranks that meant to give something have joined
            rest = self._common.minus(exchange.begun or self._own.local(moved))
            self._average(rest, size / num_gave - size / self._num_active, waits_at_once=True).wait()
            torch._foreach_add_(list(moved.values()), list(rest.values()))
        now = {name: each.clone() for name, each in self._own.local(exchange.begun).items()}
        if num_gave:
            self._common.step(moved)
        else:  # errors alone: no rank has learned anything, and momentum would go on by itself
            for name, each in moved.items():
                self._common.shards[name] -= each
        self._num_exchanges, self._num_active = self._num_exchanges + 1, num_active
        self._own.write({name: self._common.shards[name] for name in moved})
        for name, weight in self._own.local(now).items():  # what this rank has learned during the exchange
            weight += now[name] - exchange.begun[name]

    # --- checkpoints ---

    def _counts(self) -> dict[str, int]:
        return {"every": self._every, "num_since": self._num_since, "num_exchanges": self._num_exchanges}

    def _set(self, counts: dict[str, int]) -> None:
        self._under_way, self._every, self._num_since = None, counts["every"], counts["num_since"]
        self._num_exchanges = self._num_begun = counts["num_exchanges"]

    @torch.inference_mode(False)
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return everything but the model and the inner optimizer, which are each rank's own.

        An exchange under way is applied first: save weights after it. All ranks call it after the same step.

        common: the common weights, by name; DTensors if the model is sharded.
        outer: the outer optimizer's tensors in the weights' shapes, by what they are and name; likewise.
        plain: a tuple of (counts, the rest of the outer optimizer's state).
        hook_state: a tuple of the hook's state_dict; None without one, and for a sharded model: save
            per_rank_state_dict(state) under a name of the shard.
        """
        if self._under_way is not None:
            self._apply()
        has_state = self._hooked.can("state_dict") and not self._own.place
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
        for a hook's errors without the hook; and the errors of the hook's state. An error changes nothing.
        """
        require_keys("the state_dict of LocalSteps", state_dict, ("common", "outer", "plain", "hook_state"))
        common, (given, rest), hook_state = (state_dict[name] for name in ("common", "plain", "hook_state"))
        self._common.require_like(common)
        for each in state_dict["outer"].values():
            self._common.require_like({**common, **each})
        if hook_state is not None and not self._hooked.can("load_state_dict"):
            raise ValueError(
                "the checkpoint has the errors of a hook, which would be lost in a LocalSteps without it: "
                'give it the hook and its state, or set the entry "hook_state" to None'
            )
        _require_numbers(given["every"], len(self._fragments), self._delay, len(self._own.params))
        counts = {name: COUNT(name, given[name]) for name in ("every", "num_since", "num_exchanges")}
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
        for name, each in self._common.shards.items():
            each.copy_(local_of(common[name]))
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


def _require_numbers(every: Any, fragments: Any, delay: Any, num_weights: int) -> None:
    """Raise ValueError for numbers that don't fit one another or the model."""
    RANK("every", every)
    RANK("fragments", fragments)
    COUNT("delay", delay)
    if fragments > num_weights:
        raise ValueError(f"fragments is {fragments}, but the model has {num_weights} trainable parameters")
    if every % fragments:
        raise ValueError(f"every is {every}, but must be a multiple of fragments, {fragments}")
    if delay >= every // fragments:
        raise ValueError(
            f"delay is {delay}, but must be below {every // fragments}, the steps between two exchanges: one "
            "exchange is under way at a time"
        )
