"""LocalSteps against the algorithms written out, in fragments, with delays, joins and checkpoints."""

import copy
import io
from itertools import accumulate
from unittest import mock

import pytest
import torch
from torch import nn

from gradcomp.hooks import default_hooks
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradcomp.local_steps import LocalSteps
from gradcomp.testing import run_ranks

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

    def __init__(self, rank, group, outer=None, seed=0, **options):
        self.rank, self.model = rank, net(seed)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        outer = outer and outer(self.model.parameters())
        if options.get("hook") is None:
            options["process_group"] = group
        self.local = LocalSteps(self.model, outer, **{"every": 6, **options})

    def steps(self, start, stop):
        losses = []
        for step in range(start, stop):
            loss = loss_of(self.model, self.rank, step)
            loss.backward()
            self.inner.step()
            self.inner.zero_grad()
            self.local.step()
            losses.append(float(loss.detach()))
        return losses

    @property
    def weights(self):
        return [each.detach().clone() for each in self.model.parameters()]


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
    common = [each.detach().clone() for each in model.parameters()]
    momentum = [torch.zeros_like(each) for each in common]
    for outer in range(num_outer):
        for step in range(outer * every, (outer + 1) * every):
            loss_of(model, rank, step).backward()
            inner.step()
            inner.zero_grad()
        for weight, before, velocity in zip(model.parameters(), common, momentum, strict=True):
            moved = before - weight.detach()
            dist.all_reduce(moved, group=group)
            moved /= group.size()
            velocity.mul_(0.9).add_(moved)
            before.sub_(moved + 0.9 * velocity, alpha=0.7)
            weight.data.copy_(before)
    return [each.detach().clone() for each in model.parameters()]


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def test_it_is_diloco():
    def run(rank, group):
        each = Run(rank, group, nesterov)
        each.steps(0, 18)
        return each.weights

    expected = run_ranks(written_out, 2, 3, 6)
    for ours, theirs in zip(run_ranks(run, 2), expected, strict=True):
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
        loss_of(each.model, rank, 7).backward()
        each.inner.step()
        each.inner.zero_grad()
        later = each.weights
        each.local.step()
        return before, begun, meanwhile, later, each.weights

    results = run_ranks(run, 2)
    mean = [torch.stack(each).mean(0) for each in zip(*(begun for _, begun, *_ in results), strict=True)]
    for _, begun, meanwhile, later, after in results:
        assert not equal(begun, meanwhile)
        expected = [m + now - old for m, now, old in zip(mean, later, begun, strict=True)]
        assert near(after, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_training_with_codes(name):
    def run(rank, group):
        state = QuantizationState(group, bits=4, block_size=16)
        each = Run(rank, group, hook=quantization_hook, state=state, **OPTIONS[name])
        losses = each.steps(0, 120)
        each.local.join()
        return losses, each.weights, state.compression_stats()[0]

    results = run_ranks(run, 2)
    for losses, weights, rate in results:
        assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
        assert equal(weights, results[0][1])
        assert rate > 3


HOOKS = {
    "bf16": lambda group: (default_hooks.bf16_compress_hook, group),
    "int4": lambda group: (quantization_hook, QuantizationState(group, bits=4, block_size=16)),
    "PowerSGD": lambda group: (powerSGD_hook, PowerSGDState(group, 2, 2)),
}


def hooked(name, group):
    hook, state = HOOKS[name](group)
    return {"hook": hook, "state": state}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_resumed_run_has_equal_bits(name, hook):
    def reload(value):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def run(rank, group):
        each = Run(
            rank,
            group,
            nesterov,
            **dict(zip(("hook", "state"), HOOKS[hook](group), strict=True)),
            **OPTIONS[name],
        )
        each.steps(0, 19)
        parts = {"model": each.model, "inner": each.inner, "local": each.local}
        saved = reload({name: part.state_dict() for name, part in parts.items()})
        again = Run(
            rank,
            group,
            nesterov,
            7,
            **dict(zip(("hook", "state"), HOOKS[hook](group), strict=True)),
            **OPTIONS[name],
        )
        again.model.load_state_dict(saved["model"])
        again.inner.load_state_dict(saved["inner"])
        again.local.load_state_dict(saved["local"])
        each.steps(19, 40)
        again.steps(19, 40)
        return each.weights, again.weights

    for ours, theirs in run_ranks(run, 2):
        assert equal(ours, theirs)


@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_that_have_no_more_data(name):
    """They take part until all have joined, and count no longer. All end with equal weights."""

    def run(rank, group):
        each = Run(rank, group, **OPTIONS[name])
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0, but must be an int and at least 1"),
        ({"every": 2.0}, "every is 2.0"),
        ({"fragments": 0}, "fragments is 0"),
        ({"fragments": 4}, "every is 6, but must be a multiple of fragments, 4"),
        ({"fragments": 7, "every": 7}, "fragments is 7, but the model has 6 trainable parameters"),
        ({"delay": 6}, "delay is 6, but must be below 6, the steps between two exchanges"),
        ({"delay": -1}, "delay is -1"),
    ],
)
def test_numbers_that_do_not_fit(options, message):
    def run(rank, group):
        with pytest.raises(ValueError, match=message):
            Run(rank, group, **options)

    run_ranks(run, 2)


def test_other_bad_arguments():
    def run(rank, group):
        with pytest.raises(TypeError, match="LocalSteps takes a model, got None"):
            LocalSteps(None)
        with pytest.raises(TypeError, match=r"takes an optimizer as its outer_optimizer, got 0\.7"):
            LocalSteps(net(), 0.7, process_group=group)
        with pytest.raises(
            ValueError, match="outer_optimizer has 6 trainable parameters, which are not the model's"
        ):
            LocalSteps(net(), nesterov(net().parameters()), process_group=group)
        with pytest.raises(ValueError, match="no trainable parameters"):
            LocalSteps(nn.Identity(), process_group=group)
        local = LocalSteps(net(), process_group=group)
        with pytest.raises(KeyError, match="LocalSteps loads the entries"):
            local.load_state_dict({"common": {}})
        with pytest.raises(ValueError, match="weights of another model"):
            local.load_state_dict({**local.state_dict(), "common": {}})

    run_ranks(run, 1)


def test_unlike_ranks():
    def run(rank, group):
        with pytest.raises(
            RuntimeError, match="LocalSteps differs between the ranks: every is 5 on rank 0 and 6"
        ):
            Run(rank, group, every=5 + rank)

    run_ranks(run, 2)
