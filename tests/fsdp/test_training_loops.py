"""Test what training loops do with a sharded model besides: compile, clip, export, recover from errors."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from gradcomp.fsdp import compress_reduce_scatter, compress_replicas
from gradcomp.hooks.quantization_hooks import QuantizationState
from tests.fsdp.models import RANKS, Net, batch_of, by_parameter, gradients, new_grid, sharded, weights
from tests.fsdp.scenarios import step
from tests.reducer.models import run_cases
from tests.training import train


def clip_and_export(rank):
    """Return the losses, the largest norm after clipping, the weights, the state's step and the export."""
    grid, state = new_grid(), QuantizationState(None, bits=4, block_size=16)
    torch.manual_seed(0)
    model, norms = sharded(grid.shards), []
    compress_replicas(model, grid.replicas, state)

    def loss_of(model, number):
        x = batch_of(rank, number % 4)
        return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()

    def clip(number):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        norms.append(float(norm.full_tensor()))

    losses = train(torch.compile(model, backend="aot_eager"), loss_of, range(12), before_update=clip)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    out, shards = None, weights(model)
    if rank == 0:
        plain = Net()
        plain.load_state_dict(whole)
        out = plain(batch_of(0, 0))
    return losses, max(norms), shards, state.iter, (out, model(batch_of(0, 0)).detach())


def test_compiling_clipping_and_export_of_all_weights(run_ranks):
    ranks = run_ranks(clip_and_export, RANKS, timeout_s=240)
    for losses, norm, _, num_steps, _ in ranks:
        assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
        assert norm <= 1.001
        assert num_steps == 12
    for one, other in zip(ranks[:2], ranks[2:], strict=True):
        assert all(map(torch.equal, one[2], other[2]))
    assert torch.allclose(*ranks[0][4], atol=1e-6)


def undoable(model, grid):
    """Compress between shards, and between replicas. Returns the states, whose steps can be taken back."""
    states = [QuantizationState(None, bits=4, block_size=16) for _ in range(2)]
    compress_reduce_scatter(model, states[0])
    compress_replicas(model, grid.replicas, states[1])
    for state in states:
        state.keep_undo = True
    return states


def abort(rank, aborts, undoes):
    """Take steps, with a backward that fails in between. Returns the last gradients, errors and counts."""
    grid, fails = new_grid(), []
    torch.manual_seed(0)
    model = Net()
    fully_shard(model.head, mesh=grid.shards)  # torch keeps what it has not reduced, such as the root's
    sharded(grid.shards, model)
    states = undoable(model, grid)

    def fail(gradient):
        if fails:
            raise OSError(fails.pop())

    model.layers[0].register_forward_hook(lambda module, given, out: out.register_hook(fail) and None)
    for number in range(6):
        before = [state.iter for state in states]
        if aborts and number == 4:
            fails.append("in the middle of backward")
            with pytest.raises(OSError, match="in the middle"):
                step(model, rank, 100)
            model.reset_iter_state()
            if undoes:
                for state, num_steps in zip(states, before, strict=True):
                    state.undo_step(num_steps)
                model.set_requires_gradient_sync(False)  # a backward that sends nothing is no step
                model(batch_of(rank, 0)).mul(0).sum().backward()
                model.set_requires_gradient_sync(True)
        model.zero_grad()
        step(model, rank, number)
    found = dict(enumerate(each for each in gradients(model) if each is not None))
    return found, *map(by_parameter, states), [state.iter for state in states]


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="since torch 2.13")
def test_undo_step_takes_back_a_backward_that_fails(run_ranks):
    cases = [(False, False), (True, True), (True, False)]
    for whole, undone, left in run_ranks(run_cases, RANKS, abort, cases):
        assert whole[3] == undone[3] == [6, 6]
        assert left[3] == [7, 7]
        for one, other in zip(whole[:3], undone[:3], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
        assert not all(map(torch.equal, whole[0].values(), left[0].values()))


class Parts(nn.Sequential):
    def forward(self, x, indices):
        """Run some parts, in a reentrant checkpoint those counted from the end."""
        for index in indices:
            x = checkpoint(self[index], x, use_reentrant=True) if index < 0 else self[index](x)
        return x


def parts_in_turn(rank, updates):
    """Train other parts in each step, and take the last one back. Returns counts and errors before each."""
    grid, model, found = new_grid(), Parts(nn.Linear(16, 16), nn.Linear(16, 16)), []
    for module in (*model, model):
        fully_shard(module, mesh=grid.shards)
    states, optimizer = undoable(model, grid), torch.optim.SGD(model.parameters(), 0.1)
    last = (0, 0) if updates else (0, 1, 0)
    for indices in ((0, 1), (0,), (0, 1, 1), (1,), (0, 1, -2), (1, -2, 0), last):
        if updates and found:
            optimizer.step()
            optimizer.zero_grad()
        found.append([(state.iter, by_parameter(state)) for state in states])
        for is_last in (False, True):  # FSDP2 reduces a module that runs twice then in each of its backwards
            model.set_requires_gradient_sync(is_last)
            model(torch.full((4, 16), rank + 1.0), indices).square().mean().backward()
    for state in states:
        state.undo_step()
    return [*found, [(state.iter, by_parameter(state)) for state in states]]


def test_a_backward_is_a_step_whatever_parts_it_uses(run_ranks):
    for found in run_ranks(run_cases, RANKS, parts_in_turn, [(False,), (True,)])[0]:
        assert [[count for count, _ in each] for each in found] == [[n] * 2 for n in (*range(7), 6)]
        for (_, before), (_, after) in zip(*found[-2:], strict=True):
            assert all(torch.equal(before[name], after[name]) for name in before)


def overflow(rank):
    """Make one rank's gradient infinite in a step. Returns the norm then, and the next step's gradients."""
    model, norms = sharded(new_grid(1, 2).shards), []
    compress_reduce_scatter(model, QuantizationState(bits=4, block_size=16))
    for number in range(3):
        model.zero_grad()
        x = batch_of(rank, number)
        x[0, 0] = math.inf if number == 1 and rank == 1 else x[0, 0]
        model(x).square().mean().backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    return [norm.full_tensor().item() for norm in norms]


def test_a_step_that_overflows_is_seen_on_every_rank_and_forgotten(run_ranks):
    for norms in run_ranks(overflow, 2):
        assert [math.isfinite(norm) for norm in norms] == [True, False, True]
