"""Meetings of a group's ranks in the store, before a collective that some of them may never issue.

A collective that one rank issues alone meets another collective, or none: it ends with the time-out, without
a word of the cause. In the store a rank finds out who has not come, and leaves word of what it waits for.
"""

import hashlib
import json
from collections import Counter
from collections.abc import MutableMapping, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.weak import WeakIdKeyDictionary

from .operation import WAITING, ExplainedError, Operation
from .process_group import device_for

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.

# How many meetings of a name the ranks of a group have had.
_num_meetings: MutableMapping[dist.ProcessGroup, Counter[str]] = WeakIdKeyDictionary()


def require_all_ranks(call: str, what: str, group: dist.ProcessGroup, advice: str) -> None:
    """Raise ExplainedError unless every rank of the group comes here within the group's time-out.

    call: what all ranks have to call. what: what this rank does by it, after "could not". advice: the
    message's last sentence. Without a store that other processes reach, nothing is required.
    """
    if (found := common_store(group)) is None:
        return
    store, ranks = found
    with Operation.of(what, group):
        missing = missing_ranks(call, f"{call}, which all ranks have to call. {advice}", store, ranks, group)
    if missing:
        raise ExplainedError(
            f"rank {group.rank()} of {group.size()} could not {what}: {_named(missing)} not come to {call} "
            f"within the time-out. {advice}"
        )


def common_store(group: dist.ProcessGroup) -> tuple[dist.Store, list[int]] | None:
    """Return the default group's store, and the group's global ranks; None without a store of processes."""
    try:
        store, ranks = distributed_c10d._get_default_store(), dist.get_process_group_ranks(group)
    except (KeyError, RuntimeError, ValueError):
        return None
    return None if isinstance(store, dist.HashStore) else (store, ranks)


def missing_ranks(
    name: str, waits_for: str, store: dist.Store, ranks: Sequence[int], group: dist.ProcessGroup
) -> list[int]:
    """Wait for all ranks of a group. Return the global ranks that have not come within its time-out.

    name: all ranks give the same one. waits_for: what the others read that fail elsewhere meanwhile.
    """
    if len(ranks) == 1:
        return []
    rank, counts = dist.get_rank(), _num_meetings.setdefault(group, Counter())
    counts[name] += 1
    digest = hashlib.sha256(json.dumps([name, *ranks]).encode()).hexdigest()
    key = f"gradcomp/{digest}/{counts[name]}"
    note = {"rank": rank, "ranks": list(ranks), "text": f"rank {rank} has come to {waits_for}"}
    store.set(WAITING, json.dumps(note))
    store.set(f"{key}/{rank}", "")
    if store.add(key, 1) == len(ranks):
        store.set(WAITING, json.dumps({**note, "ranks": []}))
        store.set(f"{key}/all", "")
    try:
        store.wait([f"{key}/all"], _timeout(store, group))
    except RuntimeError:
        missing = [each for each in ranks if not store.check([f"{key}/{each}"])]
        if not missing:
            return []
        # This rank leaves, so that all ranks may still meet here.
        counts[name] -= 1
        store.add(key, -1)
        store.delete_key(f"{key}/{rank}")
        return missing
    return []


def _timeout(store: dist.Store, group: dist.ProcessGroup) -> timedelta:
    """Return how long the group's collectives wait, at most as long as the store does."""
    limit: timedelta = store.timeout  # type: ignore[attr-defined]  # the stubs lack it
    try:
        options = group._get_backend(device_for(group, ())).options
    except (AttributeError, RuntimeError):  # a backend that has no options
        return limit
    timeout = getattr(options, "_timeout", None)
    return min(timeout, limit) if isinstance(timeout, timedelta) else limit


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {shown} have" if len(ranks) > 1 else f"rank {shown} has"
