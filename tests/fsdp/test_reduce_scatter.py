"""Compare compress_reduce_scatter with torch's own reduce-scatter, where nothing is lost."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradcomp.cpu.quantize import LARGEST_CODE
from gradcomp.fsdp import compress_reduce_scatter, compress_replicas
from gradcomp.hooks.quantization_hooks import QuantizationState
from tests.depth import everyday, mixed
from tests.fsdp.models import RANKS, Sum, gradients, sharded
from tests.fsdp.scenarios import SCENARIOS, STEPS, accumulate_in_grad, differences, step
from tests.reducer.models import run_cases
from tests.tolerances import UNIT_ROUNDOFF

CASES = {**SCENARIOS, "accumulated in .grad": (sharded, accumulate_in_grad)}
# Backwards that reduce-scatter, per optimizer step, if not one: each is a step of the state's.
REDUCTIONS = {
    "accumulated after the reduce-scatter": 3,
    "accumulated in a narrower dtype": 3,
    "accumulated in .grad": 2,
    "an accumulation that is given up": 2,
}
# Torch sums in the reduce dtype, gradcomp in fp32.
ROUNDINGS = {
    "accumulated in a narrower dtype": torch.bfloat16,
    "bf16 parameters": torch.bfloat16,
    "reduced in bf16": torch.bfloat16,
    "reduced in fp16": torch.float16,
}
# All of Net's tensors are smaller than a block, so they are sent exactly.
STATES = {
    "plain steps": lambda **options: QuantizationState(start_iter=100, **options),
    "exact": lambda **options: QuantizationState(bits=8, block_size=4096, **options),
}


FORMS = {2: ("shards",), RANKS: ("shards", "hierarchical", "HSDP", "with compress_replicas")}


def meshes_of(form):
    """Return (torch's mesh, gradcomp's mesh, the group of compress_replicas, the state's options)."""
    if form in ("shards", "hierarchical"):
        shards = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        return shards, shards, None, {"ranks_per_node": 2} if form == "hierarchical" else {}
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if form == "HSDP":
        return grid, grid, None, {}
    return grid, grid["shard"], grid["replicate"].get_group(), {}


def compare(rank, name, form, state_name):
    """Train with torch and with gradcomp; return the largest difference and the state's steps."""
    make, run_step = CASES[name]
    native_mesh, mesh, replicas, options = meshes_of(form)
    models = []
    for each in (native_mesh, mesh):
        torch.manual_seed(0)
        models.append(make(each))
    state = STATES[state_name](**options)
    calls = [partial(compress_reduce_scatter, models[1], state)]
    if replicas is not None:
        # In either order.
        calls.insert(state_name == "exact", partial(compress_replicas, models[1], replicas))
    for call in calls:
        call()
    return max(differences(models, partial(run_step, rank=rank))), state.iter


@pytest.mark.parametrize("world_size", everyday([RANKS], [2, RANKS]))
def test_it_equals_torchs_reduce_scatter(run_ranks, world_size):
    cases = mixed(list(CASES), FORMS[world_size], list(STATES))
    for results in run_ranks(run_cases, world_size, compare, cases, timeout_s=400):
        for case, (worst, num_steps) in zip(cases, results, strict=True):
            name = case[0]
            rounding = world_size * UNIT_ROUNDOFF[ROUNDINGS[name]] if name in ROUNDINGS else 1e-6
            assert worst <= rounding, case
            assert num_steps == STEPS * REDUCTIONS.get(name, 1), case


def codes_of(bits, generator, shape):
    """Return values that have exact codes in any block of this model's shards."""
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1.0
    if bits == 16:
        return torch.randn(shape, generator=generator).bfloat16().float()
    # Blocks of ±L · 2⁻⁴ and zeros: the scale is 2⁻⁴.
    return signs * torch.randint(0, 2, shape, generator=generator) * LARGEST_CODE[bits] / 16


def sum_codes(rank, form, bits, num_steps=3):
    """Return the largest difference from torch's averages, of gradients with exact codes."""
    native_mesh, mesh, replicas, options = meshes_of(form)
    models = [sharded(each, Sum()) for each in (native_mesh, mesh)]
    state = QuantizationState(bits=bits, block_size=16, **options)
    compress_reduce_scatter(models[1], state)
    if replicas is not None:
        compress_replicas(models[1], replicas)
    worst = 0.0
    for number in range(num_steps):
        generator = torch.Generator().manual_seed(10 * number + rank)
        given = [[codes_of(bits, generator, shape) for shape in Sum.SHAPES] for _ in range(4)]
        if form == "hierarchical" and rank % 2:  # a node's sums must have exact codes, too
            given = [[0 * each for each in layer] for layer in given]
        for model in models:
            model.zero_grad()
            model(given).backward()
        for one, other in zip(*map(gradients, models), strict=True):
            worst = max([worst, *(one - other).abs().flatten().tolist()])
    errors = [each["error"] for each in state.state.values() if "error" in each]
    assert bool(errors) == (bits != 16)
    assert not any(error.any() for error in errors), form
    return worst


@pytest.mark.parametrize("world_size", [2, RANKS])
def test_exact_codes_give_torchs_sums(run_ranks, world_size):
    cases = list(product(FORMS[world_size], (4, 8, 16)))
    for results in run_ranks(run_cases, world_size, sum_codes, cases, timeout_s=240):
        for case, worst in zip(cases, results, strict=True):
            assert worst <= 1e-6, case


def test_exact_codes_on_the_kernels(run_ranks):
    cases = [(*case, 1) for case in mixed(everyday(("shards", "hierarchical"), FORMS[RANKS]), (4, 16))]
    for results in run_ranks(run_cases, RANKS, sum_codes, cases, interpret=True, timeout_s=200):
        for case, worst in zip(cases, results, strict=True):
            assert worst <= 1e-6, case


def plans_of_equal_layers(rank):
    """Return (the number of buckets, the number of plans) of a model with equal layers."""
    mesh, state = init_device_mesh("cpu", (2,)), QuantizationState(bits=16)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(33, 33)) for _ in range(6)))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(layers, mesh=mesh)
    compress_reduce_scatter(model, state)
    for _ in range(2):
        model(torch.ones(1, 33)).sum().backward()
    buckets = state._states._buckets
    plans = {id(each.compressor._sum.codes): each.compressor._sum.codes for each in buckets}
    return len(buckets), len(plans)


def test_equal_layers_share_the_memory_of_codes(run_ranks):
    assert run_ranks(plans_of_equal_layers, 2) == [(6, 1)] * 2


def on_meta(rank):
    """Compress a model on the meta device, then give it values; return the gradients, and torch's."""
    found = []
    for state in (QuantizationState(bits=8, block_size=4096), None):
        with torch.device("meta"):
            model = sharded(init_device_mesh("cpu", (2,)))
        if state is not None:
            compress_reduce_scatter(model, state)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        step(model, rank, 0)
        found.append(torch.cat([each.flatten() for each in gradients(model) if each is not None]))
    return found


def test_a_model_on_the_meta_device(run_ranks):
    for ours, theirs in run_ranks(on_meta, 2):
        assert 0 < theirs.abs().max()
        assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()


def one_rank(rank):
    """Shard over one rank: FSDP2 reduces nothing. Returns the state's steps and the gradients of both."""
    mesh, state, found = init_device_mesh("cpu", (1,)), QuantizationState(), []
    for each in (state, None):
        torch.manual_seed(0)
        model = sharded(mesh)
        if each is not None:
            compress_reduce_scatter(model, each)
        step(model, rank, 0)
        found.append([each for each in gradients(model) if each is not None])
    return state.iter, found


def test_one_shard_has_nothing_to_compress(run_ranks):
    ((num_steps, (ours, theirs)),) = run_ranks(one_rank, 1)
    assert num_steps == 0
    assert all(map(torch.equal, ours, theirs))
