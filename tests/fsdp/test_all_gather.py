"""Compare compress_all_gather, bit by bit, with torch's all-gather of weights that are rounded before it."""

from functools import partial
from types import MethodType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gradcomp.fsdp import compress_all_gather
from gradcomp.fsdp.param_groups import param_groups_of
from tests.depth import everyday, mixed
from tests.fsdp.gathered import round_all_gathers
from tests.fsdp.models import RANKS, Net, batch_of, new_grid, over_two_meshes, sharded, weights
from tests.fsdp.scenarios import SCENARIOS, STEPS, step
from tests.reducer.models import run_cases


def tied():
    """Return a Net in which two layers of a module have one weight."""
    model = Net()
    model.layers[1] = nn.Sequential(nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 33))
    model.layers[1][2].weight = model.layers[1][0].weight
    return model


@pytest.mark.usefixtures("group_of_one")
def test_a_tied_weight_has_its_first_name():
    model = tied()
    fully_shard([model.layers[1][2], model.layers[1][0]])  # so FSDP2 knows it as layers.1.2.weight
    assert param_groups_of(model)[0].names(model)[0] == "layers.1.0.weight"


def with_another_dtype(mesh):
    """Freeze a weight in bf16 beside weights in fp32: FSDP2 gathers bytes."""
    model = Net()
    model.layers[0][0].weight.requires_grad_(False)
    model.layers[0][0].weight.data = model.layers[0][0].weight.data.bfloat16()
    model.layers[0][0].register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    model.layers[0][0].bias.data = model.layers[0][0].bias.data.bfloat16()
    model.layers[0][0].bias.requires_grad_(False)
    model.layers[0][0].register_forward_hook(lambda module, args, output: output.float())
    return sharded(mesh, model)


def pre_all_gather(self, mesh):
    return (-self,), None


def post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
    weight = -outputs[0]
    return (weight, (weight,)) if out is None else out.data.copy_(weight)  # .data: the graph has saved out


def with_extension(mesh):
    """Let a weight choose by itself what is gathered. It has equal shards, as torch asks for."""
    model = Net()
    model.layers[1] = nn.Sequential(nn.Linear(33, 8), nn.Tanh(), nn.Linear(8, 33))
    sharded(mesh, model)
    local = model.layers[1][0].weight._local_tensor
    local.fsdp_pre_all_gather = MethodType(pre_all_gather, local)
    local.fsdp_post_all_gather = MethodType(post_all_gather, local)
    return model


def prefetching(mesh):
    model = sharded(mesh)
    layers = [model.embed, *model.layers]
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 3])
        layer.set_modules_to_backward_prefetch(layers[max(index - 2, 0) : index][::-1])
    return model


def fsdp_modules(model):
    return [each for each in model.modules() if isinstance(each, FSDPModule)]


def with_async_op(mesh):
    model = sharded(mesh)
    model._set_unshard_async_op(True)
    return model


def unshard_before(model, rank, number):
    """Gather all modules' weights at once, before the step."""
    for handle in [module.unshard(async_op=True) for module in fsdp_modules(model)][::2]:
        handle.wait()
    step(model, rank, number)


def evaluate_between(model, rank, number):
    step(model, rank, number)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert model(batch_of(rank, number)).isfinite().all()
    for module in fsdp_modules(model):
        module.reshard()


def compiled(mesh):
    model = Net()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return sharded(mesh, model)


def mixed_precision(dtype, **options):
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    return partial(sharded, mp_policy=policy, **options)


# Beside SCENARIOS.
CASES = {
    "fp16 parameters": (mixed_precision(torch.float16), step),
    "resharded over fewer ranks": (partial(sharded, reshard_after_forward=2), step),
    "resharded over fewer ranks in bf16": (mixed_precision(torch.bfloat16, reshard_after_forward=2), step),
    "a tied weight": (lambda mesh: sharded(mesh, tied()), step),
    "another dtype": (with_another_dtype, step),
    "an extension": (with_extension, step),
    "prefetched": (prefetching, step),
    "unshard(async_op=True)": (sharded, unshard_before),
    "always async_op": (with_async_op, step),
    "evaluated between steps": (sharded, evaluate_between),
    "evaluated, never resharded": (partial(sharded, reshard_after_forward=False), evaluate_between),
    "compiled layers": (compiled, step),
    "ignored modules and parameters": (sharded, step),
}
# The rest differs from these in gradients.
EVERYDAY = [
    *("plain", "bf16 parameters", "frozen parameters", "unused parameters", "two forwards"),
    *("checkpointed activations, reentrant", "sharded by columns", "several modules in one group"),
    *("offloaded", *(name for name in CASES if name != "evaluated, never resharded")),
]
CASES = {**SCENARIOS, **CASES}
IGNORED = {"ignored modules and parameters": lambda model: [model.layers[0], model.embed.weight]}
BLOCK_SIZE = 6  # some shards end within a block
FORMS = {2: ("shards",), RANKS: ("shards", "hierarchical", "HSDP")}


def mesh_of(form):
    """Return (the mesh, compress_all_gather's options)."""
    if form == "HSDP":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    return mesh, {"ranks_per_node": 2} if form == "hierarchical" else {}


def train_both(rank, name, form):
    """Train with compress_all_gather and with the reference.

    Returns whether all weights are equal, whether they have changed, and how often the reference rounded.
    """
    (make, run_step), (mesh, options) = CASES[name], mesh_of(form)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make(mesh))
    before, ignored = weights(models[0]), IGNORED.get(name, lambda model: [])
    compress_all_gather(models[0], 8, BLOCK_SIZE, ignored=ignored(models[0]), **options)
    references = round_all_gathers(models[1], BLOCK_SIZE, ignored(models[1]))
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for number in range(STEPS):
            optimizer.zero_grad()
            run_step(model, rank, number)
            optimizer.step()
    ours, theirs = map(weights, models)
    is_same = all(torch.equal(*each) for each in zip(ours, theirs, strict=True))
    has_moved = any(not torch.equal(*each) for each in zip(ours, before, strict=True))
    return is_same, has_moved, sum(each.num_rounded for each in references)


@pytest.mark.parametrize("world_size", [2, RANKS])
def test_it_equals_the_reference(run_ranks, world_size):
    names = everyday(EVERYDAY if world_size == RANKS else EVERYDAY[::6], list(CASES))
    cases = mixed(names, FORMS[world_size])
    for results in run_ranks(run_cases, world_size, train_both, cases, timeout_s=600):
        for case, (is_same, has_moved, num_rounded) in zip(cases, results, strict=True):
            assert (is_same, has_moved) == (True, True), case
            assert bool(num_rounded) != (case[0] == "complex parameters"), case


def train_over_two_meshes(rank):
    """Shard a module over other ranks than the rest, as experts are."""
    grid = new_grid()
    CASES["two meshes"] = lambda mesh: over_two_meshes(grid), step
    return train_both(rank, "two meshes", "shards")


def test_modules_sharded_over_different_ranks(run_ranks):
    for is_same, has_moved, num_rounded in run_ranks(train_over_two_meshes, RANKS):
        assert (is_same, has_moved, num_rounded > 0) == (True, True, True)
