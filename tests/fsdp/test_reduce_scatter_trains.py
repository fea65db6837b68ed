"""Test that models train with compress_reduce_scatter as they do with quantization_hook on DDP."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from gradcomp.fsdp import compress_reduce_scatter, compress_replicas
from gradcomp.hooks.powerSGD_hook import PowerSGDState
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.depth import everyday, mixed
from tests.fsdp.models import RANKS, Net, batch_of, gradients, losses_of_training, new_grid, sharded, weights
from tests.reducer.models import run_cases

STEPS = 100
# The late loss with error feedback differs by 0.2 % at most from the loss without compression, and without
# feedback by 0.9 % at least.
SAME, OTHER = 0.004, 0.007


def make_ddp(state):
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    if state is not None:
        model.register_comm_hook(state, quantization_hook)
    return model


def make_fsdp(state, **options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = sharded(mesh, **options)
    if state is not None:
        compress_reduce_scatter(model, state)
    return model


def losses_of(rank, make, state, **options):
    """Train, and return the losses of all ranks' batches together."""
    torch.manual_seed(0)
    model, losses = make(state, **options), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.004, momentum=0.9)
    for number in range(STEPS):
        x = batch_of(rank, number % 8)
        loss = (model(x).float() - x.sin().sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def late_losses(rank):
    """Return the mean of the last eight losses, by name."""
    found = {}
    without = {"use_error_feedback": False}
    for name, make, several in (("DDP", make_ddp, (None, {})), ("FSDP2", make_fsdp, (None, {}, without))):
        for options in several:
            state = None if options is None else QuantizationState(bits=4, block_size=64, **options)
            found[f"{name} {options}"] = sum(losses_of(rank, make, state)[-8:]) / 8
    return found


@pytest.mark.parametrize("world_size", everyday([2], [2, RANKS]))
def test_int4_trains_as_on_ddp(run_ranks, world_size):
    for found in run_ranks(late_losses, world_size, timeout_s=240):
        none = found["DDP None"]
        assert abs(found["FSDP2 None"] - none) <= 1e-5 * none
        assert abs(found["FSDP2 {}"] - found["DDP {}"]) <= SAME * none
        assert abs(found["FSDP2 {}"] - none) <= SAME * none
        # What the comparison can see: without error feedback the loss is another one.
        assert abs(found["FSDP2 {'use_error_feedback': False}"] - none) > OTHER * none


def shards_of(grid):
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))


# name -> (the mesh, the state, the state of compress_replicas or "no replicas")
FORMS = {
    "4 bits": (shards_of, {"bits": 4}, None),
    "8 bits": (shards_of, {"bits": 8}, None),
    "16 bits": (shards_of, {"bits": 16}, None),
    "plain steps first": (shards_of, {"bits": 4, "start_iter": 5}, None),
    "hierarchical": (shards_of, {"bits": 4, "ranks_per_node": 2}, None),
    "hierarchical, bf16 within": (
        shards_of,
        {"bits": 8, "ranks_per_node": 2, "within_dtype": torch.bfloat16},
        None,
    ),
    "16 bits hierarchical": (shards_of, {"bits": 16, "ranks_per_node": 2}, None),
    "HSDP": (lambda grid: grid.mesh, {"bits": 4}, None),
    "int4 between replicas": (
        lambda grid: grid.shards,
        {"bits": 8},
        lambda: QuantizationState(bits=4, block_size=16),
    ),
    "PowerSGD between replicas": (
        lambda grid: grid.shards,
        {"bits": 4},
        lambda: PowerSGDState(None, 2, 2, min_compression_rate=1),
    ),
}
EVERYDAY = [
    "plain steps first",
    "hierarchical, bf16 within",
    "int4 between replicas",
    "PowerSGD between replicas",
]
PRECISIONS = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}


def train(rank, form, precision):
    """Return the losses, the weights at the end, the state's step, and the compression rate."""
    grid, (mesh_of, options, of_replicas) = new_grid(), FORMS[form]
    torch.manual_seed(0)
    model = sharded(mesh_of(grid), mp_policy=PRECISIONS[precision])
    state = QuantizationState(block_size=16, **options)
    compress_reduce_scatter(model, state)
    if of_replicas is not None:
        compress_replicas(model, grid.replicas, of_replicas())
    losses = losses_of_training(model, rank)
    return losses, weights(model), state.iter, state.compression_stats()[0]


def test_models_train_in_every_form(run_ranks):
    cases = mixed(everyday(EVERYDAY, list(FORMS)), list(PRECISIONS))
    ranks = run_ranks(run_cases, RANKS, train, cases, timeout_s=300)
    for index, (form, precision) in enumerate(cases):
        for losses, _, num_steps, rate in (results[index] for results in ranks):
            assert sum(losses[-4:]) < 0.05 * sum(losses[:4]), (form, precision)
            assert num_steps == 20
            # Of fp32, 16 bits are a half; of bf16 they are the same.
            assert rate > (1.9 if precision == "fp32" else 0.9), (form, precision)
        if "HSDP" in form or "replicas" in form:
            for one, other in ((0, 2), (1, 3)):
                for ours, theirs in zip(ranks[one][index][1], ranks[other][index][1], strict=True):
                    assert torch.equal(ours, theirs), (form, precision)


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
