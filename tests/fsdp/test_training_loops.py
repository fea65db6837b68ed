"""Test what training loops do with a sharded model besides: compile, clip, and export all weights."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from gradcomp.fsdp import compress_replicas
from gradcomp.hooks.quantization_hooks import QuantizationState
from tests.fsdp.models import RANKS, Net, batch_of, new_grid, sharded, weights

CLIPPED = 1.0


def train(rank, compiles):
    """Return the losses, the largest norm after clipping, the weights, the state's step and the export."""
    grid, state = new_grid(), QuantizationState(None, bits=4, block_size=16)
    torch.manual_seed(0)
    model = sharded(grid.shards)
    compress_replicas(model, grid.replicas, state)
    forward = torch.compile(model, backend="aot_eager") if compiles else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for number in range(12):
        x = batch_of(rank, number % 4)
        loss = (forward(x) - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        optimizer.step()
        losses.append(loss.item())
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    norm = max(float(each.full_tensor()) for each in norms)
    out = None
    if rank == 0:
        plain = Net()
        plain.load_state_dict(whole)
        out = plain(batch_of(0, 0))
    shards = weights(model)
    mine = model(batch_of(0, 0))
    return losses, norm, shards, state.iter, (out, mine.detach())


@pytest.mark.parametrize("compiles", [False, True])
def test_clipping_and_export_of_all_weights(run_ranks, compiles):
    ranks = run_ranks(train, RANKS, compiles, timeout_s=240)
    for losses, norm, _, num_steps, _ in ranks:
        assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
        assert norm <= CLIPPED * 1.001
        assert num_steps == 12
    for one, other in ((0, 2), (1, 3)):
        for ours, theirs in zip(ranks[one][2], ranks[other][2], strict=True):
            assert torch.equal(ours, theirs)
    plain, in_shards = ranks[0][4]
    assert torch.allclose(plain, in_shards, atol=1e-6)
