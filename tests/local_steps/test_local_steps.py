"""LocalSteps against the algorithms written out, in fragments, with delays, joins and checkpoints."""

import copy
import re
from functools import partial
from itertools import accumulate, product
from unittest import mock

import pytest
import torch
from torch import nn

from gradcomp import DistributedDataParallel as Wrapper
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState
from gradcomp.local_steps import LocalSteps
from gradcomp.testing import run_ranks
from tests.depth import mixed
from tests.hooks.powersgd_runs import reload
from tests.local_steps.runs import hooked, nesterov, weights
from tests.training import train

pytestmark = pytest.mark.usefixtures("plain_torch")

OPTIONS = {
    "plain": {},
    "fragments": {"fragments": 3},
    "delay": {"delay": 2},
    "fragments and delay": {"fragments": 2, "delay": 2},
}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2))


def loss_of(model, rank, step):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * rank + step))
    return (model(x) - x[:, :2].sin()).square().mean()


class Run:
    """One rank's model, inner optimizer and LocalSteps."""

    def __init__(self, rank, group, outer=None, seed=0, hook="none", **options):
        self.rank, self.model = rank, net(seed)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        given = {"every": 6, **hooked(hook, group), **options}
        self.local, self.state = (
            LocalSteps(self.model, outer and outer(self.model), **given),
            given.get("state"),
        )

    def learn(self, start, stop):
        """Take steps of the inner optimizer alone. Returns the losses."""
        loss = partial(loss_of, rank=self.rank)
        return train(
            self.model, lambda m, number: loss(m, step=number), range(start, stop), optimizer=self.inner
        )

    def steps(self, start, stop):
        losses = []
        for step in range(start, stop):
            losses += self.learn(step, step + 1)
            self.local.step()
        return losses

    @property
    def weights(self):
        return list(weights(self.model).values())


def equal(ours, theirs):
    return all(map(torch.equal, ours, theirs))


def near(ours, theirs, **tolerance):
    return all(torch.allclose(a, b, **tolerance) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_without_an_outer_optimizer_weights_are_averaged(world_size):
    def run(rank, group):
        each = Run(rank, group, seed=rank)  # rank 0's weights are copied to all
        before = each.weights
        each.steps(0, 5)
        alone = each.weights
        each.steps(5, 6)
        return before, alone, each.weights

    results = run_ranks(run, world_size)
    assert all(equal(before, results[0][0]) for before, _, _ in results)
    assert all(equal(after, results[0][2]) for _, _, after in results)
    if world_size > 1:
        assert not equal(results[0][1], results[1][1])


def written_out(rank, group, num_outer, every):
    """Train by algorithm 1 of Douillard et al. (2023), without gradcomp."""
    import torch.distributed as dist

    model = net()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    common = list(weights(model).values())
    momentum = [torch.zeros_like(each) for each in common]
    for outer in range(num_outer):
        steps = range(outer * every, (outer + 1) * every)
        train(model, lambda m, step: loss_of(m, rank, step), steps, optimizer=inner)
        for weight, before, velocity in zip(model.parameters(), common, momentum, strict=True):
            moved = before - weight.detach()
            dist.all_reduce(moved, group=group)
            moved /= group.size()
            velocity.mul_(0.9).add_(moved)
            before.sub_(moved + 0.9 * velocity, alpha=0.7)
            weight.data.copy_(before)
    return common


def test_it_is_diloco():
    def run(rank, group):
        each = Run(rank, group, nesterov)
        each.steps(0, 18)
        return each.weights

    for ours, theirs in zip(run_ranks(run, 2), run_ranks(written_out, 2, 3, 6), strict=True):
        assert near(ours, theirs, rtol=1e-5, atol=1e-6)


def test_fragments_take_turns():
    def run(rank, group):
        each, found = Run(rank, group, fragments=3), []
        for start in range(0, 6, 2):
            each.steps(start, start + 2)
            found.append(each.weights)
        return each.local._fragments, found

    (fragments, ours), (_, theirs) = run_ranks(run, 2)
    ends = [0, *accumulate(map(len, fragments))]
    assert ends == [0, 3, 4, 6]
    for number, where in enumerate(map(slice, ends, ends[1:])):
        assert equal(ours[number][where], theirs[number][where])
        for other, elsewhere in enumerate(map(slice, ends, ends[1:])):
            if other > number:  # not exchanged yet
                assert not equal(ours[number][elsewhere], theirs[number][elsewhere])


def test_a_delayed_exchange_keeps_what_was_learned_meanwhile():
    def run(rank, group):
        each = Run(rank, group, delay=2)
        before = each.weights
        each.steps(0, 6)
        begun = each.weights
        each.steps(6, 7)
        meanwhile = each.weights
        each.learn(7, 8)
        later = each.weights
        each.local.step()
        return before, begun, meanwhile, later, each.weights

    results = run_ranks(run, 2)
    mean = [torch.stack(each).mean(0) for each in zip(*(begun for _, begun, *_ in results), strict=True)]
    for _, begun, meanwhile, later, after in results:
        assert not equal(begun, meanwhile)
        expected = [m + now - old for m, now, old in zip(mean, later, begun, strict=True)]
        assert near(after, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "hook"), mixed(list(OPTIONS), ["bf16", "int4", "PowerSGD"]))
def test_a_resumed_run_has_equal_bits(name, hook):
    def run(rank, group):
        each, again = (Run(rank, group, nesterov, seed, hook, **OPTIONS[name]) for seed in (0, 7))
        each.steps(0, 19)
        parts = ("model", "inner", "local")
        saved = reload({part: getattr(each, part).state_dict() for part in parts})
        for part in parts:
            getattr(again, part).load_state_dict(saved[part])
        each.steps(19, 40)
        again.steps(19, 40)
        return each.weights, again.weights

    for ours, theirs in run_ranks(run, 2):
        assert equal(ours, theirs)


@pytest.mark.parametrize(("name", "hook"), [*product(OPTIONS, ["none"]), ("fragments", "int4")])
def test_ranks_that_have_no_more_data(name, hook):
    """They take part until all have joined, and count no longer. All end with equal weights."""

    def run(rank, group):
        each = Run(rank, group, hook=hook, **OPTIONS[name])
        each.steps(0, (20, 31, 13)[rank])
        each.local.join()
        return each.weights

    results = run_ranks(run, 3)
    assert all(equal(each, results[0]) for each in results)


@pytest.mark.parametrize("delay", [0, 2])
def test_a_rank_that_joins_after_an_exchange_does_not_count_in_the_next_one(delay):
    """The last rank trains on as if it were alone."""

    def run(rank, group):
        each = Run(rank, group, delay=delay)
        each.steps(0, 6)
        alone = copy.copy(each)
        if rank == 0:
            each.steps(6, 6 + delay)
            alone.model, alone.local = copy.deepcopy(each.model), mock.Mock()
            alone.inner = torch.optim.AdamW(alone.model.parameters())
            alone.inner.load_state_dict(copy.deepcopy(each.inner.state_dict()))
            for trained in (each, alone):
                trained.steps(6 + delay, 18 + delay)
        found = each.weights, alone.weights
        each.local.join()
        return found

    (ours, alone), _ = run_ranks(run, 2)
    assert near(ours, alone, rtol=1e-4, atol=1e-5)


def test_exchanges_become_rarer():
    def run(rank, group):
        each = Run(rank, group, every=1)
        each.steps(0, 4)
        each.local.every = 5
        each.steps(4, 19)
        return each.local.state_dict()["plain"][0]["num_exchanges"], each.weights

    (num, ours), (_, theirs) = run_ranks(run, 2)
    assert num == 4 + 3
    assert equal(ours, theirs)


def test_the_inner_gradients_stay():
    def run(rank, group):
        each = Run(rank, group, every=1)
        loss_of(each.model, rank, 0).backward()
        before = [p.grad for p in each.model.parameters()]
        each.local.step()
        return all(p.grad is b for p, b in zip(each.model.parameters(), before, strict=True))

    assert run_ranks(run, 2) == [True] * 2


INT4, STATES = partial(hooked, "int4"), (QuantizationState, PowerSGDState)
# (the error and its message, LocalSteps' arguments of a model with a rank and its group)
REFUSED = [
    ("ValueError.*every is 0, but must be an int and at least 1", lambda m, r, g: {"every": 0}),
    ("ValueError.*every is 2.0", lambda m, r, g: {"every": 2.0}),
    ("ValueError.*fragments is 0", lambda m, r, g: {"fragments": 0}),
    ("ValueError.*every is 6, but .* multiple of fragments, 4", lambda m, r, g: {"every": 6, "fragments": 4}),
    ("ValueError.*fragments is 7, .* 6 trainable parameters", lambda m, r, g: {"every": 7, "fragments": 7}),
    ("ValueError.*delay is 6, but must be below 6, the steps", lambda m, r, g: {"every": 6, "delay": 6}),
    ("ValueError.*delay is -1", lambda m, r, g: {"delay": -1}),
    ("TypeError.*LocalSteps takes a model, got None", lambda m, r, g: {"model": None}),
    ("TypeError.*the model itself, .* Distr.*: pass", lambda m, r, g: {"model": Wrapper(m, process_group=g)}),
    ("TypeError.*an optimizer as its outer_opt.*got 0.7", lambda m, r, g: {"outer_optimizer": 0.7}),
    ("ValueError.* 6 .* which are not the model's", lambda m, r, g: {"outer_optimizer": nesterov(net())}),
    ("ValueError.*no trainable parameters", lambda m, r, g: {"model": nn.Identity()}),
    ("ValueError.*in its state, not as process_group", lambda m, r, g: {**INT4(g), "process_group": g}),
    ("ValueError.*has a state, .* without the hook", lambda m, r, g: {"state": QuantizationState(g)}),
    ("TypeError.*be callable. LocalSteps got 'int4'", lambda m, r, g: {"hook": "int4"}),
    ("TypeError.*LocalSteps.*process_group", lambda m, r, g: {"hook": print, "state": {"own": 1}}),
    ("TypeError.*an object .*, got <class .*Quant", lambda m, r, g: {**INT4(g), "state": QuantizationState}),
    (
        ".*the state.* is .*Quant.* on rank 0 and .*PowerSGD",
        lambda m, r, g: {**INT4(g), "state": STATES[r](g)},
    ),
    (".*LocalSteps differs between the ranks: every is 5 on rank 0 and 6", lambda m, r, g: {"every": 5 + r}),
    (r".*ranks: outer optimizer\[1\] is", lambda m, r, g: {"outer_optimizer": nesterov(m) if r else None}),
]


def test_what_is_refused():
    def run(rank, group):
        for message, arguments_of in REFUSED:
            model = net()
            given = {"model": model, **arguments_of(model, rank, group)}
            given = given if given.keys() & {"hook", "state"} else {"process_group": group, **given}
            with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
                LocalSteps(**given)
            assert re.match(message, repr(caught.value)), caught.value
        local = LocalSteps(net(), process_group=group)
        with pytest.raises(TypeError, match="takes a gradcomp PowerSGDState as its state"):
            LocalSteps(net(), every=1, hook=powerSGD_hook, state=QuantizationState(group)).step()
        with pytest.raises(KeyError, match="the state_dict of LocalSteps lacks outer, plain, hook_state"):
            local.load_state_dict({"common": {}})
        with pytest.raises(ValueError, match="weights of another model"):
            local.load_state_dict({**local.state_dict(), "common": {}})

    run_ranks(run, 2)
