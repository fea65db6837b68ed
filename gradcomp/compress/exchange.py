"""The collectives of a quantised all-reduce: each rank's shard to its owner, and the owners' means to all.

gloo sends a message once its receiver is ready for it, and its all-to-all and all-gather post sends first.
So the rank that comes second, whose peer is ready, hands its whole message to the connection and then,
behind it, the word that it is ready for the other's: the two directions of a link take turns, and on a slow
one the collective takes up to twice as long. On gloo's CPU tensors, therefore, each rank exchanges messages
with all others at once, and posts every receive before any send.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from gradcomp import ops

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.

# torch 2.13 gave it a new name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Tags of messages; whoever sends others on the same group will hardly have taken one of these.
_FIRST_TAG, _NUM_TAGS = 2**30, 2**30


def all_to_all(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Give row r of ``sent`` [ranks, n] to rank r; get row r of ``received`` from it.

    Returns what to wait for before either is used again; None where the current stream waits by itself.
    """
    if _has_messages(sent, group):
        return _Messages(received, sent.unbind(), group, tag=0)
    is_async = not ops.has_streams(sent.device)
    work: dist.Work | None = dist.all_to_all_single(
        received.view(-1), sent.view(-1), group=group, async_op=is_async
    )
    return work


def all_gather(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Give ``sent`` [n] to every rank; get row r of ``received`` [ranks, n] from rank r.

    Returns what to wait for before either is used again; None where the current stream waits by itself.
    """
    if _has_messages(sent, group):
        return _Messages(received, [sent] * group.size(), group, tag=1)
    is_async = not ops.has_streams(sent.device)
    work: dist.Work | None = _all_gather_single(received.view(-1), sent, group=group, async_op=is_async)
    return work


def _has_messages(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    return tensor.device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(group).split(",")


class _Messages(dist.Work):
    """One exchange: a message to and from every other rank. tag: 0 or 1, the kind of exchange."""

    def __init__(
        self, received: torch.Tensor, sent: Sequence[torch.Tensor], group: dist.ProcessGroup, tag: int
    ):
        super().__init__()
        self._posts = _posts.setdefault(group, _Posts())
        tag += _FIRST_TAG + self._posts.num_exchanges * 2 % _NUM_TAGS
        self._posts.num_exchanges += 1
        rank, size = group.rank(), group.size()
        # Every rank begins with another one.
        others = [(rank + distance) % size for distance in range(1, size)]
        self._works = [dist.irecv(received[other], group=group, group_src=other, tag=tag) for other in others]
        self._works += [dist.isend(sent[other], group=group, group_dst=other, tag=tag) for other in others]
        self._posts.under_way.add(self)
        received[rank].copy_(sent[rank])

    def wait(self, timeout: Any = None) -> bool:
        """Wait until all have come and gone. Raises RuntimeError for a rank that is gone, or too late."""
        for work in self._works:
            assert work is not None  # as for ranks outside the group
            work.wait()
        self._works = []
        self._posts.under_way.discard(self)
        return True


@dataclass
class _Posts:
    """What a group has exchanged.

    num_exchanges: numbers them, so that ranks that are out of step get no other exchange's messages.
    under_way: held here until waited for, or until the group ends. An error in another bucket may end the
    step before; and when a message comes for a receive that is no more, gloo stops reading the connection.
    """

    num_exchanges: int = 0
    under_way: set[_Messages] = field(default_factory=set)


_posts: WeakKeyDictionary[dist.ProcessGroup, _Posts] = WeakKeyDictionary()
