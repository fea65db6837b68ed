"""Test the random Q that PowerSGD starts from."""

import math

import pytest
import torch

from gradcomp.kernels.powersgd.bucket import PowerSGDBucket
from gradcomp.kernels.powersgd.random import random_q
from gradcomp.kernels.powersgd.work import PowerSGDWork
from gradcomp.layout import PowerSGDLayout

# Row 100 for seed 3.
GOLDEN = [float.fromhex(x) for x in ("-0x1.d2986cp-5", "0x1.2442d2p-4", "-0x1.5853ep-4", "-0x1.694ccep-6")]


def drawn(rank: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return the random Q [203, rank] of a bucket's second matrix."""
    work = PowerSGDWork(PowerSGDLayout([(50, 64), (60, 203)], rank, 0), 4, 4)
    options = {"error_feedback": False, "warm_start": True, "epsilon": 0.0}
    bucket = PowerSGDBucket(work, torch.float32, torch.float32, device, **options)
    bucket.q.fill_(math.nan)
    random_q(bucket)(seed=seed)
    start, stride = (work.fields(1)[name] for name in ("random_panel", "q_stride"))
    panel = bucket.q[start : start + work.rank * stride].view(work.rank, stride).T
    assert not panel[203:].any()
    assert not panel[:, rank:].any()
    return panel[:203, :rank].double()


@pytest.mark.parametrize("rank", [4, 16, 40])
def test_random_numbers_of_variance_one_over_m(rank, device):
    state = torch.get_rng_state()
    q = drawn(rank, 3, device)
    assert torch.equal(torch.get_rng_state(), state)
    q = q * math.sqrt(203)
    count = q.numel()
    assert abs(q.mean()) < 4 / math.sqrt(count)
    assert abs(q.var() - 1) < 4 * math.sqrt(2 / count)
    assert len(q.unique()) > 0.99 * count


def test_the_seed_alone_decides(device):
    q = drawn(4, 3, device)
    assert torch.equal(q, drawn(4, 3, device))
    assert not torch.equal(q, drawn(4, 4, device))
    assert not torch.equal(q, drawn(4, 3 + 2**33, device)), "all 64 bits of the seed count"
    assert q[100].tolist() == GOLDEN, "another device or Triton gives other bits"
