"""Checks of a model, its state and the ranks before gradients are compressed, and in the first step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from gradcomp.comm.all_reduce import average_in_place
from gradcomp.comm.consistency import require_same_on_all_ranks
from gradcomp.comm.process_group import Explaining, global_ranks_of, kept_of
from gradcomp.compress import CompressorState

from .param_groups import ParamGroup, param_groups_of


def checked_groups(whose: str, model: Any) -> list[ParamGroup]:
    """Return the parameter groups of a model that FSDP2 shards.

    Raises TypeError for anything but a module; ValueError unless fully_shard shards the whole model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{whose} takes a module, got {model!r}")
    if not isinstance(model, FSDPModule):
        raise ValueError(
            f"{whose} takes a model sharded with torch.distributed.fsdp.fully_shard, but "
            f"{type(model).__name__} is not: call fully_shard on the model itself after its parts; for "
            "DDP, call its register_comm_hook(state, hook)"
        )
    groups = param_groups_of(model)
    if not groups:
        raise ValueError(f"{type(model).__name__} has no sharded parameters")
    for group in groups:
        if group.has_dtensors:
            raise ValueError(
                f"{whose}: {group.name} had DTensors before fully_shard, as with tensor parallelism, which "
                "gradcomp doesn't know. Compress models that fully_shard alone shards"
            )
        if group.shard_group is None:
            raise ValueError(
                f"{whose}: {group.name} is replicated with replicate(), in which torch has no place for "
                "another average. Call fully_shard over a mesh of size 1 and compress_replicas, or use "
                "DistributedDataParallel and a hook"
            )
    return groups


def require_default(whose: str, groups: list[ParamGroup], kind: str) -> None:
    """Raise ValueError for a group with another collective than torch's. kind: see ParamGroup.custom."""
    for group in groups:
        if (name := group.custom(kind)) is not None:
            raise ValueError(
                f"{group.name} has another {kind.replace('_', '-')} already, a {name}. Likely cause: a "
                f"second call of {whose}, or set_custom_{kind}, set_symm_mem_for_comm or "
                "set_allocate_memory_from_process_group_for_comm"
            )


def check_state(whose: str, state: CompressorState, group: dist.ProcessGroup, group_name: str) -> None:
    """Raise ValueError for a state that has another model, or another process group than the named one."""
    if state.has_model:
        raise ValueError(
            f"{whose}: the state averages the gradients of a model already: make one state per model"
        )
    ranks, given = (global_ranks_of(whose, each) for each in (state.process_group or group, group))
    ranks = kept_of(state.process_group or group).get("ranks of the mesh", ranks)  # node by node
    if ranks != given:
        raise ValueError(
            f"the state's process group has ranks {ranks}, but {group_name} has {given}: set "
            f"state.process_group = {group_name}"
        )


def options_of(state: CompressorState | None) -> dict[str, Any]:
    """Return what require_agreement compares of a state."""
    if state is None:
        return {"state": None}
    named = {"algorithm": state.algorithm, "ranks_per_node": state.ranks_per_node}
    return {"state": named | state.compared_options()}


def require_agreement(
    whose: str, groups: list[ParamGroup], replicate_group: dist.ProcessGroup | None, options: dict[str, Any]
) -> None:
    """Raise RuntimeError on every rank of the model unless all have equal modules, shapes and options.

    The ranks of each shard mesh are compared, then the replicas. Each comparison has the errors of those
    before it, so ranks that differ anywhere in the grid differ in one of them.

    replicate_group: None for a model without replicas.
    """
    device, advice = groups[0].device, "Give every rank the same model, mesh and options"
    values: dict[str, Any] = {
        **options,
        "number of replicas": replicate_group.size() if replicate_group else 1,
        "FSDP modules": [group.name for group in groups],
        "dtypes": [sorted(map(str, group.gathered_dtypes)) for group in groups],
        "modules with fsdp_pre_all_gather": [group.name for group in groups if group.has_extensions],
        "shapes": [[list(each.shape) for each in group.placeholders] for group in groups],
    }

    compare: Callable[[], Any] = partial(bool)  # nothing before the first comparison
    for shard_group in {id(group.shard_group): group.shard_group for group in groups}.values():
        compare = partial(raise_on_all, whose, compare, shard_group, device, advice, values)
    if replicate_group is not None:
        values = values | {"rank in the shard mesh": [group.shard_group.rank() for group in groups]}
        compare = partial(raise_on_all, whose, compare, replicate_group, device, advice, values)
    compare()


def raise_on_all(
    whose: str,
    function: Callable[[], Any],
    others: dist.ProcessGroup,
    device: torch.device,
    advice: str,
    values: dict[str, Any] | None = None,
) -> None:
    """Call a function, and raise its error, or one that tells of it, on every rank of another group, too.

    others: a group whose ranks all call this; the function communicates within other groups.
    values: must be equal on all ranks of `others`, by name.
    """
    failure: Exception | None = None
    try:
        function()
    except Exception as error:
        failure = error
    try:
        told = {**(values or {}), "error": failure and str(failure)}
        require_same_on_all_ranks(whose, told, others, device, advice)
    except RuntimeError:
        if failure is None:
            raise
    if failure is not None:
        raise failure


class Averager:
    """Averages a model's buckets, or sums its shards, with its state, and counts the state's steps.

    A step is a backward in which anything was reduced.

    state: None for exact averages in the buckets' dtype.
    group: the ranks between which the buckets are averaged.
    """

    def __init__(self, whose: str, state: CompressorState | None, group: dist.ProcessGroup):
        self._whose, self._state, self.group = whose, state, group

    def average(self, bucket: Any, others: dist.ProcessGroup | None) -> None:
        """Average a bucket in place, or sum its shard; on CUDA, for what the current stream does next.

        others: the ranks that don't average with this rank, but train with it; None if there are none.

        Raises the errors of the state. In a state's first step an error of one rank is raised on every rank,
        also on the others. Later the other ranks notice when the process ends, or by their time-out.
        """
        if self._state is None or self._state.is_compared or others is None:
            self._average(bucket)
            return
        raise_on_all(
            f"the first step of {self._whose}",
            partial(self._average, bucket),
            others,
            bucket.buffer().device,
            "The error is that of the ranks which have one",
        )

    def _average(self, bucket: Any) -> None:
        operation = Explaining.averaging(bucket.index(), self._whose, self.group)
        with operation:
            if self._state is None:
                average_in_place(bucket, self.group, operation).wait()
            else:
                self._state.average(self._whose, bucket).wait()

    def end_of_backward(self) -> None:
        """Count a step if this backward has reduced anything that wasn't taken back."""
        if self._state is not None and self._state._steps.num_buckets:
            self._state.end_step()
