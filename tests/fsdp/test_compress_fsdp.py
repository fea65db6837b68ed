"""Test that compress_fsdp does what its parts do, what it logs, and that runs go on from checkpoints."""

import torch

from gradcomp.compress import load_from_dcp
from gradcomp.fsdp import compress_all_gather, compress_fsdp, compress_reduce_scatter, compress_replicas
from gradcomp.hooks.powerSGD_hook import PowerSGDState
from gradcomp.hooks.quantization_hooks import QuantizationState
from tests.depth import everyday
from tests.fsdp.gathered import round_all_gathers
from tests.fsdp.models import RANKS, batch_of, new_grid, sharded, weights
from tests.fsdp.test_reduce_scatter_feedback import Run, all_shards
from tests.hooks.powersgd_runs import Messages
from tests.reducer.models import run_cases

# form -> (the mesh, the state's options, the state of compress_replicas)
FORMS = {
    "shards": (lambda grid: all_shards(), {"bits": 4}, None),
    "hierarchical": (lambda grid: all_shards(), {"bits": 8, "ranks_per_node": 2}, None),
    "HSDP": (lambda grid: grid.mesh, {"bits": 16}, None),
    "int4 between replicas": (
        lambda grid: grid.shards,
        {"bits": 4},
        lambda: QuantizationState(bits=4, block_size=16),
    ),
    "PowerSGD between replicas": (
        lambda grid: grid.shards,
        {"bits": 8},
        lambda: PowerSGDState(None, 2, 2, min_compression_rate=1),
    ),
}


def train_both(rank, form):
    """Train with compress_fsdp, and with its parts. Returns whether weights are equal, and what is logged."""
    grid, (mesh_of, options, of_replicas) = new_grid(), FORMS[form]
    results = []
    for is_whole in (True, False):
        torch.manual_seed(0)
        model, state = sharded(mesh_of(grid)), QuantizationState(block_size=16, **options)
        replica_state = of_replicas and of_replicas()
        if replica_state is not None:
            replica_state.process_group = grid.replicas
        if is_whole:
            with Messages("gradcomp") as lines:
                compress_fsdp(model, state, replica_state=replica_state, ignored=[model.layers[0]])
        else:
            if replica_state is not None:
                compress_replicas(model, grid.replicas, replica_state)
            compress_reduce_scatter(model, state)
            given = {"ignored": [model.layers[0]], "ranks_per_node": state.ranks_per_node}
            compress_all_gather(model, 8, 16, **given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for number in range(2):
            optimizer.zero_grad()
            model(batch_of(rank, number)).square().mean().backward()
            optimizer.step()
        results.append(weights(model))
    return all(torch.equal(*each) for each in zip(*results, strict=True)), lines


def test_it_does_what_its_parts_do(run_ranks):
    forms = everyday(["hierarchical", "HSDP", "int4 between replicas"], list(FORMS))
    cases = [(form,) for form in forms]
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
    averages = "quantization_hook averages replicas"
    assert first.format(8, 4, 204, averages) in lines["int4 between replicas"]
    for lines_of_form in lines.values():
        assert len(lines_of_form) == 5
        assert "layers.0: " in lines_of_form[2]
        assert "bits: 0 of" in lines_of_form[2]


def whole_weights(run):
    return [each.detach().full_tensor() for each in run.model.parameters()]


def save_run(rank, folder):
    """Save after two steps, and go on. Returns all weights then and at the end."""
    run = Run("4 bits", seed=0)
    compress_fsdp(run.model, run.state)
    run.train(rank, range(2))
    run.save(folder)
    saved = whole_weights(run)
    run.train(rank, range(2, 4))
    return saved, whole_weights(run)


def load_run(rank, folder):
    """Go on from the checkpoint with compress_fsdp, and with the reference. Returns save_run's for each."""
    results = []
    for is_ours in (True, False):
        run = Run("4 bits", seed=1)
        if is_ours:
            compress_fsdp(run.model, run.state)
        else:
            compress_reduce_scatter(run.model, run.state)
            round_all_gathers(run.model, 16)
        run.load(folder)
        load_from_dcp(run.state, folder, "codes")
        loaded = whole_weights(run)
        run.train(rank, range(2, 4))
        results.append((loaded, whole_weights(run)))
    return results


def are_equal(ours, theirs):
    return all(torch.equal(*each) for each in zip(ours, theirs, strict=True))


def test_a_run_goes_on_from_a_checkpoint_on_as_many_ranks_and_on_more(run_ranks, tmp_path):
    folder = str(tmp_path)
    saved, end = run_ranks(save_run, 2, folder)[0]
    for world_size in (2, RANKS):
        for (loaded, ours), (_, theirs) in run_ranks(load_run, world_size, folder):
            assert are_equal(loaded, saved)
            assert are_equal(ours, theirs)
            assert are_equal(ours, end) == (world_size == 2)


def one_shard(rank):
    """Compress a model over a mesh of one rank; return the lines."""
    model = sharded(new_grid(1, 1).shards)
    with Messages("gradcomp") as lines:
        compress_fsdp(model, QuantizationState())
    model(batch_of(rank, 0)).square().mean().backward()
    return lines


def test_over_one_rank_nothing_is_sent(run_ranks):
    ((_, of_embed, *_),) = run_ranks(one_shard, 1)
    assert "embed: weights in 8 bits: 0 of 429 elements of a shard; gradients in 4 bits: 0" in of_embed
