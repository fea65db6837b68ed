"""Checks that all ranks come to a collective, and agree on its contents, before it starts.

A collective that one rank issues alone meets another collective, or none. It ends with the time-out, and the
error doesn't name the cause. In the store ranks see which are missing, and note the calls they wait in.

To compare values, the ranks exchange a digest in one all-gather, and where digests differ, the values.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .process_group import WAITING, ExplainedError, Explaining, is_registered, kept_of, ranks_of, timeout_of


def require_all_ranks(call: str, what: str, group: dist.ProcessGroup, advice: str) -> None:
    """Raise ExplainedError unless every rank of the group comes here within the group's time-out.

    call: the function that all ranks must call.
    what: the purpose of the call, in words that follow "could not".
    advice: the message's last sentence.

    Without a store that other processes reach, nothing is required.
    """
    if missing := _missing_ranks(call, f"{call}, which all ranks must call. {advice}", what, group):
        raise ExplainedError(
            f"rank {group.rank()} of {group.size()} could not {what}: {_ranks(missing)} "
            f"{'have' if len(missing) > 1 else 'has'} not come to {call} "
            f"within the time-out. {advice}"
        )


def _common_store(group: dist.ProcessGroup) -> tuple[dist.Store, list[int]] | None:
    """Return the default group's store, and the group's global ranks; None without a store of processes."""
    store = None if dist.group.WORLD is None else dist.group.WORLD.get_group_store()
    return (store, ranks_of(group)) if store is not None and is_registered(group) else None


def _missing_ranks(name: str, waits_for: str, what: str, group: dist.ProcessGroup) -> list[int]:
    """Wait for all ranks of a group. Return the global ranks that have not come within its time-out.

    If the store's time-out is shorter, that counts. Without a store of processes, no rank is missing.

    name: the meeting's name, the same on all ranks.
    waits_for: the note for ranks that fail elsewhere meanwhile.
    what: the purpose of the meeting, in words that follow "could not".
    """
    found = _common_store(group)
    if found is None or len(found[1]) == 1:
        return []
    store, ranks = found
    # The number of meetings of the group's ranks, by the meeting's name.
    rank, counts = dist.get_rank(), kept_of(group).setdefault("num_meetings", Counter[str]())
    counts[name] += 1
    key = f"gradcomp/{hashlib.sha256(json.dumps([name, *ranks]).encode()).hexdigest()}/{counts[name]}"
    note = {"rank": rank, "ranks": ranks, "text": f"rank {rank} has come to {waits_for}"}
    with Explaining.of(what, group):
        store.set(WAITING, json.dumps(note))
        store.set(f"{key}/{rank}", "")
        if store.add(key, 1) == len(ranks):
            store.set(WAITING, json.dumps({**note, "ranks": []}))
            store.set(f"{key}/all", "")
        limit: timedelta = store.timeout  # type: ignore[attr-defined]  # the stubs lack it
        try:
            store.wait([f"{key}/all"], min(timeout_of(group) or limit, limit))
            return []
        except RuntimeError:
            missing = [each for each in ranks if not store.check([f"{key}/{each}"])]
        if missing:  # this rank leaves, so that all ranks may still meet here
            counts[name] -= 1
            store.add(key, -1)
            store.delete_key(f"{key}/{rank}")
    return missing


MESSAGE_BYTES = 40  # a digest of 32 bytes, and the length of the values


def require_same_on_all_ranks(
    whose: str,
    values: Mapping[str, Any],
    group: dist.ProcessGroup,
    device: torch.device,
    advice: str,
    notes: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Raise RuntimeError on every rank of the group unless all ranks give equal values.

    whose: the owner of the values, the message's subject.
    values: by name; JSON values (tuples count as lists), or objects with the same repr on every rank, such as
        a dtype.
    device: a device whose tensors the group's backend takes.
    advice: the message's last sentence.
    notes: values that may differ. Returns how they differ, by name, for those that do.

    Every rank of the group must call this in the same place among its collectives. The host waits. Uses
    neither pickle nor numpy.
    """
    if group.size() == 1:
        return {}
    mine = json.dumps([dict(values), dict(notes or {})], default=repr).encode()
    message = hashlib.sha256(mine).digest() + len(mine).to_bytes(8, "little")
    with Explaining.of(f"compare {whose}", group):
        messages = _all_gather(message, MESSAGE_BYTES, group, device)
        if all(each == messages[0] for each in messages):
            return {}
        lengths = [int.from_bytes(each[32:], "little") for each in messages]
        texts = _all_gather(mine, max(lengths), group, device)
    by_rank = [json.loads(text[:length]) for text, length in zip(texts, lengths, strict=True)]
    values_of_ranks, notes_of_ranks = zip(*by_rank, strict=True)
    ranks = ranks_of(group)
    if differences := _differences(values_of_ranks, ranks):
        shown = "; ".join(differences.values())
        raise ExplainedError(f"{whose} differs between the ranks: {shown}. {advice}")
    return _differences(notes_of_ranks, ranks)


def require_same_group(whose: str, group: dist.ProcessGroup) -> None:
    """Raise RuntimeError unless all ranks call this with this group within the group's time-out.

    Call it before the group's first collective: if a rank has another group, that collective would meet
    another one, or none. A rank in a smaller group that lacks the others sees no difference: it goes on
    alone, and fails when they do. The ranks meet in the store of the default group; without one that other
    processes reach, nothing is compared.
    """
    if (found := _common_store(group)) is None:
        return
    store, ranks = found
    with Explaining.of(f"compare {whose}", group):
        store.set(f"gradcomp/group of {dist.get_rank()}", json.dumps(ranks))
    if missing := _missing_ranks("group", f"the first step of {whose}", f"compare {whose}", group):
        others = []
        for rank in missing:
            key = f"gradcomp/group of {rank}"
            over = f"ranks {store.get(key).decode()}" if store.check([key]) else "none yet"
            others.append(f"rank {rank}, which averages over {over}")
        raise ExplainedError(
            f"{whose} on rank {dist.get_rank()} averages over ranks {ranks}, but these have not come to do "
            f"so within the time-out: {'; '.join(others)}. Likely cause: the states have different process "
            "groups; only some ranks have changed an option, loaded a checkpoint or called undo_step since "
            "the last step, or have this hook; or a rank has ended"
        )


def _all_gather(message: bytes, size: int, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """Return every rank's message, padded with zeros."""
    mine = torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(gathered, mine, group=group)
    return [bytes(each.tolist()) for each in torch.stack(gathered).cpu()]


def _differences(by_rank: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> dict[str, str]:
    """Say how the ranks' values differ, by name, for those that do."""
    names = dict.fromkeys(name for values in by_rank for name in values)
    found = {name: difference(name, [values.get(name) for values in by_rank], ranks) for name in names}
    return {name: text for name, text in found.items() if text}


def difference(name: str, values: Sequence[Any], ranks: Sequence[int]) -> str:
    """Say how the ranks' values of this name differ; "" if not. Lists: the lengths or one item."""
    if all(value == values[0] for value in values):
        return ""
    if all(isinstance(value, list) for value in values):
        lengths = [len(value) for value in values]
        if len(set(lengths)) > 1:
            number = difference(f"the number of {name}", lengths, ranks)
            for item in (item for value in values for item in value):
                having = [rank for rank, value in zip(ranks, values, strict=True) if item in value]
                if len(having) < len(ranks):
                    return f"{number}, with {json.dumps(item)} on {_ranks(having)} alone"
            return number
        items = list(zip(*values, strict=True))
        index = next(i for i, by_rank in enumerate(items) if any(item != by_rank[0] for item in by_rank))
        return f"{name}[{index}] is " + _by_value(items[index], ranks)
    return f"{name} is " + _by_value(values, ranks)


def _by_value(values: Sequence[Any], ranks: Sequence[int]) -> str:
    """Say which ranks have which value: '4 on ranks 0, 2 and 8 on rank 1'."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        ranks_of.setdefault(json.dumps(value), []).append(rank)
    return " and ".join(f"{value} on {_ranks(having)}" for value, having in ranks_of.items())


def _ranks(ranks: Sequence[int]) -> str:
    """Name at most eight ranks: 'ranks 0, 2'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {first_of(ranks)}"


def first_of(items: Sequence[Any]) -> str:
    """Name at most eight items: 'a, b'."""
    return ", ".join(map(str, items[:8])) + (f" and {len(items) - 8} more" if len(items) > 8 else "")
