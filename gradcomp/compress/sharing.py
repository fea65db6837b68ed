"""What the ranks of a state share: the number of steps, options and directions. Errors are a rank's own."""

from typing import Any

import torch
import torch.distributed as dist

from ..comm.process_group import Explaining
from ..comm.reduced_values import ReducedValues
from ..comm.torch_private import tree_flatten, tree_map_only


def furthest(progress: float, group: dist.ProcessGroup, device: torch.device) -> tuple[int, float]:
    """Return (the group's first rank that has gone furthest, its progress), the same on every rank.

    progress: this rank's, 0 or more.
    device: a device whose tensors the group exchanges.

    A collective. The host waits.
    """
    values = [progress * (number == group.rank()) for number in range(group.size())]
    what = "compare how far the ranks have gone"
    found = ReducedValues(what, values, [group], device, dist.ReduceOp.SUM).wait()
    return found.index(max(found)), max(found)


def take_over(state: Any, source: int, group: dist.ProcessGroup) -> None:
    """Continue from the shared_state_dict of a rank of the group, with errors of zero, if it differs.

    source: the rank's number in the group.

    A collective. Raises the errors of the state's load_state_dict.
    """
    own = state.shared_state_dict()
    taken = [tree_map_only(torch.Tensor, torch.Tensor.cpu, own)]
    with Explaining.of(f"take over the hook's state of rank {source}", group):
        dist.broadcast_object_list(taken, group_src=source, group=group)
    if not _are_equal(own, taken[0]):
        state.load_state_dict(taken[0])


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two shared_state_dicts have the same step and directions."""

    def flat(state: Any) -> Any:
        return tree_flatten(
            (state["iter"], sorted(state["parameters"].items(), key=lambda pair: str(pair[0])))
        )

    (ours, outline), (theirs, others_outline) = flat(one), flat(other)
    return outline == others_outline and all(
        a.cpu().equal(b.cpu()) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(ours, theirs, strict=True)
    )
