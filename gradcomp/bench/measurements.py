"""What `python -m gradcomp bench` has measured of one model on one cluster. It is written as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gradcomp.plan.network import CollectiveKind, Group

NOOP = "noop"  # the name of a step without any communication


@dataclass(frozen=True)
class LinkSample:
    """The time of one collective, in seconds.

    kind, num_bytes, group: see plan.Collective. All nodes' ranks run their collectives at once.
    """

    kind: CollectiveKind
    num_bytes: int
    seconds: float
    group: Group = "all"


@dataclass(frozen=True)
class HookTime:
    """The times of steps with a hook, in seconds.

    name: as in docs/accuracy.md, by nodes if it ends with BY_NODES, or NOOP.
    step_p20_s, step_p50_s, step_p80_s: quantiles over num_steps steps, each on its slowest rank.
    collective_bytes: see plan.Traffic; 0 for NOOP.
    """

    name: str
    step_p20_s: float
    step_p50_s: float
    step_p80_s: float
    num_steps: int
    collective_bytes: float


@dataclass(frozen=True)
class Measurements:
    """Measurements of one model on one cluster.

    dtype, shapes: of the parameters with gradients; shapes in registration order.
    round_trip_s: the time from a message to its answer between ranks (nodes), as hooks find it; 0 where ranks
        exchange no messages themselves, such as on NCCL.
    ranks_per_node: the number of ranks on every node, if there were several nodes of several ranks; else 1.
    """

    date_utc: str
    device: str
    backend: str
    world_size: int
    ranks_per_node: int
    num_threads: int
    versions: dict[str, str]
    model: str
    dtype: str
    shapes: list[list[int]]
    bucket_cap_mb: float
    round_trip_s: float
    link: list[LinkSample]
    hooks: list[HookTime]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
