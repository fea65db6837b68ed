"""What all ranks take from one of them: the values of tensors, the order of the buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

BROADCAST_BYTES = 250 << 20


def agree_on_order(order: Sequence[int], device: torch.device, group: dist.ProcessGroup) -> list[int]:
    """Rank 0's order, on every rank."""
    agreed = torch.tensor(order, dtype=torch.int64, device=device)
    dist.broadcast(agreed, src=dist.get_global_rank(group, 0), group=group)
    # Waits for the device, once in a Reducer's life: the host cuts the buckets.
    result: list[int] = agreed.tolist()
    return result


def broadcast_coalesced(tensors: Iterable[torch.Tensor], src: int, group: dist.ProcessGroup) -> None:
    """Copy the tensors of the group's rank src to all its ranks, in place, in few broadcasts of bytes."""
    chunk: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if chunk and (num_bytes + tensor.nbytes > BROADCAST_BYTES or tensor.device != chunk[0].device):
            _broadcast(chunk, src, group)
            chunk, num_bytes = [], 0
        chunk.append(tensor)
        num_bytes += tensor.nbytes
    if chunk:
        _broadcast(chunk, src, group)


@torch.no_grad()
def _broadcast(tensors: list[torch.Tensor], src: int, group: dist.ProcessGroup) -> None:
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    together = torch.cat(flat)
    dist.broadcast(together, dist.get_global_rank(group, src), group=group)
    for tensor, part in zip(tensors, together.split([len(each) for each in flat]), strict=True):
        # A copy, for a part need not lie where its dtype may.
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
