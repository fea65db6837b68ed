"""Test the benchmarks of PowerSGD that need no GPU: memory, orthogonality, and time on the host."""

import math

import torch

from benchmarks import models, powersgd_memory, powersgd_orthogonality
from gradcomp.kernels.powersgd.plan import PowerSGDPlan
from gradcomp.layout import PowerSGDLayout
from tests.programs import needs_stub_cuda, run_module
from tests.tolerances import ORTHONORMAL

BUCKETS = [[(300, 200), (200,)], [(500, 400), (90, 80)]]


def test_memory_is_what_plans_allocate(device):
    memory = powersgd_memory.memory_of(BUCKETS, 4, torch.float32)
    options = {"error_feedback": True, "warm_start": True, "epsilon": 0.0, "seed": 0}
    plans = [PowerSGDPlan(PowerSGDLayout(each, 4, 2), torch.float32, device, **options) for each in BUCKETS]
    assert memory.error == sum(plan._bucket.memory.nbytes for plan in plans)
    assert memory.scratches == tuple(plan._scratch.memory.nbytes for plan in plans)
    assert memory.factors > sum(plan._bucket.p.nbytes + plan._bucket.q.nbytes for plan in plans)
    assert memory.torch_error == 4 * (300 * 200 + 200 + 500 * 400 + 90 * 80)
    assert memory.torch_factors == 4 * 4 * (500 + 900 + 170)


def test_the_table_of_memory(monkeypatch, capsys):
    monkeypatch.setattr(models, "MODELS", {"small": lambda: iter(BUCKETS[1])})
    powersgd_memory.main([])
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + len(powersgd_memory.RANKS)
    assert len({row.count("|") for row in rows}) == 1


def test_only_fp64_orthonormalizes_ill_conditioned_panels():
    panel = powersgd_orthogonality.panel_of(8, 1e6, seed=0)
    found = {
        name: powersgd_orthogonality.deviation(panel, gram, 2)
        for name, gram in powersgd_orthogonality.GRAMS.items()
    }
    assert found.pop("fp64") <= ORTHONORMAL[torch.float32]
    assert set(found.values()) == {math.inf}


def test_the_table_of_orthogonality(monkeypatch, capsys):
    monkeypatch.setattr(powersgd_orthogonality, "NUM_PANELS", 1)
    powersgd_orthogonality.main([])
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + len(powersgd_orthogonality.RANKS) * len(powersgd_orthogonality.CONDITIONS)
    assert len({row.count("|") for row in rows}) == 1


@needs_stub_cuda
def test_host_time():
    done = run_module("benchmarks.host_time", "--models", "gpt2-medium", "--calls", "20")
    assert done.returncode == 0, done.stdout
    for part in ("hook", "launches", "all_reduce", "Future", "streams", "state"):
        assert f" {part} " in done.stdout
