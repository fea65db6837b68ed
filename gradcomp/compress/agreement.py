"""What the ranks of a state agree on in its first step: that they are alike, the nodes, and the delay.

And what ranks that join take over from others: the number of steps, options and directions, but no errors.
"""

import ctypes
import hashlib
import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.device import processor

from ..comm.consistency import require_same_group, require_same_on_all_ranks
from ..comm.exchange import MIN_DELAY_S, round_trip_s
from ..comm.nodes import nodes_in
from ..comm.process_group import Explaining
from ..comm.reduced_values import ReducedValues
from ..comm.torch_private import tree_map_only


@dataclass(frozen=True)
class Place:
    """This rank's place among the ranks that average. Compressors depend on it.

    group: held weakly, because a state may outlive it; None before the first step.
    size, rank: of the group.
    ranks_per_node, place: on each node, and this rank's number in its node; 1 and 0 to average without nodes.
    round_trip_s: from a message to its answer, between ranks or nodes.
    """

    group: weakref.ref[dist.ProcessGroup] | None = None
    size: int = 0
    rank: int = 0
    ranks_per_node: int = 1
    place: int = 0
    round_trip_s: float = 0.0

    @property
    def has_delay(self) -> bool:
        """Whether a round trip takes long; see comm/exchange.py."""
        return self.round_trip_s >= MIN_DELAY_S


def agree(state: Any, hook_name: str, bucket: dist.GradBucket, group: dist.ProcessGroup) -> Place:
    """Compare the ranks before a bucket of a state's first step is averaged.

    Returns this rank's place: nodes and round trip are the same on all ranks.

    Raises RuntimeError on every rank if options or buckets differ between ranks. Directions that differ, as
    where groups have merged, are forgotten.
    """
    whose, buffer = f"{hook_name}'s state", bucket.buffer()
    values = {
        **state.compared_options(),
        "iter": state.iter,
        "names of parameters (number_parameters gives them)": [
            *map(state._states.keys.get, bucket.parameters())
        ],
        "hook": hook_name,
        "world size": group.size(),
        "dtype of the bucket": buffer.dtype,
        "index of the bucket": bucket.index(),
        "whether the bucket is the last (bucket_cap_mb tells how many there are)": bucket.is_last(),
        "shapes in the bucket": [list(parameter.shape) for parameter in bucket.parameters()],
    }
    if state._steps.num_buckets == 1:
        require_same_group(whose, group)
    own = {} if state._compressor.is_same_on_all_processors else processor(buffer.device)
    notes = {**own, "directions": digest_of(state._states.waiting)}
    advice = (
        "Give every rank the same hook, options, model and bucket caps; after a restart, a checkpoint of the "
        "same step"
    )
    unlike = require_same_on_all_ranks(whose, values, group, buffer.device, advice, notes)
    logger = logging.getLogger(__name__)
    if unlike.pop("directions", None):
        state._states.forget_directions()
        logger.warning(
            "%s: the ranks have unlike directions, from steps in other groups or from unlike checkpoints. "
            "All begin again with random ones.",
            hook_name,
        )
    if unlike:
        logger.warning(
            "%s: the ranks run on unlike processors, whose sums differ in the last bit: %s. Replicas will "
            "drift apart by rounding errors; see docs/powersgd.md.",
            *(hook_name, "; ".join(unlike.values())),
        )
    nodes = nodes_in(whose, state.ranks_per_node, group, buffer.device)
    round_trip = round_trip_s(buffer, group, nodes.between if nodes else None)
    of_nodes = (nodes.within.size(), nodes.within.rank()) if nodes else (1, 0)
    return Place(weakref.ref(group), group.size(), group.rank(), *of_nodes, round_trip)


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
    own = tree_map_only(torch.Tensor, torch.Tensor.cpu, state.shared_state_dict())
    taken = [own]
    with Explaining.of(f"take over the hook's state of rank {source}", group):
        dist.broadcast_object_list(taken, group_src=source, group=group)
    if own["iter"] != taken[0]["iter"] or digest_of(own["parameters"]) != digest_of(taken[0]["parameters"]):
        state.load_state_dict(taken[0])


def digest_of(entries: Mapping[Any, Mapping[str, torch.Tensor]]) -> str:
    """Return a digest of the entries that must be the same on every rank: all but errors."""
    digest = hashlib.sha256()
    for key in sorted(entries, key=str):
        for name, value in sorted(entries[key].items()):
            if name != "error":
                on_cpu = value.detach().cpu().contiguous()
                digest.update(f"{key} {name}".encode())
                digest.update(ctypes.string_at(on_cpu.data_ptr(), on_cpu.nbytes))
    return digest.hexdigest()[:16]
