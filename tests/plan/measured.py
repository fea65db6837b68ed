"""Measurements made up from a known link, for tests."""

from typing import Any

from gradcomp.plan.candidates import Collective
from gradcomp.plan.hardware import Link
from gradcomp.plan.measurements import FORMAT, KINDS

LINK = Link(bytes_per_s=1.25e8, latency_s=100e-6)
WORLD_SIZE = 4


def as_written() -> dict[str, Any]:
    """Return the content of a file of measurements, in plain types."""
    samples = [
        {"kind": kind, "num_bytes": size, "seconds": LINK.seconds(Collective(kind, size), WORLD_SIZE)}
        for kind in KINDS
        for size in (10_000, 100_000, 10_000_000)
    ]
    hooks = [
        {
            "name": name,
            "step_p20_s": p50,
            "step_p50_s": p50,
            "step_p80_s": p50,
            "num_steps": 9,
            "local_s": own,
        }
        for name, p50, own in (
            ("noop", 0.1, None),
            ("none", 0.9, None),
            ("int4", 0.5, 0.02),
            ("bf16", 0.6, 0.003),
        )
    ]
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
        "link": samples,
        "hooks": hooks,
    }
