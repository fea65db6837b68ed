"""Uneven inputs: what a rank without input does while others go on."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from gradcomp.comm.process_group import Operation

if TYPE_CHECKING:
    from .distributed import DistributedDataParallel


class UnevenInputs(Joinable):
    """The part of the wrapper that lets ranks have different numbers of inputs."""

    process_group: dist.ProcessGroup
    device: torch.device

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may have different numbers of inputs: see torch's join."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return DDPJoinHook(self)  # type: ignore[arg-type]

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group


class DDPJoinHook(JoinHook):
    """Issues the same collectives as the ranks that go on, with zeros."""

    def __init__(self, ddp: "DistributedDataParallel"):
        self.ddp = ddp

    def main_hook(self) -> None:
        ddp = self.ddp
        if buffers := ddp.buffers_before_forward():
            ddp.sync_buffers(buffers, highest_rank(ddp.process_group, ddp.device, is_candidate=False))
        ddp.require_forward_param_sync = bool(will_average(ddp.process_group, ddp.device, False).item())
        if ddp.require_forward_param_sync:
            ddp.reducer.join_with_zeros()

    def post_hook(self, is_last_joiner: bool) -> None:
        src = highest_rank(self.ddp.process_group, self.ddp.device, is_last_joiner)
        self.ddp.sync_module(src, self.ddp.forward_sync_buffers)


def highest_rank(group: dist.ProcessGroup, device: torch.device, is_candidate: bool) -> int:
    """Return the highest rank that is a candidate, on every rank. The host waits."""
    rank = torch.tensor([group.rank() if is_candidate else -1], device=device)
    with Operation.of("find a rank that has input", group):
        dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=group)
    return int(rank.item())


def will_average(group: dist.ProcessGroup, device: torch.device, mine: bool) -> torch.Tensor:
    """Return a tensor, more than zero if any rank averages its next backward. The host does not wait."""
    flag = torch.full((1,), int(mine), device=device)
    with Operation.of("tell the other ranks whether this one averages its next backward", group):
        dist.all_reduce(flag, group=group)
    return flag
