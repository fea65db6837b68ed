"""The collectives of a quantized all-reduce: each rank's shard to its owner, and the owners' means to all.

Between nodes, a reduce-scatter and an all-gather of codes within each node come before and after.

gloo sends a message when its receiver has said that it is ready. Its own all-to-all and all-gather post their
sends first. So the rank that starts later, with its peer ready, hands its whole message to the connection
before it says that it is ready itself. The two directions of a link take turns, and on a slow link the
collective takes up to twice as long. On gloo's CPU tensors, therefore, each rank exchanges messages with all
others at once, and posts every receive before any send.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .nodes import Nodes

# Collectives that are under way.
Works = Generator[dist.Work | None, None, None]

# all_gather_single is torch 2.13's name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# The tags of these messages. They are large: a program's own messages on the group hardly have such tags.
_FIRST_TAG, _NUM_TAGS = 2**30, 2**30


def all_to_all(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Give row r of ``sent`` [ranks, n] to rank r; get row r of ``received`` from it.

    Returns the collective under way.
    """
    if _takes_messages(sent, group):
        return _Messages(received, sent.unbind(), group, kind=0)
    work: dist.Work = dist.all_to_all_single(received.view(-1), sent.view(-1), group=group, async_op=True)
    return work


def all_gather(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Give ``sent`` [n] to every rank; get row r of ``received`` [ranks, n] from rank r.

    Returns the collective under way.
    """
    if _takes_messages(sent, group):
        return _Messages(received, [sent] * group.size(), group, kind=1)
    work: dist.Work = _all_gather_single(received.view(-1), sent, group=group, async_op=True)
    return work


def reduce_scatter(own: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> Works:
    """Sum row r of every rank's ``sent`` [ranks, n] into rank r's ``own`` [n]. Yields the collective.

    On NCCL the sum is NCCL's. Elsewhere it is in the order of the ranks, and rounded once: torch.sum adds 16
    bits in fp32.
    """
    if _is_on("nccl", sent, group):
        yield dist.reduce_scatter_tensor(own, sent.view(-1), group=group, async_op=True)
    else:
        received = torch.empty_like(sent)
        yield all_to_all(received, sent, group)
        torch.sum(received, 0, out=own)


def reduce_by_nodes(
    flat: torch.Tensor,
    nodes: Nodes,
    between: Callable[[torch.Tensor], Generator[dist.Work | None, None, torch.Tensor]],
    scale: float = 1.0,
) -> Works:
    """Sum a buffer within each node, reduce the sums between nodes, and write the result back on every rank.

    flat: [numel], floating-point.
    between: called with [part], the node's sum of scale · this rank's part of the buffer. Reduces it between
        the ranks of equal place, and returns the result. The last part is padded with zeros.

    Yields each collective in progress. Ranks whose between returns equal bits get equal bits.
    """
    parts = flat.new_empty(nodes.ranks_per_node, -(-flat.numel() // nodes.ranks_per_node))
    whole, padding = parts.view(-1).tensor_split([flat.numel()])
    torch.mul(flat, scale, out=whole)
    padding.zero_()
    part = torch.empty_like(parts[0])
    yield from reduce_scatter(part, parts, nodes.within)
    reduced = yield from between(part)
    yield all_gather(parts, reduced, nodes.within)
    flat.copy_(whole)


def _takes_messages(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    return tensor.device.type == "cpu" and _is_on("gloo", tensor, group)


def _is_on(backend: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether this backend communicates the tensor. A group may have one for each type of device."""
    return f"{tensor.device.type}:{backend}" in dist.get_backend_config(group).split(",")


class _Messages(dist.Work):
    """One exchange: a message to and from every other rank.

    kind: 0 for all-to-all, 1 for all-gather.
    """

    def __init__(
        self, received: torch.Tensor, sent: Sequence[torch.Tensor], group: dist.ProcessGroup, kind: int
    ):
        super().__init__()
        self._of_group = _of_groups.setdefault(group, _GroupExchanges())
        tag = _FIRST_TAG + (2 * self._of_group.num_exchanges + kind) % _NUM_TAGS
        self._of_group.num_exchanges += 1
        rank, size = group.rank(), group.size()
        # Each rank begins with a different one.
        others = [(rank + distance) % size for distance in range(1, size)]
        self._works = [dist.irecv(received[other], group=group, group_src=other, tag=tag) for other in others]
        self._works += [dist.isend(sent[other], group=group, group_dst=other, tag=tag) for other in others]
        self._of_group.under_way.add(self)
        received[rank].copy_(sent[rank])

    def wait(self, timeout: Any = None) -> bool:
        """Wait for every message. Raises RuntimeError if a rank has ended or doesn't answer in time."""
        for work in self._works:
            assert work is not None  # irecv and isend return None on ranks outside the group only
            work.wait()
        self._works = []
        self._of_group.under_way.discard(self)
        return True


@dataclass
class _GroupExchanges:
    """The exchanges of a process group.

    num_exchanges: the number begun. It numbers them, so a rank that has left one out doesn't take another
        exchange's messages.
    under_way: exchanges that nobody has waited for yet, kept until the group ends: an error in another bucket
        may end a step early, and gloo stops reading a connection when a message comes after its receive has
        been freed.
    """

    num_exchanges: int = 0
    under_way: set[_Messages] = field(default_factory=set)


_of_groups: WeakKeyDictionary[dist.ProcessGroup, _GroupExchanges] = WeakKeyDictionary()
