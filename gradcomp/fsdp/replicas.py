"""Compression between the replicas of a sharded model, in the all-reduce hooks of its parameter groups."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from gradcomp.comm.bucket import GradBucket
from gradcomp.comm.consistency import require_same_group
from gradcomp.comm.process_group import global_ranks_of, require_group
from gradcomp.compress import CompressorState
from gradcomp.device import has_streams
from gradcomp.reducer import broadcast_coalesced

from .checks import Averager, check_state, checked_groups, options_of, require_agreement
from .param_groups import ParamGroup, call_after_backward


class AllReduceHook:
    """The hook of one parameter group. FSDP2 calls it with the output of the reduce-scatter.

    index: the group's index in the model, which its bucket gets.
    """

    def __init__(self, index: int, param_group: ParamGroup, replicas: Averager):
        self._index, self._param_group, self._replicas = index, param_group, replicas
        # Gradients that set_requires_all_reduce(False) has left to a later backward, and their parameters.
        self._kept: tuple[torch.Tensor, list[torch.Tensor]] | None = None

    @torch.no_grad()
    def __call__(self, output: torch.Tensor) -> None:
        """Average a reduced tensor over the replicas, in place.

        output: [numel], in the dtype in which FSDP2 reduces: the padded local gradients one after another,
            without parameters that have none.

        Raises RuntimeError if gradients kept by earlier backwards had other parameters.
        """
        group, parameters = self._param_group, self._param_group.reduced(output)
        if self._kept is not None:
            (kept, of_parameters), self._kept = self._kept, None
            if list(map(id, of_parameters)) != list(map(id, parameters)):
                raise RuntimeError(
                    f"{group.name} has gradients of {len(parameters)} parameters now, but of "
                    f"{len(of_parameters)} in the last backward, which set_requires_all_reduce(False) kept "
                    "from being averaged: use the same parameters in both, or "
                    "set_requires_gradient_sync(False)"
                )
            output.add_(kept)
        if not group.averages_now:
            # FSDP2 adds zeros to .grad now, and in a later backward the average of all gradients.
            self._kept = output.clone(), parameters
            output.zero_()
            return
        bucket = GradBucket(self._index, output, parameters, is_last=False)
        _, bucket.unit = group.units(output.dtype)
        bucket.watched = group.shards
        self._replicas.average(bucket, group.shard_group)
        if group.divide_factor is not None:
            # The factor divides the sum over all ranks, replicas included.
            output.mul_(self._replicas.group.size())
        if has_streams(output.device):
            # It is of the reduce-scatter's stream. FSDP2 casts it and, before torch 2.15, frees it.
            output.record_stream(torch.cuda.current_stream(output.device))

    def forget(self) -> None:
        """Drop the gradients that are kept for a later backward."""
        self._kept = None


_WHOSE = "compress_replicas"


@torch.inference_mode(False)
def compress_replicas(
    model: nn.Module, replicate_group: dist.ProcessGroup, state: CompressorState | None = None
) -> None:
    """Average a sharded model's gradients over its replicas, compressed.

    FSDP2 still averages over the shards. Every FSDP module is a bucket, in the local shards' shapes: PowerSGD
    compresses each rank's rows of a matrix.

    model: after fully_shard over a 1-D mesh, called for the model itself, too. A mesh of size 1 makes it DDP.
    replicate_group: the ranks that hold the same shards, one of every replica.
    state: a PowerSGDState, a QuantizationState, or any other CompressorState, for this model alone. Its
        process group becomes replicate_group if it has none. None averages exactly.

    Copies the group's first rank's parameters and buffers to all. Call it on every rank, before training.

    Raises TypeError for arguments of other types; ValueError for a model that is not sharded, or over a 2-D
    mesh, for a second call, and for a group or state that doesn't fit; RuntimeError if the ranks differ.

    Example::

        mesh = init_device_mesh("cuda", (num_nodes, 8), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        state = PowerSGDState(mesh["replicate"].get_group(), matrix_approximation_rank=8)
        compress_replicas(model, mesh["replicate"].get_group(), state)
    """
    groups = check_replicas(model, replicate_group, state)
    require_same_group(_WHOSE, replicate_group)
    require_agreement(_WHOSE, groups, replicate_group, options_of(state))
    for group in groups:
        group.module.reshard()
    _copy_from_first(chain(model.parameters(), model.buffers()), replicate_group, groups[0].device)
    if state is not None:
        named = [zip(group.names(model), group.placeholders, strict=True) for group in groups]
        state.number_parameters(chain.from_iterable(named))
        state.process_group = replicate_group
        state.shard_group = groups[0].shard_group
    replicas = Averager(_WHOSE, state, replicate_group)
    for index, group in enumerate(groups):
        hook = AllReduceHook(index, group, replicas)
        group.install(hook, hook.forget)
    call_after_backward(model, replicas.end_of_backward)


def check_replicas(
    model: Any, replicate_group: dist.ProcessGroup, state: CompressorState | None
) -> list[ParamGroup]:
    """Return the model's parameter groups.

    Raises compress_replicas' errors, except the errors about ranks that differ.
    """
    if replicate_group is None:
        raise TypeError(f"{_WHOSE} takes the replicas' process group as its replicate_group, got None")
    require_group(_WHOSE, replicate_group, "replicate_group")
    groups = checked_groups(_WHOSE, model)
    for group in groups:
        if group.has_hook:
            raise ValueError(
                f"{group.name} has an all-reduce hook already. Likely cause: a second call of {_WHOSE}"
            )
        if group.replicate_group is not None:
            raise ValueError(
                f"{group.name} is replicated by torch, which averages over the replicas by itself. Give "
                'fully_shard a 1-D mesh, mesh["shard"], and the replicas\' group to compress_replicas'
            )
        shards = dist.get_process_group_ranks(group.shard_group)
        replicas = global_ranks_of(_WHOSE, replicate_group)
        if len(common := set(shards) & set(replicas)) > 1:
            raise ValueError(
                f"replicate_group has ranks {replicas}, of which {sorted(common)} hold different shards of "
                f"{group.name} (sharded over ranks {shards}), but must have one rank of every replica: "
                'mesh["replicate"].get_group() of the 2-D mesh'
            )
    unready = [name for name, each in model.named_parameters() if each.is_meta]
    if unready:
        raise ValueError(f"{_WHOSE} needs the parameters' values, but {unready[0]} is a meta tensor")
    if state is not None:
        if not isinstance(state, CompressorState):
            raise TypeError(
                f"{_WHOSE} takes a PowerSGDState, a QuantizationState, another CompressorState, or None as "
                f"its state, got {state!r}"
            )
        check_state(_WHOSE, state, replicate_group, "replicate_group")
    return groups


@torch.no_grad()
def _copy_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Copy the local parts of tensors from the group's first rank to all its ranks, in place.

    device: a device whose tensors the group's backend takes; parameters may be offloaded to the CPU.
    """
    for tensor in tensors:
        local = tensor.detach()
        if isinstance(local, DTensor):
            local = local.to_local()
        if not local.numel():
            continue
        on_device = local.to(device)
        broadcast_coalesced([on_device], 0, group)
        local.copy_(on_device)
