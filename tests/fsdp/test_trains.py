"""Test that sharded models train with compression of every form, and in int4 as without compression."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from gradcomp.fsdp import compress_reduce_scatter, compress_replicas
from gradcomp.hooks.quantization_hooks import QuantizationState
from tests.depth import everyday, mixed
from tests.fsdp.models import RANKS, batch_of, gradients, losses_of_training, new_grid, sharded, weights
from tests.reducer.models import run_cases
from tests.training import power_sgd
from tests.training import train as train_steps

STEPS = 100
# The late loss with error feedback differs by 0.2 % at most from the loss without compression, and without
# feedback by 0.9 % at least.
SAME, OTHER = 0.004, 0.007


def make_fsdp(state, **options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = sharded(mesh, **options)
    if state is not None:
        compress_reduce_scatter(model, state)
    return model


def losses_of(rank, state):
    """Train, and return the losses of all ranks' batches together."""
    torch.manual_seed(0)
    model = make_fsdp(state)

    def loss_of(model, number):
        x = batch_of(rank, number % 8)
        return (model(x).float() - x.sin().sum(dim=1, keepdim=True)).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.004, momentum=0.9)
    losses = torch.tensor(train_steps(model, loss_of, range(STEPS), optimizer=optimizer))
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def late_losses(rank):
    """Return the mean of the last eight losses: uncompressed, in int4, and in int4 without error feedback."""
    int4 = partial(QuantizationState, bits=4, block_size=64)
    states = (None, int4(), int4(use_error_feedback=False))
    return [sum(losses_of(rank, state)[-8:]) / 8 for state in states]


@pytest.mark.parametrize("world_size", everyday([2], [2, RANKS]))
def test_int4_trains_as_no_compression_does(run_ranks, world_size):
    for none, int4, without in run_ranks(late_losses, world_size, timeout_s=240):
        assert abs(int4 - none) <= SAME * none
        # What the comparison can see: without error feedback the loss is another one.
        assert abs(without - none) > OTHER * none


# name -> (the mesh, the options of compress_reduce_scatter's state, the state of compress_replicas), or None
INT4 = partial(QuantizationState, bits=4, block_size=16)
POWER_SGD = partial(power_sgd, min_compression_rate=1)
FORMS = {
    "4 bits": ("shards", {"bits": 4}, None),
    "8 bits": ("shards", {"bits": 8}, None),
    "16 bits": ("shards", {"bits": 16}, None),
    "plain steps first": ("shards", {"bits": 4, "start_iter": 5}, None),
    "hierarchical": ("shards", {"bits": 4, "ranks_per_node": 2}, None),
    "16 bits hierarchical": ("shards", {"bits": 16, "ranks_per_node": 2}, None),
    "HSDP": ("HSDP", {"bits": 4}, None),
    "int4 between replicas": ("replicas", {"bits": 8}, INT4),
    "PowerSGD between replicas": ("replicas", {"bits": 4}, POWER_SGD),
    "int4 alone": ("replicas", None, INT4),
    "PowerSGD alone": ("replicas", None, POWER_SGD),
    "int8 factors alone": ("replicas", None, partial(POWER_SGD, factor_dtype=torch.int8, start_bits=8)),
}
EVERYDAY = [
    "plain steps first",
    "hierarchical",
    *(name for name in FORMS if "between" in name or "alone" in name),
]
PRECISIONS = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}


def train(rank, form, precision):
    """Return the losses, the weights at the end, the states' steps, and their compression rates."""
    mesh, options, of_replicas = FORMS[form]
    grid, states = new_grid(*((1, RANKS) if mesh == "shards" else (2, 2))), []
    torch.manual_seed(0)
    model = sharded(grid.mesh if mesh == "HSDP" else grid.shards, mp_policy=PRECISIONS[precision])
    if options is not None:
        states.append(QuantizationState(block_size=16, **options))
        compress_reduce_scatter(model, states[0])
    if of_replicas is not None:
        states.append(of_replicas())
        compress_replicas(model, grid.replicas, states[-1])
    losses = losses_of_training(model, rank)
    return losses, weights(model), [(each.iter, each.compression_stats()[0]) for each in states]


def test_models_train_in_every_form(run_ranks):
    cases = mixed(everyday(EVERYDAY, list(FORMS)), list(PRECISIONS))
    ranks = run_ranks(run_cases, RANKS, train, cases, timeout_s=300)
    for (form, precision), results in zip(cases, zip(*ranks, strict=True), strict=True):
        for losses, _, states in results:
            assert sum(losses[-4:]) < 0.05 * sum(losses[:4]), (form, precision)
            for num_steps, rate in states:
                assert num_steps == 20
                # Of fp32, 16 bits are a half; of bf16 they are the same.
                least = 1.5 if FORMS[form][1] is None else 1.9 if precision == "fp32" else 0.9
                assert rate > least, (form, precision)
        if FORMS[form][0] != "shards":
            for (_, ours, _), (_, theirs, _) in zip(results[:2], results[2:], strict=True):
                assert all(map(torch.equal, ours, theirs)), (form, precision)


def sums_in_16_bits(rank):
    """Return how far this rank's gradients are from those in fp32: with bits=16, and with reduce_dtype."""
    found = {}
    for name, state, policy in (
        ("gradcomp", QuantizationState(bits=16), MixedPrecisionPolicy()),
        ("torch", None, MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
        ("exact", None, MixedPrecisionPolicy()),
    ):
        torch.manual_seed(0)
        model = make_fsdp(state, mp_policy=policy)
        model(batch_of(rank, 0)).square().mean().backward()
        found[name] = torch.cat([each.flatten() for each in gradients(model) if each is not None])
    return [(found[name] - found["exact"]).norm().item() for name in ("gradcomp", "torch")]


def test_sums_of_16_bits_are_more_accurate_than_torchs(run_ranks):
    """Each addend is rounded to bf16; torch rounds the sums as well."""
    errors = torch.tensor(run_ranks(sums_in_16_bits, RANKS)).square().sum(0).sqrt()
    assert 0 < errors[0] < 0.8 * errors[1]


def overflow(rank):
    """Make one rank's gradient infinite in a step. Returns the norm then, and the next step's gradients."""
    model = make_fsdp(QuantizationState(bits=4, block_size=16))
    norms = []
    for number in range(3):
        model.zero_grad()
        x = batch_of(rank, number)
        x[0, 0] = math.inf if number == 1 and rank == 1 else x[0, 0]
        model(x).square().mean().backward()
        norms.append(
            torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        )
    return [norm.full_tensor().item() for norm in norms]


def test_a_step_that_overflows_is_seen_on_every_rank_and_forgotten(run_ranks):
    for norms in run_ranks(overflow, 2):
        assert [math.isfinite(norm) for norm in norms] == [True, False, True]
