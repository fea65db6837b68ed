"""LocalSteps of models that FSDP2 shards within a site: beside whole models, and through checkpoints."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from gradcomp.compress import load_from_dcp, per_rank_state_dict
from gradcomp.local_steps import LocalSteps
from tests.fsdp.models import Net, batch_of, local, new_grid, sharded
from tests.local_steps.runs import hooked, nesterov
from tests.reducer.models import run_cases
from tests.training import train as train_steps

OPTIONS = {
    "plain": {"every": 2},
    "fragments": {"every": 6, "fragments": 3},
    "delay": {"every": 3, "delay": 2},
}


def train(model, local_steps, rank, numbers, average=lambda model: None):
    def loss_of(model, number):
        x = batch_of(rank, number)
        return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()

    for number in numbers:
        train_steps(model, loss_of, [number], lr=0.02, before_update=lambda step: average(model))
        local_steps.step()


def whole(model):
    """Return all of the weights, which every rank of a site calls."""
    return [each.detach().full_tensor().clone() for each in model.parameters() if each.requires_grad]


def beside_whole(rank, name):
    """Train a sharded model and a whole one. Returns their weights before and after join()."""
    grid, options = new_grid(), OPTIONS[name]
    torch.manual_seed(rank)  # the first rank's weights count
    model = sharded(grid.shards, Net())
    reference = Net()
    by_site = grid.shards.get_group()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        theirs.data.copy_(ours.full_tensor())

    def average(model):
        for each in model.parameters():
            if each.grad is not None:
                dist.all_reduce(each.grad, group=by_site)
                each.grad /= 2

    found = []
    model.spare.requires_grad_(False)
    reference.spare.requires_grad_(False)
    for each, mean in ((model, lambda model: None), (reference, average)):
        local_steps = LocalSteps(each, nesterov(each), process_group=grid.replicas, **options)
        train(each, local_steps, rank, range(9), mean)
        before = [p.detach() for p in each.parameters() if p.requires_grad]
        before = [getattr(p, "full_tensor", p.clone)() for p in before]
        local_steps.join()
        after = [p.detach() for p in each.parameters() if p.requires_grad]
        found.append((before, [getattr(p, "full_tensor", p.clone)() for p in after]))
    return found


def test_shards_train_like_whole_models(run_ranks):
    ranks = run_ranks(run_cases, 4, beside_whole, [(name,) for name in OPTIONS], timeout_s=120)
    for results in zip(*ranks, strict=True):
        for (before, after), (expected_before, expected_after) in results:
            for ours, theirs in zip([*before, *after], [*expected_before, *expected_after], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        for _, after in (ours for ours, _ in results):
            assert all(map(torch.equal, after, results[0][0][1]))
        assert not torch.equal(results[0][0][0][0], results[2][0][0][0])  # sites differ between exchanges


def sum_of_errors(rank, name):
    """Exchange given moves with a hook. Returns Σ own moves, the common weights' moves, and the errors."""
    grid = new_grid()
    torch.manual_seed(0)
    model = sharded(grid.shards, Net())
    given = hooked(name, grid.replicas)
    local_steps = LocalSteps(model, every=1, **given)
    start = [local(each) for each in model.parameters()]
    own = [torch.zeros_like(each, dtype=torch.float64) for each in start]
    for number in range(8):
        generator = torch.Generator().manual_seed(10 * number + rank)
        with torch.no_grad():
            for each, total in zip(model.parameters(), own, strict=True):
                moved = torch.randn(each.to_local().shape, generator=generator)
                each.to_local().add_(moved)
                total += moved
        local_steps.step()
    moved = [local(each).double() - old for each, old in zip(model.parameters(), start, strict=True)]
    entries = given["state"].state.items()
    errors = {key[len("local_steps(") : -1]: entry["error"] for key, entry in entries if "error" in entry}
    held = [
        errors[key].double() if key in errors else torch.zeros_like(total)
        for (key, _), total in zip(model.named_parameters(), own, strict=True)
    ]
    return own, moved, held


def test_nothing_is_lost_on_shards(run_ranks):
    """Σ averages minus the sites' mean error is Σ mean moves, on equal weights."""
    names = ["int4", "PowerSGD"]
    ranks = run_ranks(run_cases, 4, sum_of_errors, [(name,) for name in names], timeout_s=120)
    for index in range(len(names)):
        for one, other in ((0, 2), (1, 3)):
            for own, theirs, moved, same, held, more in zip(
                *(part for pair in zip(ranks[one][index], ranks[other][index], strict=True) for part in pair),
                strict=True,
            ):
                assert torch.equal(moved, same)
                # An error is what the average lacks of pseudo-gradients, which are minus the moves.
                rest = (own + theirs) / 2 - moved + (held + more) / 2
                assert rest.numel() == 0 or rest.abs().max() < 1e-4
        assert sum(float(each.norm()) for each in ranks[0][index][2]) > 0.1


def checkpoint(rank, folder):
    """Save on 2 sites of 2 shards after 7 steps, go on; resume on other grids. Returns weights by grid."""

    def start(grid, seed, hook="none"):
        torch.manual_seed(seed)
        model, given = sharded(grid.shards, Net()), hooked(hook, grid.replicas)
        return model, LocalSteps(model, nesterov(model), every=3, fragments=3, **given), given.get("state")

    def own_name(grid):
        return f"site {grid.replicas.rank()}"

    grid = new_grid()
    model, local_steps, state = start(grid, 0, "int4")
    train(model, local_steps, rank, range(7))
    shard = f"errors of shard {grid.shard_rank}"
    saved = {"local": local_steps.state_dict(), own_name(grid): get_model_state_dict(model)}
    dcp.save({**saved, shard: per_rank_state_dict(state)}, checkpoint_id=folder)
    common = [each.full_tensor() for each in saved["local"]["common"].values()]
    train(model, local_steps, rank, range(7, 13))
    found = [("went on", whole(model), common)]

    model, local_steps, state = start(grid, 1, "int4")
    local_steps.load_from_dcp(folder, "local")
    target = {own_name(grid): get_model_state_dict(model)}
    dcp.load(target, checkpoint_id=folder)
    set_model_state_dict(model, target[own_name(grid)])
    load_from_dcp(state, folder, shard)
    train(model, local_steps, rank, range(7, 13))
    found.append(("resumed", whole(model), common))

    for shape in ((4, 1), (1, 4)):
        model, local_steps, _ = start(new_grid(*shape), 2)
        local_steps.load_from_dcp(folder, "local")
        saved = local_steps.state_dict()
        set_model_state_dict(model, saved["common"], options=StateDictOptions(strict=False))
        momentum = [each.full_tensor().clone() for each in saved["outer"]["momentum_buffer"].values()]
        found.append((shape, whole(model), momentum))
        train(model, local_steps, rank, range(7, 13))
    return found


def test_a_checkpoint_of_sites_and_shards(run_ranks, tmp_path):
    ranks = run_ranks(checkpoint, 4, str(tmp_path), timeout_s=120)
    for (_, went_on, common), (_, resumed, _), *others in ranks:
        assert all(map(torch.equal, went_on, resumed))
        for _, weights, momentum in others:
            assert all(map(torch.equal, weights, common))
            assert all(map(torch.equal, momentum, others[0][2]))
            assert sum(bool(each.any()) for each in momentum) >= len(momentum) - 1  # one weight is not used


def with_gathered_weights(rank):
    grid = new_grid()
    torch.manual_seed(rank)
    model = sharded(grid.shards, Net(), reshard_after_forward=False)
    with torch.no_grad():
        model(batch_of(rank, 0))
    local_steps = LocalSteps(model, every=2, process_group=grid.replicas)
    train(model, local_steps, rank, range(3))
    with torch.no_grad():
        model(batch_of(rank, 0))
    local_steps.regroup(grid.replicas)
    train(model, local_steps, rank, range(3, 4))
    weights = whole(model)
    with torch.no_grad():
        outputs = model(batch_of(0, 9)).clone()
    return weights, outputs


def test_weights_that_a_forward_has_gathered(run_ranks):
    (first, outputs), *others = run_ranks(with_gathered_weights, 4)
    for theirs, same in others:
        assert all(map(torch.equal, first, theirs))
        assert torch.equal(outputs, same)


def refused(rank):
    grid = new_grid()
    with pytest.raises(ValueError, match=r"is Replicate.* where torch averages replicas each step"):
        LocalSteps(sharded(grid.mesh, Net()), process_group=grid.replicas)
    model = sharded(grid.shards, Net())
    with pytest.raises(RuntimeError, match=r"place in the mesh of shards\[0\] is"):
        LocalSteps(model, process_group=grid.shards.get_group())
    local_steps = LocalSteps(model, process_group=grid.replicas)
    of_whole = {
        **local_steps.state_dict(),
        "common": {n: p.full_tensor() for n, p in model.named_parameters()},
    }
    before = str(local_steps.state_dict())
    with pytest.raises(ValueError, match="of another model"):
        local_steps.load_state_dict(of_whole)
    assert str(local_steps.state_dict()) == before


def test_what_is_refused_of_sharded_models(run_ranks):
    run_ranks(refused, 4)
