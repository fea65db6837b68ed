"""Nodes: ranks that share a network card, and their groups within a node and between nodes.

    node 0: ranks 0 1 2 3      node 1: ranks 4 5 6 7      within: [0 1 2 3], [4 5 6 7]
                                                          between: [0 4], [1 5], [2 6], [3 7]

A collective between ranks of equal place sends each byte through a node's network card once. A flat
all-to-all of all ranks sends up to g times more bytes, for g ranks per node.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..rules import Rule
from . import torch_private
from .announcement import say
from .consistency import require_same_on_all_ranks
from .process_group import device_for, global_ranks_of, joined_group, kept_of, timeout_of
from .reduced_values import ReducedValues

AUTO = "auto"
LEAST_NUMBER = 1000  # in the names of groups of nodes; other groups have the numbers below
_SIZE = "LOCAL_WORLD_SIZE"
_IN_ORDER = "whether the ranks of a node follow one another"


@dataclass(frozen=True, eq=False)
class Nodes:
    """This rank's groups in a group of nodes.

    within: the ranks of this rank's node.
    between: the ranks of equal place, one on each node.
    """

    within: dist.ProcessGroup
    between: dist.ProcessGroup


def nodes_of(group: dist.ProcessGroup, ranks_per_node: int) -> Nodes:
    """Return this rank's nodes in a group whose nodes are runs of ranks_per_node ranks.

    The first call with a number makes the groups. Every rank of the group must come to it in the same place
    among its collectives. If the group is the default one, every rank makes all groups, as torch asks for.

    Raises ValueError if the ranks don't fill the last node.
    """
    made: dict[int, Nodes] = kept_of(group).setdefault("nodes", {})
    if ranks_per_node in made:
        return made[ranks_per_node]
    ranks = global_ranks_of(f"ranks_per_node={ranks_per_node}", group)
    num_nodes, num_left = divmod(len(ranks), ranks_per_node)
    if num_left:
        raise ValueError(
            f"ranks_per_node is {ranks_per_node}, but {len(ranks)} ranks don't fill such nodes: node "
            f"{num_nodes} would have {num_left}. Give a number that divides every node's ranks, or "
            "ranks_per_node=1 to average without nodes"
        )
    nodes = [ranks[start : start + ranks_per_node] for start in range(0, len(ranks), ranks_per_node)]
    places = [list(place) for place in zip(*nodes, strict=True)]
    made[ranks_per_node] = Nodes(_own_group(group, nodes), _own_group(group, places))
    return made[ranks_per_node]


def _own_group(group: dist.ProcessGroup, lists: list[list[int]]) -> Any:
    """Make a process group of each list of ranks. Return this rank's."""
    if group is dist.group.WORLD:
        return dist.new_subgroups_by_enumeration(lists, timeout_of(group))[0]
    (own,) = (ranks for ranks in lists if dist.get_rank() in ranks)
    return _new_group(own, [group], timeout_of(group))


def _new_group(ranks: list[int], groups: list[dist.ProcessGroup], timeout: Any = None) -> Any:
    """Make a process group of ranks. All ranks of groups must call this; those outside of them don't.

    torch names it by its ranks and the number of groups that this rank has joined. Others may have joined
    fewer, and the number falls when groups end. So for a moment it is a new one, the same on all ranks.
    A default group bound to a device is unbound meanwhile: torch would split it, and wait for all its ranks.
    """
    world: Any = dist.group.WORLD
    names, kept = torch_private.names_of_groups(), kept_of(world)
    own = max(len(names), kept.get("next number of a group", LEAST_NUMBER))
    values = ReducedValues("make groups of nodes", [own], groups, device_for(groups[0], ()))
    number = int(values.wait()[0])
    kept["next number of a group"] = number + 1
    added = {object(): "" for _ in range(len(names), number)}
    names.update(added)
    device, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group(ranks, timeout, use_local_synchronization=True)
    finally:
        world.bound_device_id = device
        for each in added:
            del names[each]


def groups_of_mesh(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, int]:
    """Return (the group of all ranks of a mesh (between, within), its ranks per node).

    Raises TypeError for a mesh without two dimensions; ValueError unless all rows list their ranks in one
    order, such as rising: torch sorts a group's ranks. If the mesh lacks ranks of the default group, or has
    them in another order, this makes a group: every rank of the mesh must call it.
    """
    if mesh.ndim != 2:
        raise TypeError(
            f"process_group takes a DeviceMesh of two dimensions, (between nodes, within nodes), got {mesh}"
        )
    order = mesh.mesh.argsort(1)
    if not order.eq(order[0]).all():
        raise ValueError(f"process_group: list the ranks of each node in one order, got {mesh.mesh.tolist()}")
    nodes = Nodes(within=mesh.get_group(1), between=mesh.get_group(0))
    group, ranks = joined_group(None), mesh.mesh.flatten().tolist()
    if ranks != list(range(dist.get_world_size())):
        group = _new_group(sorted(ranks), [nodes.within, nodes.between])
    assert group is not None
    kept_of(group)["ranks of the mesh"] = ranks
    kept_of(group).setdefault("nodes", {})[nodes.within.size()] = nodes
    return group, nodes.within.size()


RANKS_PER_NODE = Rule(
    "'auto' or a whole number of 1 or more",
    lambda value: value == AUTO or (type(value) is int and value >= 1),
)


def nodes_in(
    whose: str, ranks_per_node: int | str, group: dist.ProcessGroup, device: torch.device
) -> Nodes | None:
    """Return the nodes that all ranks of a group agree on; None to average without nodes.

    whose, device: see require_same_on_all_ranks.
    ranks_per_node: see RANKS_PER_NODE.

    Every rank of the group must call this in the same place among its collectives. Raises RuntimeError on
    every rank if ranks_per_node differs, ValueError if that many ranks don't fill the last node. Under
    "auto", nodes with different numbers of ranks count as none, and a line says so, once per group.
    """
    values = {"ranks per node (ranks_per_node=1 averages without nodes)": ranks_per_node}
    notes = _launched(group) if ranks_per_node == AUTO else {}
    advice = "Give every rank the same ranks_per_node"
    unlike = require_same_on_all_ranks(whose, values, group, device, advice, notes)
    if isinstance(ranks_per_node, int):
        return None if ranks_per_node == 1 else nodes_of(group, ranks_per_node)
    size, why = notes[_SIZE] or 1, next(iter(unlike.values()), "")
    has_nodes = 1 < size < group.size() and notes[_IN_ORDER]
    if has_nodes and not why and group.size() % size:
        why = f"{_SIZE} is {size}, which does not divide {group.size()} ranks"
    if why and _SIZE not in kept_of(group):
        kept_of(group)[_SIZE] = why
        say(f"{whose} averages without nodes: {why}", group)
    return nodes_of(group, size) if has_nodes and not why else None


def _launched(group: dist.ProcessGroup) -> dict[str, Any]:
    """Return what "auto" takes from torchrun on this rank, by name: nothing in a group but the default one.

    There are nodes only if all ranks have the same values.
    """
    size, place = (os.environ.get(name, "") for name in (_SIZE, "LOCAL_RANK"))
    if group is not dist.group.WORLD or not (size.isdigit() and place.isdigit()):
        return {_SIZE: None}
    is_in_order = not 1 < int(size) < group.size() or group.rank() % int(size) == int(place)
    return {_SIZE: int(size), _IN_ORDER: is_in_order}
