"""The rank whose errors a checkpoint holds: every rank of a run has its own."""

from typing import Any

import torch.distributed as dist

from .process_group import joined_group

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.


def owner_of(process_group: Any) -> dict[str, Any] | None:
    """Return whose errors a state in this process group has, {"rank", "world_size"}; None without a group.

    A rank of None stands for the mean of all ranks' errors.
    """
    group = joined_group(process_group)
    return None if group is None else {"rank": group.rank(), "world_size": group.size()}


def another_ranks_errors(
    algorithm: str, errors_of: dict[str, Any] | None, group: dist.ProcessGroup
) -> str | None:
    """Return a warning if this rank is about to use errors that another rank saved, else None."""
    here = owner_of(group)
    if here is None or errors_of is None or errors_of["rank"] is None or errors_of == here:
        return None
    saved, now = (f"rank {each['rank']} of {each['world_size']}" for each in (errors_of, here))
    return (
        f"{algorithm}: the errors loaded on {now} are those of {saved}. Given to several ranks, they count "
        "several times, and what the other ranks hold back is lost. Save one checkpoint per rank; or one for "
        "all, or for another world size, with consolidated_state_dict(state)."
    )
