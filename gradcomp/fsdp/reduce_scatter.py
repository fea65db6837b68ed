"""Compression of FSDP2's reduce-scatter: the sum of gradients over the shards of a model."""

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from gradcomp.comm.bucket import ShardBucket
from gradcomp.comm.consistency import require_same_group
from gradcomp.comm.torch_private import require_names
from gradcomp.compress import CompressorState

from .checks import Averager, check_state, checked_groups, options_of, require_agreement, require_default
from .param_groups import Collective, ParamGroup, call_after_backward

_WHOSE = "compress_reduce_scatter"


class CompressedReduceScatter(Collective):
    """The reduce-scatter of one parameter group, with the methods of torch's ReduceScatter.

    index: the group's index in the model, which its bucket gets.
    """

    def __init__(self, index: int, param_group: ParamGroup, sums: Averager):
        self._index, self._param_group, self._sums = index, param_group, sums
        self._group = param_group.reduce_scatter_group

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write the sum over the ranks of this rank's row to output_tensor.

        input_tensor: [ranks · n], in the reduce dtype: a row of padded gradients for each rank. It may be
            changed.
        output_tensor: [n], in the same dtype.
        op: SUM.
        async_op: ignored; the current stream waits for the sum.

        Raises RuntimeError for another group or op than compress_reduce_scatter found or set.
        """
        name = self._param_group.name
        if group is not self._group:
            raise RuntimeError(
                f"{name} is reduce-scattered in another process group now: call "
                f"set_separate_reduce_scatter_group before {_WHOSE}"
            )
        if op != dist.ReduceOp.SUM:
            raise RuntimeError(
                f"FSDP2 asks for {op} of {name}, but {_WHOSE} sums: leave "
                "set_force_sum_reduction_for_comms(True) in force"
            )
        parameters = self._param_group.reduced(output_tensor, whole=True)
        bucket = ShardBucket(self._index, input_tensor, parameters, output_tensor)
        bucket.unit, _ = self._param_group.units(output_tensor.dtype)
        bucket.watched = self._param_group.shards
        self._sums.average(bucket, self._param_group.replicate_group)


def compress_reduce_scatter(model: nn.Module, state: CompressorState) -> None:
    """Send the gradients of a model that FSDP2 shards in 4, 8 or 16 bits when they are reduce-scattered.

    Every FSDP module is a bucket. A rank quantizes its gradient of the whole module and sends each rank its
    shard of it; the owner sums in fp32. Rounding errors are added to the next gradient: 4 bytes per parameter
    of the whole model on every rank, see docs/fsdp.md.

    model: after fully_shard, called for the model itself, too. On a 2-D mesh, or with compress_replicas, the
        sum over the replicas follows.
    state: a QuantizationState, for this model alone. Its process group becomes the shards' if it has none.

    Sets set_force_sum_reduction_for_comms(True) in every FSDP module. Call it on every rank, before training.

    Raises TypeError for another state or model; ValueError for a model that is not sharded, or whose parts
    are sharded over different ranks, for a second call, and for a state that doesn't fit; RuntimeError if
    torch is too old, and on every rank if the ranks differ.

    Example::

        fully_shard(model)
        compress_reduce_scatter(model, QuantizationState(bits=4))
    """
    groups, shard_group = check_reduce_scatter(model, state)
    replicate_group = groups[0].replicate_group
    for each in (shard_group, replicate_group):
        if each is not None:
            require_same_group(_WHOSE, each)
    require_agreement(_WHOSE, groups, replicate_group, options_of(state))
    named = [zip(group.names(model), group.whole_placeholders, strict=True) for group in groups]
    state.number_parameters(chain.from_iterable(named))
    state.process_group, state.has_shards = shard_group, True
    sums = Averager(_WHOSE, state, shard_group)
    for index, group in enumerate(groups):
        group.install_reduce_scatter(CompressedReduceScatter(index, group, sums))
    call_after_backward(model, sums.end_of_backward)


def check_reduce_scatter(
    model: Any, state: CompressorState, whose: str = _WHOSE
) -> tuple[list[ParamGroup], dist.ProcessGroup]:
    """Return (the model's parameter groups, their process group).

    Raises compress_reduce_scatter's errors, which name `whose`, except the errors about ranks that differ.
    """
    groups = checked_groups(whose, model)
    require_default(whose, groups, "reduce_scatter")
    shard_group = groups[0].reduce_scatter_group
    for group in groups:
        if group.reduce_scatter_group is not shard_group:
            first, other = map(dist.get_process_group_ranks, (shard_group, group.reduce_scatter_group))
            raise ValueError(
                f"{groups[0].name} is sharded over ranks {first}, but {group.name} over ranks {other} or in "
                f"another process group: {whose} takes a model that is sharded over one mesh"
            )
    if not isinstance(state, CompressorState) or not state._compressor.sums_shards:
        raise TypeError(
            f"{whose} takes a QuantizationState, got {state!r}. PowerSGD and other compressors average a "
            "whole bucket on every rank, in all-reduces: use them between replicas, with compress_replicas"
        )
    check_state(whose, state, shard_group, "the shards' group")
    if state.recorder is not None:
        raise ValueError(
            f"{whose}: the state has a Recorder, but sums of shards are no averages to record: detach it"
        )
    require_names(FSDPModule, "set_custom_reduce_scatter", "set_force_sum_reduction_for_comms")
    return groups, shard_group
