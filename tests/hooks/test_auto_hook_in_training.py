"""auto_hook wherever hooks are registered, on real ranks: all ranks choose alike, and replicas stay equal."""

import torch
from torch.distributed.fsdp import FSDPModule

from gradcomp.compress import consolidated_state_dict
from gradcomp.frameworks import CommHook
from gradcomp.fsdp import compress_replicas
from gradcomp.hooks.auto_hook import AutoState, auto_hook
from tests.fsdp.models import RANKS, batch_of, new_grid, sharded, weights
from tests.reducer.models import run_cases
from tests.training import Averaged, Layers, drawn, parameters_of, train

CANDIDATES = ("none", "int4", "powersgd:2:int8")
OPTIONS = {"candidates": CANDIDATES, "start_iter": 2, "steps_per_turn": 3, "rounds": 1}
STEPS = 40  # 2 plain ones, at most 36 of the trial


def loss_of(model, rank, step):
    x = drawn(16 + step % 3, 12, rank=rank, step=step)
    return (model(x) - x[:, :3].sin()).square().mean()


def averaged(way, state):
    """Return the model, averaged in this way. CommHook registers on torch's DDP."""
    torch.manual_seed(0)
    net, hook = Layers(12, 200, 200, 3), None if way == "CommHook" else auto_hook
    model = Averaged(net, "torch" if way == "CommHook" else way, hook, state, bucket_cap_mb=0.05)
    if way == "CommHook":
        CommHook(state, auto_hook).register(model.averager)
    return model


WRAPPERS = ("gradcomp", "CommHook", "reducer")


def train_with(rank, way):
    """Train with two backwards per step where the way has no_sync, and an evaluation now and then."""
    state = AutoState(**OPTIONS)
    model = averaged(way, state)

    def loss(call, step):
        if way != "reducer":
            with call.no_sync():
                loss_of(call, rank, 100 + step).backward()
        return loss_of(call, rank, step)

    def evaluate(step):
        if step % 7 == 0:
            with torch.no_grad():
                loss_of(model, rank, 1000 + step)

    losses = train(model, loss, range(STEPS), before_update=evaluate)
    saved = consolidated_state_dict(state)
    return losses, parameters_of(model), state.choice, state.table, saved["trial"]["choice"]


def test_replicas_stay_equal_and_choose_alike(run_ranks):
    results = run_ranks(run_cases, 2, train_with, [(name,) for name in WRAPPERS])
    for (losses, ours, choice, table, saved), other, name in zip(*results, WRAPPERS, strict=True):
        assert torch.equal(ours, other[1]), name
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
    train(model, lambda each, step: each(batch_of(rank, step % 4)).square().mean(), range(STEPS), lr=0.02)
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
