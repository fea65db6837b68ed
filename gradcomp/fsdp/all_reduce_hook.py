"""The all-reduce hooks of a sharded model: they average reduced gradients over its replicas."""

from typing import Any

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.compress import CompressorState, compress_hook
from gradcomp.compress.consistency import require_same_on_all_ranks
from gradcomp.compress.grad_bucket import GradBucket
from gradcomp.compress.operation import Operation
from gradcomp.compress.streams import average_in_place
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from .param_groups import ParamGroup

AnyState = CompressorState | PowerSGDState


class ReplicaAverage:
    """Averages a model's buckets over its replicas, and counts its state's steps.

    state: None for an exact average in the bucket's dtype.
    """

    def __init__(self, replicate_group: dist.ProcessGroup, state: AnyState | None):
        self.group, self._state = replicate_group, state
        self._is_in_step = False

    def average(self, bucket: GradBucket, shard_group: dist.ProcessGroup) -> None:
        """Average a bucket in place; on CUDA, for what the current stream does next.

        Raises what the state's hook raises. In a state's first step an error of one rank is raised on every
        rank; after that the others learn of it when the process ends, or by their time-out.
        """
        self._is_in_step = True
        if self._state is None or self._state.is_compared:
            self._average(bucket)
            return
        # An error that all ranks of this replicate group have, or this one alone, reaches the other shards.
        failure: Exception | None = None
        try:
            self._average(bucket)
        except Exception as error:
            failure = error
        try:
            require_same_on_all_ranks(
                "the first step of compress_replicas",
                {"error": failure and str(failure)},
                shard_group,
                bucket.buffer().device,
                "The error is that of the ranks which have one",
            )
        except RuntimeError:
            if failure is None:
                raise
        if failure is not None:
            raise failure

    def _average(self, bucket: Any) -> None:
        operation = Operation.averaging(bucket.index(), "compress_replicas", self.group)
        with operation:
            if self._state is None:
                average_in_place(bucket.buffer(), self.group, operation).wait()
            elif isinstance(self._state, PowerSGDState):
                powerSGD_hook(self._state, bucket).wait()
            else:
                compress_hook(self._state, bucket).wait()

    def end_of_backward(self) -> None:
        """Count a step if this backward has averaged anything."""
        if self._is_in_step and self._state is not None:
            self._state.end_step()
        self._is_in_step = False


class AllReduceHook:
    """The hook of one parameter group. FSDP2 calls it with the output of the reduce-scatter.

    index: the group's index in the model: its bucket's.
    """

    def __init__(self, index: int, param_group: ParamGroup, replicas: ReplicaAverage):
        self._index, self._param_group, self._replicas = index, param_group, replicas
        # What set_requires_all_reduce(False) has left to a later backward, and its parameters.
        self._kept: tuple[torch.Tensor, list[torch.Tensor]] | None = None

    @torch.no_grad()
    def __call__(self, output: torch.Tensor) -> None:
        """Average a reduced tensor over the replicas, in place.

        output: [numel], the padded local gradients of the parameters that have one, one after another, in the
        dtype in which FSDP2 reduces.
        """
        group, parameters = self._param_group, self._param_group.reduced(output)
        shard_group = group.shard_group
        assert shard_group is not None
        if self._kept is not None:
            self._add_kept(output, parameters)
        if not group.averages_now:
            # FSDP2 adds zeros to .grad now, and to those the average of all in a later backward.
            self._kept = output.clone(), parameters
            output.zero_()
            return
        self._replicas.average(GradBucket(self._index, output, parameters, is_last=False), shard_group)
        if group.divide_factor is not None:
            # It divides the sum over all ranks, replicas included.
            output.mul_(self._replicas.group.size())
        if ops.has_streams(output.device):
            # It belongs to the reduce-scatter's stream. FSDP2 casts it, and before torch 2.15 frees it then.
            output.record_stream(torch.cuda.current_stream(output.device))

    def _add_kept(self, output: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        """Add what earlier backwards have kept. Raises RuntimeError if those had other gradients."""
        assert self._kept is not None
        (kept, of_parameters), self._kept = self._kept, None
        if list(map(id, of_parameters)) != list(map(id, parameters)):
            raise RuntimeError(
                f"{self._param_group.name} has gradients of {len(parameters)} parameters now, but of "
                f"{len(of_parameters)} in the last backward, which set_requires_all_reduce(False) kept from "
                "being averaged: use the same parameters in both, or set_requires_gradient_sync(False)"
            )
        output.add_(kept)
