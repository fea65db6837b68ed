"""Show that each defect of torch's PowerSGD hooks fails in torch, and not here."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

from tests.hooks.powersgd_oracle import compressed, random_gradient
from tests.hooks.powersgd_runs import FEW_SHAPES, MODULES, START, counted_sums, new_state, run_step
from tests.programs import ROOT
from tests.ranks import RankError
from tests.reducer.models import run_cases

MATRICES = compressed(FEW_SHAPES, 2)


# Two or more buckets in flight.


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


# Collectives.


def count_collectives(rank, name, hook, shapes, factor_rank):
    """Return the number of elements of each sum over the ranks in one compressed step."""
    module = MODULES[name]
    state = new_state(module, matrix_approximation_rank=factor_rank)
    for step in range(START + 1):
        run_step(module, state, random_gradient(shapes, rank, step), shapes, hook)
    with counted_sums() as counted:
        run_step(module, state, random_gradient(shapes, rank, 99), shapes, hook)
    return counted


def test_two_collectives_per_bucket(run_ranks):
    """Torch has three: P, Q and the uncompressed tensors. gradcomp averages uncompressed tensors with P."""
    uncompressed, p, q = 7 + 9, 2 * (64 + 40 + 64), 2 * (48 + 90 + 48)
    assert len(MATRICES) == 3
    for counted in run_ranks(count_collectives, 2, "gradcomp", "powerSGD_hook", FEW_SHAPES, 2):
        assert counted == [p + uncompressed, q]
    for counted in run_ranks(count_collectives, 2, "torch", "powerSGD_hook", FEW_SHAPES, 2):
        assert counted == [uncompressed, p, q]


def test_two_collectives_whatever_the_bucket(run_ranks):
    cases = [
        ("gradcomp", hook, [(32, 30)] * num_matrices + [(11,)], factor_rank)
        for hook in ("powerSGD_hook", "batched_powerSGD_hook")
        for num_matrices, factor_rank in ((1, 1), (9, 4))
    ]
    (counted,) = run_ranks(run_cases, 1, count_collectives, cases)
    assert [len(each) for each in counted] == [2] * len(cases)
    assert run_ranks(count_collectives, 1, "gradcomp", "powerSGD_hook", [(11,), (3, 3)], 4) == [[20]]


# Host synchronization.


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
