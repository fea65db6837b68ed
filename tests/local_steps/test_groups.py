"""LocalSteps whose group changes: ranks that are lost between exchanges or in one, and ranks that join."""

import copy
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradcomp.local_steps import LocalSteps
from tests.local_steps.runs import equal, hooked, learn, move, nesterov, weights
from tests.reducer.models import run_cases


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Linear(24, 6))


def made(seed, name, group, **options):
    model, given = net(seed), hooked(name, group)
    if name in ("int4", "PowerSGD"):
        given["state"].keep_undo = True
    return model, LocalSteps(model, nesterov(model), **given, **options)


def num_exchanges(local_steps):
    return local_steps.state_dict()["plain"][0]["num_exchanges"]


def lost_and_joined(rank, name, options):
    """Ranks 0 and 1 begin; rank 1 leaves and ranks 2 and 3 come; then rank 0 and 1 are alone again."""
    pairs = [dist.new_group([0, 1]), dist.new_group([0, 2, 3]), dist.new_group([0, 1])]
    found = []
    if rank <= 1:
        model, local_steps = made(rank, name, pairs[0], **options)
        learn(model, local_steps, rank, range(7))
    if rank == 0:
        before = weights(model)
        model[1].running_mean += 7
        local_steps.regroup(pairs[1])
        if not options.get("delay"):
            assert equal(before, weights(model))  # with its own progress
    if rank >= 2:
        model, local_steps = made(rank, name, pairs[1], **options)
        assert num_exchanges(local_steps) > 0
        assert model[1].running_mean.eq(7).all()  # buffers are of the rank that has gone furthest
    if rank != 1:
        learn(model, local_steps, rank, range(7, 15))
        state = local_steps.state_dict()
        found = [state["common"], state["plain"][0]["num_exchanges"]]
    dist.barrier()
    if rank <= 1:
        local_steps.regroup(pairs[2])  # rank 1 comes back, from long ago
        learn(model, local_steps, rank, range(15, 20))
        local_steps.join()
    return found, weights(model)


CASES = [
    ("none", {"every": 3}),
    ("int4", {"every": 4, "fragments": 2}),
    ("PowerSGD", {"every": 3}),
    ("PowerSGD", {"every": 6, "fragments": 2, "delay": 2}),
    ("bf16", {"every": 4, "delay": 1}),
]


def test_ranks_are_lost_and_join(run_ranks):
    ranks = run_ranks(run_cases, 4, lost_and_joined, CASES, timeout_s=120)
    for index, case in enumerate(CASES):
        (first, final), (_, came_back), *joined = (results[index] for results in ranks)
        for (common, count), _ in joined:
            assert count == first[1], case
            assert equal(common, first[0]), case
        assert equal(final, came_back), case


def fails_in_an_exchange(rank, name, options):
    """Rank 2 doesn't come to the second exchange. The others keep their progress, and go on without it."""
    group, rest = dist.new_group([0, 1, 2], timeout=timedelta(seconds=1)), dist.new_group([0, 1])
    if rank == 3:
        return None
    model, local_steps = made(0, name, group, every=2, **options)
    learn(model, local_steps, rank, range(3))
    state = None if name == "none" else local_steps._hooked.state
    if rank == 2:
        return None
    expected, kept = copy.deepcopy(model), {} if state is None else state.state
    move(expected, rank, 3)
    with pytest.raises(RuntimeError):
        learn(model, local_steps, rank, range(3, 5))
    if not options:
        assert equal(weights(model), weights(expected))
        for key, entry in {} if state is None else state.state.items():
            assert torch.equal(entry["error"], kept[key]["error"])
    local_steps.regroup(rest)
    learn(model, local_steps, rank, range(5, 8))
    local_steps.join()
    return weights(model)


def test_a_rank_is_lost_in_an_exchange(run_ranks):
    cases = [("none", {}), ("int4", {}), ("int4", {"delay": 1})]
    assert all(map(equal, *run_ranks(run_cases, 4, fails_in_an_exchange, cases, timeout_s=120)[:2]))


def misses_the_end(rank, fragments, goes_on):
    """The last exchange ends with an error on rank 1 only."""
    group = dist.group.WORLD
    model, local_steps = made(0, "int4", group, every=2 * fragments, fragments=fragments)
    learn(model, local_steps, rank, range(3))
    apply = local_steps._apply

    def fail():
        wait = local_steps._under_way.averaging.wait
        local_steps._under_way.averaging.wait = lambda: wait() or 1 / 0  # after the last message
        apply()

    if rank == 1:
        local_steps._apply = fail
        with pytest.raises(ZeroDivisionError):
            learn(model, local_steps, rank, range(3, 4))
        local_steps._apply = apply
    else:
        learn(model, local_steps, rank, range(3, 4))
    assert num_exchanges(local_steps) == 2 - rank
    for number in range(4, 8) if goes_on else ():
        with (
            pytest.raises(RuntimeError, match="exchanges is 2 on rank 0 and 1 on rank 1")
            if number % 2
            else nullcontext()
        ):
            learn(model, local_steps, rank, [number])
    before = weights(model)
    local_steps.regroup(group)
    stay = {torch.equal(before[name], each) for name, each in weights(model).items()}
    if not goes_on:  # what wasn't in that exchange stays on rank 1, too
        assert stay == ({True} if rank == 0 else {False} if fragments == 1 else {True, False})
    after = {} if goes_on or fragments > 1 else weights(model)
    learn(model, local_steps, rank, range(8, 12))
    found = num_exchanges(local_steps)
    local_steps.join()
    return after, weights(model), found


def test_a_rank_that_misses_the_end_of_an_exchange_takes_it_over(run_ranks):
    """If the ranks go on without regroup(), every exchange fails on both of them."""
    cases = [(1, False), (2, False), (1, True), (2, True), (3, True)]
    for one, other in zip(*run_ranks(run_cases, 2, misses_the_end, cases), strict=True):
        assert one[2] == 4 == other[2]
        assert all(map(equal, one[:2], other[:2]))


def go_on_apart(rank, name):
    """Two halves meet again after as many exchanges each: all take over the first one's weights."""
    halves, both = [dist.new_group([0, 1]), dist.new_group([2, 3])], dist.group.WORLD
    model, local_steps = made(0, name, both, every=2)
    learn(model, local_steps, rank, range(4))
    local_steps.regroup(halves[rank // 2])
    learn(model, local_steps, rank, range(4, 8))
    local_steps.regroup(both)
    learn(model, local_steps, rank, range(8, 12))
    local_steps.join()
    return weights(model)


def test_halves_that_went_on_apart(run_ranks):
    for one, *others in zip(
        *run_ranks(run_cases, 4, go_on_apart, [("none",), ("bf16",), ("int4",), ("PowerSGD",)]), strict=True
    ):
        assert all(equal(one, other) for other in others)
