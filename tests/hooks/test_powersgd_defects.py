"""Defects of torch's PowerSGD hooks that its collectives and the host show, and not here."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

from tests.hooks.powersgd_runs import MODULES, new_state
from tests.programs import ROOT
from tests.ranks import RankError


def train_mlp(rank, name):
    torch.manual_seed(0)
    layers = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
    indices = []

    def recorded(state, bucket):
        indices.append(bucket.index())
        return MODULES[name].powerSGD_hook(state, bucket)

    model.register_comm_hook(new_state(MODULES[name], matrix_approximation_rank=1), recorded)
    for step in range(40):
        model.zero_grad()
        x = torch.randn(4, 784, generator=torch.Generator().manual_seed(100 * rank + step))
        model(x).square().mean().backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return max(indices) + 1, gradients.double().norm().item(), gradients[::1000].tolist()


def test_buckets_in_flight(run_ranks):
    """Torch issues collectives from callbacks. The callbacks' order differs between ranks.

    gloo then usually aborts the process, and sometimes hangs.
    """
    first, second = run_ranks(train_mlp, 2, "gradcomp")
    assert first == second
    assert first[0] >= 2
    assert math.isfinite(first[1])
    with pytest.raises(RankError, match=r"the process died|did not finish in time"):
        run_ranks(train_mlp, 2, "torch", timeout_s=20)


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
        # row.py reads a recorder's values when a user asks for them; rules.py reads numpy's scalars.
        if path.name in ("consistency.py", "row.py", "rules.py"):
            continue
        if path.parent.name in ("compress", "hooks", "kernels", "layout") or path.name == "ops.py":
            assert not waits.search(text), f"{path} waits for a value"
