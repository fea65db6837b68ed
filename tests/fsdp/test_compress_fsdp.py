"""Test that compress_fsdp does what its parts do, and what it logs."""

from functools import partial

import torch

from gradcomp.fsdp import compress_all_gather, compress_fsdp, compress_reduce_scatter, compress_replicas
from gradcomp.hooks.quantization_hooks import QuantizationState
from tests.depth import everyday
from tests.fsdp.models import RANKS, batch_of, new_grid, sharded, weights
from tests.fsdp.scenarios import step
from tests.hooks.powersgd_runs import Messages
from tests.reducer.models import run_cases
from tests.training import power_sgd

POWER_SGD = partial(power_sgd, min_compression_rate=1)
# form -> (the mesh, the state's options, the state of compress_replicas)
FORMS = {
    "shards": ("all", {"bits": 4}, None),
    "hierarchical": ("all", {"bits": 8, "ranks_per_node": 2}, None),
    "HSDP": ("HSDP", {"bits": 16}, None),
    "int4 between replicas": ("shards", {"bits": 4}, partial(QuantizationState, bits=4, block_size=16)),
    "PowerSGD between replicas": ("shards", {"bits": 8}, POWER_SGD),
}


def train_both(rank, form):
    """Train with compress_fsdp, and with its parts. Returns whether weights are equal, and what is logged."""
    mesh, options, of_replicas = FORMS[form]
    grid, results = new_grid(1, RANKS) if mesh == "all" else new_grid(), []
    for is_whole in (True, False):
        torch.manual_seed(0)
        model = sharded(grid.mesh if mesh == "HSDP" else grid.shards)
        state = QuantizationState(block_size=16, **options)
        replica_state = of_replicas and of_replicas(grid.replicas)
        ignored = [model.layers[0]]
        if is_whole:
            with Messages("gradcomp") as lines:
                compress_fsdp(model, state, replica_state=replica_state, ignored=ignored)
        else:
            if replica_state is not None:
                compress_replicas(model, grid.replicas, replica_state)
            compress_reduce_scatter(model, state)
            compress_all_gather(model, 8, 16, ignored=ignored, ranks_per_node=state.ranks_per_node)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for number in range(2):
            optimizer.zero_grad()
            step(model, rank, number)
            optimizer.step()
        results.append(weights(model))
    return all(map(torch.equal, *results)), lines


def test_it_does_what_its_parts_do(run_ranks):
    cases = [(form,) for form in everyday(["hierarchical", "HSDP", "int4 between replicas"], list(FORMS))]
    ranks = run_ranks(run_cases, RANKS, train_both, cases, timeout_s=240)
    for results in ranks:
        assert [is_same for is_same, _ in results] == [True] * len(cases)
    lines = {form: line for (form,), (_, line) in zip(cases, ranks[0], strict=True)}
    # The shards of the embedding have 9 × 12 elements and 9 of the bias.
    first = (
        "INFO compress_fsdp: embed: weights in {} bits: 108 of 117 elements of a shard; "
        "gradients in {} bits: {}; {}"
    )
    assert first.format(8, 8, 108, "no replicas") in lines["hierarchical"]
    # Between two replicas they have 17 rows. Gradients in 16 bits are all of them.
    first = first.replace("117", "221").replace("108", "204")
    assert first.format(8, 16, 221, "torch averages replicas") in lines["HSDP"]
    assert first.format(8, 4, 204, "quantization_hook averages replicas") in lines["int4 between replicas"]
    for lines_of_form in lines.values():
        assert len(lines_of_form) == 5
        assert "layers.0: " in lines_of_form[2]
        assert "bits: 0 of" in lines_of_form[2]


def one_shard(rank):
    """Compress a model over a mesh of one rank; return the lines. Its adapter came after fully_shard."""
    model = sharded(new_grid(1, 1).shards)
    model.adapter = torch.nn.Linear(33, 2)
    with Messages("gradcomp") as lines:
        compress_fsdp(model, QuantizationState())
    model(batch_of(rank, 0)).square().mean().backward()
    return lines


def test_over_one_rank_nothing_is_sent(run_ranks):
    ((warning, _, of_embed, *_),) = run_ranks(one_shard, 1)
    assert warning.startswith("WARNING compress_fsdp: 2 parameters that require gradients aren't sharded")
    assert "such as adapter.weight" in warning
    assert "embed: weights in 8 bits: 0 of 429 elements of a shard; gradients in 4 bits: 0" in of_embed
