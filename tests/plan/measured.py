"""Measurements made up from a known link, for tests."""

from typing import Any

from gradcomp.plan.candidates import Collective
from gradcomp.plan.hardware import Link, Nodes
from gradcomp.plan.measurements import FORMAT

LINK = Link(bytes_per_s=1.25e8, latency_s=100e-6, gathers_by_messages=True)
WORLD_SIZE = 4
# Two nodes of two ranks.
NODES_LINK = Link(1.25e8, 100e-6, nodes=Nodes(2, 1e9), gathers_by_messages=True)
KINDS = ("all-reduce", "all-to-all", "all-gather")


def as_written() -> dict[str, Any]:
    """Return the content of a file of measurements, in plain types."""
    return {
        "format": FORMAT,
        "date_utc": "2026-11-23T00:00:00+00:00",
        "device": "a CPU",
        "device_type": "cpu",
        "backend": "gloo",
        "world_size": WORLD_SIZE,
        "num_threads": 1,
        "versions": {"torch": "2.13.0"},
        "model": "a model",
        "dtype": "float32",
        "shapes": [[1000, 2000], [2000], [3000, 2000], []],
        "bucket_cap_mb": 25.0,
        "ready_at": [0.25, 1],
        "forward_s": 0.03,
        "backward_s": 0.06,
        "optimizer_s": 0.01,
        "round_trip_s": 100e-6,
        "link": _samples(LINK, "all", KINDS),
        "hooks": _hooks(("noop", 0.1, None), ("none", 0.9, None), ("int4", 0.5, 0.02), ("bf16", 0.6, 0.003)),
    }


def as_written_with_nodes() -> dict[str, Any]:
    """Return the content of a file that was measured on two nodes of two ranks."""
    samples = _samples(NODES_LINK, "all", KINDS)
    samples += _samples(NODES_LINK, "within", ("all-reduce", "reduce-scatter", "all-gather"))
    samples += _samples(NODES_LINK, "between", KINDS)
    hooks = _hooks(
        ("noop", 0.1, None), ("none", 0.9, None), ("int4", 0.5, 0.02), ("int4 by nodes", 0.3, None)
    )
    return as_written() | {"link": samples, "hooks": hooks, "ranks_per_node": 2}


def _samples(link: Link, group: Any, kinds: Any) -> list[dict[str, Any]]:
    """Return the link's times. A file of ranks without nodes has no groups."""
    return [
        {
            "kind": kind,
            "num_bytes": size,
            "seconds": link.seconds(Collective(kind, size, group), WORLD_SIZE),
            **({} if link is LINK else {"group": group}),
        }
        for kind in kinds
        for size in (10_000, 100_000, 10_000_000)
    ]


def _hooks(*rows: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "step_p20_s": p50,
            "step_p50_s": p50,
            "step_p80_s": p50,
            "num_steps": 9,
            "local_s": own,
        }
        for name, p50, own in rows
    ]
