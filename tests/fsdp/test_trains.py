"""Test how sharded models train in forms that no other test adds up, in 16 bits, and after an overflow."""

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from gradcomp.fsdp import compress_reduce_scatter
from gradcomp.hooks.quantization_hooks import QuantizationState
from tests.depth import mixed
from tests.fsdp.models import RANKS, batch_of, gradients, losses_of_training, sharded
from tests.reducer.models import run_cases


def make_fsdp(state, **options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = sharded(mesh, **options)
    if state is not None:
        compress_reduce_scatter(model, state)
    return model


# The state of compress_reduce_scatter; what test_feedback and test_reduce_scatter don't add up.
FORMS = {"plain steps first": {"bits": 4, "start_iter": 5}, "hierarchical": {"bits": 8, "ranks_per_node": 2}}
PRECISIONS = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}


def train(rank, form, precision):
    """Return the losses, the state's steps, and its compression rate."""
    torch.manual_seed(0)
    state = QuantizationState(block_size=16, **FORMS[form])
    losses = losses_of_training(make_fsdp(state, mp_policy=PRECISIONS[precision]), rank)
    return losses, state.iter, state.compression_stats()[0]


def test_models_train(run_ranks):
    cases = mixed(list(FORMS), list(PRECISIONS))
    for results in run_ranks(run_cases, RANKS, train, cases, timeout_s=300):
        for (form, precision), (losses, num_steps, rate) in zip(cases, results, strict=True):
            assert sum(losses[-4:]) < 0.05 * sum(losses[:4]), (form, precision)
            assert num_steps == 20
            # Of fp32, 16 bits are a half; of bf16 they are the same.
            assert rate > (1.9 if precision == "fp32" else 0.9), (form, precision)


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
