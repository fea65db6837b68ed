"""A defect of torch's PowerSGD hooks that the host shows: see tests/testing/properties for the others."""

import re
from pathlib import Path

from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from tests.programs import ROOT


def sources():
    """Return the source files of all code that may run in a training step."""
    others = {ROOT / "gradcomp" / name for name in ("testing", "bench.py", "plan")}
    package = [path for path in (ROOT / "gradcomp").rglob("*.py") if others.isdisjoint((path, *path.parents))]
    return [*package, *(ROOT / "kernels").rglob("*.py")]


def test_no_host_synchronization():
    """Torch's hook waits for the whole device in every bucket. No part of the library may do so.

    The host may read a tensor's value in three places: in plain torch for CPU tensors, in the Reducer and the
    wrapper to learn about other ranks, and when options are compared in a state's first step.
    """
    device_wide = re.compile(r"cuda\.synchronize|[eE]vent\w*\.synchronize|stream\w*\.synchronize")
    waits = re.compile(r"\.item\(\)|\.tolist\(\)|\.nonzero\(\)")
    assert device_wide.search(Path(torch_powersgd.__file__).read_text())
    assert len(sources()) > 10
    for path in sources():
        text = path.read_text()
        assert not device_wide.search(text), f"{path} waits for the device"
        # recording.py reads a recorder's values when a user asks for them; rules.py reads numpy's scalars.
        if path.name in ("consistency.py", "recording.py", "rules.py"):
            continue
        if path.parent.name in ("compress", "hooks", "kernels") or path.name in ("layout.py", "ops.py"):
            assert not waits.search(text), f"{path} waits for a value"
