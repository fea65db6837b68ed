"""LocalSteps at its edges: names, joins, shared states, narrow dtypes, changed models, refused files."""

import copy
import re
from itertools import pairwise

import pytest
import torch
from torch import nn

from gradcomp.hooks import default_hooks
from gradcomp.local_steps import LocalSteps
from gradcomp.testing import run_ranks
from tests.local_steps.runs import equal, hooked, learn, move, nesterov, weights

pytestmark = pytest.mark.usefixtures("plain_torch")


def layers(names, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.ModuleDict({name: nn.Linear(16, 16, bias=False, dtype=dtype) for name in names})


def watched(local_steps):
    """Return a list that gets (common weights, errors) after each exchange."""
    seen, apply = [], local_steps._apply

    def watching():
        apply()
        entries = local_steps._hooked.state.state.items()
        errors = {n[len("local_steps(") : -1]: e["error"].double() for n, e in entries if "error" in e}
        seen.append((copy.deepcopy(local_steps._common.shards), errors))

    local_steps._apply = watching
    return seen


@pytest.mark.parametrize("name", ["int4", "int8", "PowerSGD"])
def test_nothing_is_lost_when_ranks_have_joined(name):
    """After every exchange: Σ mean moves of the active ranks = the common weights' move + the mean error."""

    def run(rank, group):
        model = layers("ab")
        if rank == 1:
            model["a"].weight.data = model["a"].weight.data.t().contiguous().t()
        start = weights(model)
        seen = watched(local_steps := LocalSteps(model, every=1, **hooked(name, group)))
        moves = learn(model, local_steps, rank, range(12 if rank == 0 else 5))
        local_steps.join()
        return start, moves, seen, weights(model)

    ranks = run_ranks(run, 3)
    start, _, seen, final = ranks[0]
    assert all(equal(final, theirs) for *_, theirs in ranks)
    expected = {each: torch.zeros(16, 16, dtype=torch.float64) for each in start}
    for exchange, (common, _) in enumerate(seen):
        for each in start:
            given = [own[exchange][each].double() for _, own, *_ in ranks if exchange < len(own)]
            expected[each] += sum(given) / max(1, len(given))  # two join after the fifth exchange
            held = sum(seen[exchange][1].get(each, torch.zeros(1)) for _, _, seen, _ in ranks)
            rest = expected[each] - (common[each].double() - start[each]) + held / 3
            assert rest.abs().max() < 1e-4, (exchange, each)


@pytest.mark.parametrize("name", ["int4", "PowerSGD"])
def test_two_models_with_one_state(name):
    """Their weights have the same names. Errors stay apart."""

    def run(rank, group):
        one = hooked(name, group)
        models = [layers("a") for _ in range(2)]
        both = [LocalSteps(model, every=1, **one) for model in models]
        sums = [0.0, 0.0]
        for number in range(12):
            for index, (model, local_steps) in enumerate(zip(models, both, strict=True)):
                (moves,) = learn(model, local_steps, rank + 10 * index, [number])
                sums[index] += moves["a.weight"].double()
        start = weights(layers("a"))["a.weight"].double()
        moved = [weights(model)["a.weight"].double() - start for model in models]
        errors = [entry["error"].double() for entry in one["state"].state.values() if "error" in entry]
        return sums, moved, errors

    results = run_ranks(run, 2)
    for index in range(2):
        given = sum(sums[index] for sums, _, _ in results) / 2
        held = sum(errors[index] for *_, errors in results) / 2
        assert (given - results[0][1][index] + held).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_below_a_narrow_weights_rounding_add_up(dtype):
    """Each rank in turn moves by the smallest step. The common weights are the mean in fp32 all the same."""

    def run(rank, group):
        model = layers("a", dtype=dtype)
        with torch.no_grad():
            model["a"].weight.fill_(1.0)
        local_steps = LocalSteps(model, every=1, process_group=group)
        eps = torch.finfo(dtype).eps
        for number in range(16):
            if number % 2 == rank:
                with torch.no_grad():
                    model["a"].weight += eps
            local_steps.step()
        return weights(model)["a.weight"], eps

    for found, eps in run_ranks(run, 2):
        assert (found == 1 + 8 * eps).all()  # 16 steps of eps on one of two ranks


def adam(model):
    """Return an optimizer with the parameter a.weight in a group of its own."""
    named = dict(model.named_parameters())
    first = named.pop("a.weight")
    return torch.optim.Adam([{"params": list(named.values()), "lr": 0.1}, {"params": [first], "lr": 0.01}])


@pytest.mark.parametrize("outer", [nesterov, adam])
@pytest.mark.parametrize("order", ["abc", "cab"])
def test_weights_and_the_outer_optimizer_are_loaded_by_name(outer, order):
    def run(rank, group):
        pair = []
        for names, seed in (("abc", 0), (order, 1)):
            model = layers(names, seed)
            pair.append((model, LocalSteps(model, outer(model), every=2, process_group=group)))
        learn(*pair[0], rank, range(5))
        of_model, of_local = copy.deepcopy([each.state_dict() for each in pair[0]])
        of_local["common"] = dict(sorted(of_local["common"].items(), reverse=True))
        pair[1][0].load_state_dict(of_model)
        pair[1][1].load_state_dict(of_local)
        for each in pair:
            learn(*each, rank, range(5, 9))
        return [weights(model) for model, _ in pair]

    assert all(equal(*pair) for pair in run_ranks(run, 2))


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_hook_counts_exchanges(delay, fragments):
    def run(rank, group):
        model, given = layers("ab"), hooked("PowerSGD", group)
        local_steps = LocalSteps(model, every=2 * fragments, fragments=fragments, delay=delay, **given)
        learn(model, local_steps, rank, range(8))
        saved = local_steps.state_dict()
        (kept,) = saved["hook_state"]
        assert set(kept["parameters"]) == {f"local_steps({each}.weight)" for each in "ab"}
        return given["state"].iter, kept["iter"], saved["plain"][0]["num_exchanges"]

    assert run_ranks(run, 2) == [(4, 4, 4)] * 2


def assign(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    model["b"].requires_grad_(False)


CHANGES = {
    "unfreeze": lambda model: model["b"].requires_grad_(True),
    "add": lambda model: model.update({"c": nn.Linear(4, 4)}),
    "replace": lambda model: model.update({"a": nn.Linear(16, 16, bias=False)}),
    "remove": lambda model: model.pop("a"),
    "assign": assign,
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_than_before_is_refused(change):
    def run(rank, group):
        model = layers("abd")
        model["b"].requires_grad_(False)
        local_steps = LocalSteps(model, every=2, process_group=group)
        local_steps.step()
        CHANGES[change](model)
        message = r"can't average [abc]\.weight: since it was made, \d parameters were"
        with pytest.raises(RuntimeError, match=message):
            local_steps.step()

    run_ranks(run, 2)


def test_a_layer_may_be_frozen_later():
    def run(rank, group):
        model = layers("ab")
        local_steps = LocalSteps(model, every=1, process_group=group)
        move(model, rank, 0)
        model["b"].requires_grad_(False)
        local_steps.step()
        return weights(model)

    one, other = run_ranks(run, 2)
    assert equal(one, other)


def test_a_refused_file_changes_nothing():
    def run(rank, group):
        model = layers("ab")
        local_steps = LocalSteps(model, nesterov(model), every=1, **hooked("int4", group))
        learn(model, local_steps, rank, range(3))
        saved = local_steps.state_dict()
        counts, rest = saved["plain"]
        bad = {
            r"every is 0": {"plain": ({**counts, "every": 0}, rest)},
            r"num_since is -1": {"plain": ({**counts, "num_since": -1}, rest)},
            r"of another model: c has": {"common": {**saved["common"], "c": torch.zeros(1)}},
            r"version": {"hook_state": ({**saved["hook_state"][0], "version": 99},)},
            r"the outer optimizer has a group of": {"plain": (counts, {**rest, "groups": []})},
            r"the outer optimizer is a SGD, not a Adam": {"plain": (counts, {**rest, "class": "Adam"})},
        }
        again = layers("ab", seed=3)
        other = LocalSteps(again, nesterov(again), every=1, **hooked("int4", group))
        before = copy.deepcopy(other.state_dict())
        for message, entries in bad.items():
            with pytest.raises(Exception, match=re.compile(message, re.IGNORECASE)):
                other.load_state_dict({**saved, **entries})
            assert str(other.state_dict()) == str(before), message
        without = LocalSteps(layers("ab"), every=1, process_group=group)
        with pytest.raises(ValueError, match="the errors of a hook, which would be lost"):
            without.load_state_dict(saved)

    run_ranks(run, 2)


@pytest.mark.parametrize("name", ["int8", "PowerSGD"])
def test_a_hooks_second_collective_begins_in_the_middle_of_the_delay(name):
    def run(rank, group):
        model = layers("a")
        local_steps = LocalSteps(model, every=6, delay=4, **hooked(name, group))
        issued = []
        for number in range(24):
            learn(model, local_steps, rank, [number])
            issued.append(group.num_issued)
        # Of the third exchange, after step 18: with the count of ranks.
        return [after - before for before, after in pairwise(issued[16:23])]

    assert run_ranks(run, 3) == [[2, 0, 1, 0, 0, 0]] * 3


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("name", ["int4", "auto"])
def test_ranks_go_on_together_after_a_join(name, delay):
    """One had fewer steps, another none. Afterwards all exchange in the same steps."""

    def run(rank, group):
        model = layers("a")
        local_steps = LocalSteps(model, every=4, delay=delay, **hooked(name, group))
        issued = []
        learn(model, local_steps, rank, range((0, 5, 6)[rank]))
        local_steps.join()
        for number in range(8):
            learn(model, local_steps, rank, [10 + number])
            issued.append(group.num_issued)
        local_steps.join()
        return [issued[i + 1] > issued[i] for i in range(7)], weights(model)

    (steps, final), *others = run_ranks(run, 3)
    for same, theirs in others:
        assert same == steps
        assert torch.equal(final["a.weight"], theirs["a.weight"])


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_join_without_progress_takes_no_outer_step(fragments):
    """Momentum would go on by itself. What a rank has learned since is exchanged as ever."""

    def run(rank, group):
        model = layers("ab")
        local_steps = LocalSteps(model, nesterov(model), every=2, fragments=fragments, process_group=group)
        learn(model, local_steps, rank, range(6))
        before = weights(model)
        local_steps.join()
        joined = weights(model)
        learn(model, local_steps, rank, [6])
        local_steps.join()
        return before, joined, weights(model)

    for before, joined, final in run_ranks(run, 2):
        last = "b.weight"  # the last fragment's, exchanged in the last step
        assert torch.equal(before[last], joined[last])
        assert torch.equal(before["a.weight"], joined["a.weight"]) == (fragments == 1)
        assert not torch.equal(joined[last], final[last])


@pytest.mark.parametrize("outer", [adam, lambda m: torch.optim.SGD(m.parameters(), 0.5, 0.9, dampening=0.5)])
def test_saving_changes_nothing(outer):
    def run(rank, group):
        ends = []
        for saves in (False, True):
            model = layers("ab")
            local_steps = LocalSteps(model, outer(model), every=4, fragments=2, process_group=group)
            for number in range(9):
                if saves:
                    local_steps.state_dict()
                move(model, rank, number)
                local_steps.step()
            ends.append(weights(model))
        return ends

    for one, other in run_ranks(run, 2):
        assert equal(one, other)


def test_the_outer_optimizer_of_a_model_with_a_frozen_layer():
    def run(rank, group):
        model = layers("ab")
        model["a"].requires_grad_(False)
        outer = torch.optim.SGD(model.named_parameters(), lr=0.5, momentum=0.9)
        local_steps = LocalSteps(model, outer, every=1, process_group=group)
        learn(model, local_steps, rank, [0])
        assert outer.param_groups[0]["param_names"] == ["b.weight"]
        assert len(outer.state) == 1
        return copy.deepcopy(local_steps.state_dict())

    run_ranks(run, 2)


class ByIndex:
    """A hook's memory by the bucket's index, as users write it."""

    def __init__(self, group):
        self.process_group, self.errors = group, {}


def by_index_hook(state, bucket):
    total = bucket.buffer() + state.errors.get(bucket.index(), 0)
    bucket.buffer().copy_(total.round())
    state.errors[bucket.index()] = total - bucket.buffer()
    return default_hooks.allreduce_hook(state.process_group, bucket)


def test_a_hook_that_knows_buckets_by_their_indices():
    def run(rank, group):
        model, state = layers("ab"), ByIndex(group)
        start = weights(model)
        local_steps = LocalSteps(model, every=2, fragments=2, hook=by_index_hook, state=state)
        total = dict.fromkeys(start, 0.0)
        for number in range(8):
            for name, each in move(model, rank, number).items():
                total[name] += each.double()
            local_steps.step()
        local_steps.join()
        moved = {each: after.double() - start[each] for each, after in weights(model).items()}
        return total, moved, [state.errors[i].view(16, 16).double() for i in range(2)]

    results = run_ranks(run, 2)
    for index, each in enumerate(("a.weight", "b.weight")):
        given = sum(total[each] for total, _, _ in results) / 2
        held = sum(errors[index] for *_, errors in results) / 2
        assert (given - results[0][1][each] + held).abs().max() < 1e-4
