"""Uneven inputs: what a rank that has none left does while others go on."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from .distributed import DistributedDataParallel


class DDPJoinHook(JoinHook):
    """The same collectives as the others', with zeros."""

    def __init__(self, ddp: "DistributedDataParallel"):
        self.ddp = ddp

    def main_hook(self) -> None:
        ddp = self.ddp
        if buffers := ddp.buffers_before_forward():
            ddp.sync_buffers(buffers, highest_rank(ddp.process_group, ddp.device, is_candidate=False))
        ddp.require_forward_param_sync = bool(will_average(ddp.process_group, ddp.device, False).item())
        if ddp.require_forward_param_sync:
            ddp.reducer.take_part()

    def post_hook(self, is_last_joiner: bool) -> None:
        src = highest_rank(self.ddp.process_group, self.ddp.device, is_last_joiner)
        self.ddp.sync_module(src, self.ddp.forward_sync_buffers)


def highest_rank(group: dist.ProcessGroup, device: torch.device, is_candidate: bool) -> int:
    """The highest rank that is a candidate, on every rank."""
    rank = torch.tensor([group.rank() if is_candidate else -1], device=device)
    dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=group)
    return int(rank.item())


def will_average(group: dist.ProcessGroup, device: torch.device, mine: bool) -> torch.Tensor:
    """More than zero if any rank averages its next backward. Nobody waits here."""
    flag = torch.full((1,), int(mine), device=device)
    dist.all_reduce(flag, group=group)
    return flag
