"""auto_hook wherever hooks are registered, on real ranks: all ranks choose alike, and replicas stay equal."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

import gradcomp
from gradcomp.compress import consolidated_state_dict
from gradcomp.frameworks import CommHook
from gradcomp.fsdp import compress_replicas
from gradcomp.hooks import DDPCommHookType, register_ddp_comm_hook
from gradcomp.hooks.auto_hook import AutoState, auto_hook
from tests.fsdp.models import RANKS, batch_of, new_grid, sharded, weights
from tests.reducer.models import run_cases

CANDIDATES = ("none", "bf16", "int4", "powersgd:2:int8")
OPTIONS = {"candidates": CANDIDATES, "start_iter": 2, "steps_per_turn": 3, "rounds": 2}
STEPS = 36  # 2 plain ones, at most 24 of the trial


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 3))


def batch(rank, step):
    generator = torch.Generator().manual_seed(97 * rank + step)
    return torch.randn(16 + step % 3, 12, generator=generator)


def loss_of(model, rank, step):
    x = batch(rank, step)
    return (model(x) - x[:, :3].sin()).square().mean()


def in_torchs_ddp(model, state):
    ddp = TorchsDDP(model, bucket_cap_mb=0.05)
    ddp.register_comm_hook(state, auto_hook)
    return ddp


def in_our_wrapper(model, state):
    ddp = gradcomp.DistributedDataParallel(model, bucket_cap_mb=0.05)
    ddp.register_comm_hook(state, auto_hook)
    return ddp


def by_comm_hook(model, state):
    ddp = TorchsDDP(model, bucket_cap_mb=0.05)
    CommHook(state, auto_hook).register(ddp)
    return ddp


def by_reducer(model, state):
    model.reducer = gradcomp.Reducer(list(model.parameters()), bucket_cap_mb=0.05)
    model.reducer.register_comm_hook(state, auto_hook)
    return model


WRAPPERS = {each.__name__: each for each in (in_torchs_ddp, in_our_wrapper, by_comm_hook, by_reducer)}


def train(rank, name):
    """Train with two backwards per step where the wrapper has no_sync, and an evaluation now and then."""
    state = AutoState(**OPTIONS)
    model = WRAPPERS[name](net(), state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        if hasattr(model, "no_sync"):
            with model.no_sync():
                loss_of(model, rank, 100 + step).backward()
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 7 == 0:
            with torch.no_grad():
                loss_of(model, rank, 1000 + step)
    saved = consolidated_state_dict(state)
    parameters = [p.detach().clone() for p in model.parameters()]
    return losses, parameters, state.choice, state.table, saved["trial"]["choice"]


def test_replicas_stay_equal_and_choose_alike(run_ranks):
    results = run_ranks(run_cases, 2, train, [(name,) for name in WRAPPERS])
    for (losses, ours, choice, table, saved), other, name in zip(*results, WRAPPERS, strict=True):
        assert all(map(torch.equal, ours, other[1])), name
        assert (choice, table, saved) == other[2:], name
        assert choice in CANDIDATES, name
        assert saved == choice, name
        assert all(row["ms"] > 0 for row in table), name
        assert table[0]["wait_ms"] > 0, name
        assert all(row["gain_low_ms"] <= row["gain_ms"] <= row["gain_high_ms"] for row in table[1:]), name
        assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), name


def between_replicas(rank):
    grid, state = new_grid(), AutoState(**OPTIONS)
    torch.manual_seed(0)
    model = sharded(grid.shards)
    assert isinstance(model, FSDPModule)
    compress_replicas(model, grid.replicas, state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(STEPS):
        x = batch_of(rank, step % 4)
        (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), state.choice, state.table


def test_all_shards_choose_alike(run_ranks):
    """Each replicate group has its own averages, but a step waits for all of them."""
    results = run_ranks(between_replicas, RANKS)
    for found, choice, table in results:
        assert choice in CANDIDATES
        assert (choice, table) == results[0][1:]
        assert table[0]["wait_ms"] > 0
        assert found is not None
    for one, other in ((0, 2), (1, 3)):
        assert all(map(torch.equal, results[one][0], results[other][0]))


def registered(rank):
    model = TorchsDDP(net())
    register_ddp_comm_hook(DDPCommHookType.AUTO, model, dist.group.WORLD)
    loss_of(model, rank, 0).backward()
    return model.logger._get_ddp_logging_data().strs_map["comm_hook"]


def test_by_type(run_ranks):
    assert run_ranks(registered, 2) == ["auto_hook"] * 2


def with_another_list(rank):
    model = TorchsDDP(net())
    model.register_comm_hook(AutoState(candidates=["none", ("int4", "int8")[rank]]), auto_hook)
    with pytest.raises(RuntimeError, match=r'candidates\[1\] is "int4" on rank 0 and "int8" on rank 1'):
        loss_of(model, rank, 0).backward()


def test_unlike_lists(run_ranks):
    run_ranks(with_another_list, 2)
