"""Compare compress_reduce_scatter with torch's own reduce-scatter, where nothing is lost."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradcomp.cpu.quantize import levels
from gradcomp.fsdp import compress_reduce_scatter, compress_replicas
from gradcomp.hooks.quantization_hooks import QuantizationState
from tests.fsdp.models import RANKS, Sum, gradients, sharded, weights
from tests.fsdp.scenarios import SCENARIOS, STEPS, accumulate_in_grad, step
from tests.reducer.models import run_cases
from tests.tolerances import UNIT_ROUNDOFF

CASES = {**SCENARIOS, "accumulated in .grad": (sharded, accumulate_in_grad)}
# Backwards that reduce-scatter, per optimizer step, if not one: each is a step of the state's.
REDUCTIONS = {
    "accumulated after the reduce-scatter": 3,
    "accumulated in a narrower dtype": 3,
    "accumulated in .grad": 2,
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


def meshes_of(world_size):
    """Yield (form, torch's mesh, gradcomp's mesh, the group of compress_replicas, the state's options)."""
    shards = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    yield "shards", shards, shards, None, {}
    if world_size == RANKS:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        yield "by nodes", shards, shards, None, {"ranks_per_node": 2}
        yield "HSDP", grid, grid, None, {}
        yield "with compress_replicas", grid, grid["shard"], grid["replicate"].get_group(), {}


def differences(models, run_step):
    """Train two models, and yield differences of gradients, relative to the largest, and of weights."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    for number in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            run_step(model, number=number)
        theirs, ours = map(gradients, models)
        assert any(each is not None and each.any() for each in theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            if other is not None and other.numel():
                assert one.dtype == other.dtype
                yield ((one - other).abs().max() / other.abs().max().clamp(min=1)).item()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(*map(weights, models), strict=True):
        yield from (one - other).abs().flatten().tolist()


def compare(rank, world_size, name):
    """Train with torch and with gradcomp; return the largest difference and the state's steps, by form."""
    make, run_step = CASES[name]
    found = {}
    for form, native_mesh, mesh, replicas, options in meshes_of(world_size):
        for state_name, make_state in STATES.items():
            models = []
            for each in (native_mesh, mesh):
                torch.manual_seed(0)
                models.append(make(each))
            state = make_state(**options)
            calls = [partial(compress_reduce_scatter, models[1], state)]
            if replicas is not None:
                # In either order.
                calls.insert(state_name == "exact", partial(compress_replicas, models[1], replicas))
            for call in calls:
                call()
            worst = max(differences(models, partial(run_step, rank=rank)))
            found[f"{form}, {state_name}"] = worst, state.iter
    return found


@pytest.mark.parametrize("world_size", [2, RANKS])
def test_it_equals_torchs_reduce_scatter(run_ranks, world_size):
    cases = [(world_size, name) for name in CASES]
    for results in run_ranks(run_cases, world_size, compare, cases, timeout_s=400):
        for name, found in zip(CASES, results, strict=True):
            for form, (worst, num_steps) in found.items():
                rounding = world_size * UNIT_ROUNDOFF[ROUNDINGS[name]] if name in ROUNDINGS else 1e-6
                assert worst <= rounding, f"{name}, {form}"
                assert num_steps == STEPS * REDUCTIONS.get(name, 1), f"{name}, {form}"


def codes_of(bits, generator, shape):
    """Return values that have exact codes in any block of this model's shards."""
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1.0
    if bits == 16:
        return torch.randn(shape, generator=generator).bfloat16().float()
    if bits == 8:
        # Blocks of ±127 · 2⁻⁴ and zeros: the scale is 2⁻⁴.
        return signs * torch.randint(0, 2, shape, generator=generator) * 127 / 16
    # Blocks without zeros, whose root mean square is a level: the scale is 1.
    return signs * levels()[11]


class Even(Sum):
    """A Sum whose shards are whole blocks of 16 elements, on 4 ranks."""

    SHAPES = ((32, 8), (33,), (16, 20))


def sum_codes(rank, world_size, bits):
    """Return the largest difference from torch's averages, of gradients with exact codes, by form."""
    model_class, found = Even if bits == 4 else Sum, {}
    for form, native_mesh, mesh, replicas, options in meshes_of(world_size):
        models = [sharded(each, model_class()) for each in (native_mesh, mesh)]
        state = QuantizationState(bits=bits, block_size=16, **options)
        compress_reduce_scatter(models[1], state)
        if replicas is not None:
            compress_replicas(models[1], replicas)
        worst = 0.0
        for number in range(3):
            generator = torch.Generator().manual_seed(10 * number + rank)
            given = [[codes_of(bits, generator, shape) for shape in model_class.SHAPES] for _ in range(4)]
            if form == "by nodes" and rank % 2:  # a node's sums must have exact codes, too
                given = [[0 * each for each in layer] for layer in given]
            for model in models:
                model.zero_grad()
                model(given).backward()
            for one, other in zip(*map(gradients, models), strict=True):
                worst = max([worst, *(one - other).abs().flatten().tolist()])
        errors = [each["error"] for each in state.state_dict()["buckets"].values() if "error" in each]
        assert len(errors) == (0 if bits == 16 else 4)
        assert not any(error.any() for error in errors), form
        found[form] = worst
    return found


@pytest.mark.parametrize("world_size", [2, RANKS])
def test_exact_codes_give_torchs_sums(run_ranks, world_size):
    cases = [(world_size, bits) for bits in (4, 8, 16)]
    for results in run_ranks(run_cases, world_size, sum_codes, cases, timeout_s=240):
        for (_, bits), found in zip(cases, results, strict=True):
            for form, worst in found.items():
                assert worst <= 1e-6, (bits, form)


def test_exact_codes_on_the_kernels(run_ranks):
    for bits in (4, 16):
        for found in run_ranks(sum_codes, RANKS, RANKS, bits, interpret=True, timeout_s=200):
            assert max(found.values()) <= 1e-6, bits


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
    memories = state._memories._memories.values()
    plans = {id(each.compressor._plan): each.compressor._plan for each in memories}
    return len(memories), len(plans)


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
