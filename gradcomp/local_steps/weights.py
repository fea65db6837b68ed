"""The weights of local steps: a rank's own, whole or sharded, and the common ones with their optimizer."""

from bisect import bisect_left
from collections.abc import Iterable, MutableMapping
from itertools import accumulate, compress, pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakIdKeyDictionary

from ..compress.parameter_keys import without_wrappers
from ..rules import described

Tensors = dict[str, torch.Tensor]  # by the weight's name
_key_of: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()


class OwnWeights:
    """A rank's trainable parameters, whole, or the shards that FSDP2 gives it.

    params: the parameters by name, without the parts that wrappers add.
    place: this rank's places in the meshes of shards, pairs of coordinates and sizes; empty without any.

    Raises ValueError without trainable parameters, and unless each rank has other shards of all, or all.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        named = self._named()
        self.params = {without_wrappers(name): each for name, each in named if each.requires_grad}
        if not self.params:
            raise ValueError("the model of LocalSteps has no trainable parameters")
        _require_sharded_within_site(self.params)
        meshes = {each.device_mesh for each in self.params.values() if isinstance(each, DTensor)}
        self.place = sorted([mesh.get_coordinate(), list(mesh.shape)] for mesh in meshes)

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        """Return all parameters, with FSDP2's gathered ones dropped: the next forward gathers them again."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return list(self._model.named_parameters())

    def keys(self) -> Tensors:
        """Return the tensors by which a hook's state knows the weights: each has the shape of a shard.

        They are not the parameters, whose gradients the state may average elsewhere.
        """
        for each in self.params.values():
            if each not in _key_of or _key_of[each].shape != local_of(each).shape:
                _key_of[each] = torch.empty(local_of(each).shape, dtype=each.dtype, device="meta")
        return {name: _key_of[each] for name, each in self.params.items()}

    def local(self, names: Iterable[str]) -> Tensors:
        """Return this rank's weights, or its shards of them, by name."""
        return {name: local_of(self.params[name]).detach() for name in names}

    def others(self) -> list[torch.Tensor]:
        """Return the model's buffers, and the parameters that aren't trained."""
        known, parameters = set(map(id, self.params.values())), [each for _, each in self._named()]
        found = (*parameters, *self._model.buffers())
        return [local_of(each).detach() for each in found if id(each) not in known]

    def write(self, values: Tensors) -> None:
        """Write values to the weights of the same names, rounded to their dtypes."""
        self._named()
        for name, weight in self.local(values).items():
            weight.copy_(values[name])

    def require_unchanged(self) -> None:
        """Raise RuntimeError if the model's trainable parameters are not these."""
        named, known = self._named(), set(map(id, self.params.values()))
        found = {id(each) for _, each in named}
        gone = [name for name, each in self.params.items() if id(each) not in found]
        new = [name for name, each in named if each.requires_grad and id(each) not in known]
        if gone or new:
            raise RuntimeError(
                f"LocalSteps can't average {(new or gone)[0]}: since it was made, {len(new)} parameters were "
                f"added or unfrozen, and {len(gone)} replaced or removed, for example by "
                "load_state_dict(assign=True). Call join() before you change the model, and make a new "
                "LocalSteps after it"
            )


class CommonWeights:
    """The weights that all ranks have in common since the last exchange, and the optimizer that moves them.

    They are at least in fp32: a step of the average may be smaller than a 16-bit weight's rounding.

    params: the model's trainable parameters by name.
    optimizer: over these parameters, or over all of the model's. Its parameters become the common weights.
        None: SGD with learning rate 1.
    shards: the common weights, or this rank's shards of them, by name.

    Raises TypeError or ValueError for another optimizer.
    """

    def __init__(self, params: Tensors, optimizer: Any):
        if optimizer is None:
            optimizer = torch.optim.SGD(params.values(), lr=1.0)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"LocalSteps takes an optimizer as its outer_optimizer, got {described(optimizer)}"
            )
        given = {
            id(each) for group in optimizer.param_groups for each in group["params"] if each.requires_grad
        }
        if given != set(map(id, params.values())):
            raise ValueError(
                f"the outer_optimizer has {len(given)} trainable parameters, which are not the model's "
                f"{len(params)}: make it for this LocalSteps, with model.parameters()"
            )
        self.optimizer = optimizer
        self._params = {
            name: each.detach().to(torch.promote_types(each.dtype, torch.float32), copy=True)
            for name, each in params.items()
        }
        self.shards = {name: local_of(each) for name, each in self._params.items()}
        common = {id(each): self._params[name] for name, each in params.items()}
        entries = {common[id(each)]: entry for each, entry in optimizer.state.items() if id(each) in common}
        optimizer.state = type(optimizer.state)(dict, entries)
        for group in optimizer.param_groups:
            if "param_names" in group:
                known = [id(each) in common for each in group["params"]]
                group["param_names"] = list(compress(group["param_names"], known))
            group["params"] = [common[id(each)] for each in group["params"] if id(each) in common]

    def minus(self, weights: Tensors) -> Tensors:
        """Return the pseudo-gradients of weights: how far they are from the common ones, as first rounded."""
        common = self.shards
        return {name: common[name].to(w.dtype).to(common[name].dtype) - w for name, w in weights.items()}

    def step(self, gradients: Tensors) -> None:
        """Take an outer step with the averaged pseudo-gradients of some weights."""
        try:
            for name, each in gradients.items():
                self._params[name].grad = self.distributed(name, each)
            self.optimizer.step()
        finally:
            for name in gradients:
                self._params[name].grad = None

    def distributed(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Return the DTensor of which this is this rank's shard, if the weight of this name is one."""
        weight = self._params[name]
        if not isinstance(weight, DTensor):
            return local
        options: dict[str, Any] = {"run_check": False, "shape": weight.shape, "stride": weight.stride()}
        return DTensor.from_local(local, weight.device_mesh, weight.placements, **options)

    # --- checkpoints, and ranks that join ---

    def optimizer_state(self) -> tuple[dict[str, Tensors], dict[str, Any]]:
        """Return the optimizer's tensors in the weights' shapes, by what they are and name, and the rest."""
        tensors: dict[str, Tensors] = {}
        entries: dict[str, dict[str, Any]] = {}
        names = {id(each): name for name, each in self._params.items()}
        for param, entry in self.optimizer.state.items():
            name = names[id(param)]
            for what, value in entry.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == param.shape:
                    tensors.setdefault(what, {})[name] = local_of(value).clone()
                else:
                    is_tensor = isinstance(value, torch.Tensor)
                    entries.setdefault(name, {})[what] = value.clone() if is_tensor else value
        groups = [
            {**group, "params": [names[id(each)] for each in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        return tensors, {"class": type(self.optimizer).__name__, "groups": groups, "entries": entries}

    def load_optimizer(self, tensors: dict[str, Tensors], rest: dict[str, Any]) -> None:
        """Load optimizer_state(). Raises ValueError for another optimizer, or other groups of weights."""
        if rest["class"] != type(self.optimizer).__name__:
            raise ValueError(
                f"the outer optimizer is a {type(self.optimizer).__name__}, not a {rest['class']}"
            )
        names = {id(each): name for name, each in self._params.items()}
        order: list[str] = []
        groups = []
        for group in self.optimizer.param_groups:
            own = [names[id(each)] for each in group["params"]]
            found = [each for each in rest["groups"] if set(each["params"]) == set(own)]
            if not found:
                raise ValueError(
                    f"the outer optimizer has a group of {own[:5]}, but the saved groups have "
                    f"{[each['params'][:5] for each in rest['groups']]}: group the parameters alike"
                )
            groups.append({**found[0], "params": list(range(len(order), len(order) + len(own)))})
            order += own
        state = {i: dict(rest["entries"].get(name, {})) for i, name in enumerate(order)}
        for what, by_name in tensors.items():
            for i, name in enumerate(order):
                if name in by_name:
                    local = by_name[name].to(self.shards[name].device, copy=True)
                    state[i][what] = self.distributed(name, local)
        state = {i: entry for i, entry in state.items() if entry}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def require_like(self, weights: Tensors) -> None:
        """Raise ValueError unless weights are as these: in names, in whole shapes and in shards' shapes."""
        own, found = (
            {name: (tuple(each.shape), tuple(local_of(each).shape)) for name, each in given.items()}
            for given in (self._params, weights)
        )
        if own != found:
            unlike = sorted(name for name in {*own, *found} if own.get(name) != found.get(name))
            raise ValueError(
                f"LocalSteps loads the weights of another model: {unlike[0]} has (shape, shape of the shard) "
                f"{found.get(unlike[0])} in the checkpoint, and {own.get(unlike[0])} in this model"
            )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _require_sharded_within_site(params: Tensors) -> None:
    """Raise ValueError if only some parameters are sharded, and for shards that two ranks hold."""
    sharded = {name: each for name, each in params.items() if isinstance(each, DTensor)}
    for name, each in sharded.items():
        for size, placement in zip(each.device_mesh.shape, each.placements, strict=True):
            if size > 1 and not isinstance(placement, Shard):
                raise ValueError(
                    f"LocalSteps takes parameters that a site's ranks shard; {name} is {placement!r} in a "
                    f"mesh of {tuple(each.device_mesh.shape)}, where torch averages replicas each step. "
                    'Give fully_shard the 1-D mesh["shard"], and LocalSteps '
                    'process_group=mesh["replicate"].get_group()'
                )
    if sharded and len(sharded) < len(params):
        others = next(name for name in params if name not in sharded)
        raise ValueError(f"LocalSteps takes a model that is sharded as a whole, but {others} is not sharded")


def divided(numels: dict[str, int], fragments: int) -> list[list[str]]:
    """Divide weights into runs of about equal size, none of them empty."""
    sums, ends, names = list(accumulate(numels.values())), [0], list(numels)
    for number in range(1, fragments):
        end = bisect_left(sums, sums[-1] * number / fragments) + 1
        ends.append(min(max(end, ends[-1] + 1), len(names) - fragments + number))
    return [names[start:stop] for start, stop in pairwise([*ends, len(names)])]
