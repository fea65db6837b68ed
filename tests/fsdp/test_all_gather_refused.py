"""Test what compress_all_gather and compress_fsdp refuse."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from gradcomp.fsdp import compress_all_gather, compress_fsdp
from gradcomp.hooks.powerSGD_hook import PowerSGDState
from gradcomp.hooks.quantization_hooks import QuantizationState
from tests.fsdp.gathered import round_all_gathers
from tests.fsdp.models import RANKS, Net, batch_of, new_grid, sharded
from tests.fsdp.test_errors import over_two_meshes, without_parameters
from tests.fsdp.test_reduce_scatter_refused import replicate_with_fsdp
from tests.reducer.models import run_cases


def compress(grid, **options):
    compress_all_gather(sharded(grid.shards), **options)


def ignore(grid, ignored_of):
    model = sharded(grid.shards)
    compress_all_gather(model, ignored=ignored_of(model))


def compress_twice(grid):
    model = sharded(grid.shards)
    compress_all_gather(model)
    compress_all_gather(model)


def compress_beside_the_users(grid):
    model = sharded(grid.shards)
    round_all_gathers(model.layers[1], 16)
    compress_all_gather(model)


def compress_tensor_parallel(grid):
    layer = nn.Sequential(nn.Linear(8, 8))
    parallelize_module(layer, grid.mesh["replicate"], {"0": ColwiseParallel()})
    compress_all_gather(fully_shard(layer, mesh=grid.shards))


def compress_whole(grid, state=None, **options):
    compress_fsdp(sharded(grid.shards), state or QuantizationState(), **options)


def compress_replaced(grid):
    model = sharded(grid.shards)
    model.head = nn.Linear(33, 1)
    compress_all_gather(model)


NO_LIST = "takes a list of modules and parameters as ignored, got"
# case -> (the call, the error, its message)
REFUSED = {
    "a module that was replaced": (
        compress_replaced,
        ValueError,
        "shards the weight of a Linear that is no module of the model.* was replaced",
    ),
    "unsharded": (
        lambda g: compress_all_gather(Net()),
        ValueError,
        "compress_all_gather takes a model sharded .*Net is not: call fully_shard on the model itself",
    ),
    "sharded parts": (
        lambda g: compress_all_gather(nn.Sequential(fully_shard(nn.Linear(2, 2), mesh=g.shards))),
        ValueError,
        "Sequential is not: call fully_shard on the model itself",
    ),
    "DDP": (
        lambda g: compress_all_gather(DistributedDataParallel(Net())),
        ValueError,
        "DistributedDataParallel is not: call its register_comm_hook",
    ),
    "no module": (lambda g: compress_all_gather([Net()]), TypeError, r"takes a module, got \[Net"),
    "no parameters": (
        lambda g: compress_all_gather(without_parameters(g)),
        ValueError,
        "no sharded parameters",
    ),
    "several meshes in a module": (
        lambda g: compress_all_gather(over_two_meshes(g)),
        ValueError,
        "the model has 2 parameter groups",
    ),
    "a mesh of three dimensions": (
        lambda g: sharded(init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))),
        ValueError,
        "expects a 1D or 2D DeviceMesh",
    ),
    "second call": (
        compress_twice,
        ValueError,
        "another all-gather already, a CompressedAllGather. Likely cause: a second call of compress_all_gath",
    ),
    "the user's": (
        compress_beside_the_users,
        ValueError,
        r"layers\.1 has another all-gather already, a RoundedAllGather",
    ),
    "tensor parallelism": (
        compress_tensor_parallel,
        ValueError,
        "compress_all_gather: the model had DTensors before fully_shard, as with tensor parallelism",
    ),
    "4 bits": (lambda g: compress(g, bits=4), ValueError, "bits is 4, but must be 8; for 16 use torch"),
    "16 bits": (lambda g: compress(g, bits=16), ValueError, r"bits is 16, .*param_dtype=torch\.bfloat16"),
    "text": (lambda g: compress(g, bits="8"), ValueError, "bits is '8', but must be 8"),
    "an odd block": (lambda g: compress(g, block_size=7), ValueError, "block_size is 7, but must be an even"),
    "no block": (lambda g: compress(g, block_size=0), ValueError, "block_size is 0, but must be an even"),
    "no nodes": (lambda g: compress(g, ranks_per_node=0), ValueError, "ranks_per_node is 0; it must be"),
    "nodes that aren't full": (
        lambda g: compress(g, ranks_per_node=3),
        ValueError,
        "ranks_per_node is 3, but 2 ranks don't fill such nodes",
    ),
    "ignored text": (lambda g: ignore(g, lambda model: "embed"), TypeError, f"{NO_LIST} 'embed'"),
    "ignored None": (lambda g: ignore(g, lambda model: None), TypeError, f"{NO_LIST} None"),
    "one ignored parameter": (
        lambda g: ignore(g, lambda model: model.embed.weight),
        TypeError,
        f"{NO_LIST} a tensor of shape",
    ),
    "one ignored module": (lambda g: ignore(g, lambda model: model.embed), TypeError, f"{NO_LIST} an object"),
    "an ignored name": (
        lambda g: ignore(g, lambda model: ["embed"]),
        TypeError,
        "ignored has 'embed', but takes modules and parameters",
    ),
    "another model's": (
        lambda g: ignore(g, lambda model: [Net().embed]),
        ValueError,
        "2 parameters in ignored aren't the model's. Likely cause: they were taken before fully_shard",
    ),
    "4 bits of weights": (
        lambda g: compress_whole(g, weight_bits=4),
        ValueError,
        "weight_bits is 4, but must be 8",
    ),
    "PowerSGD between shards": (
        lambda g: compress_whole(g, PowerSGDState(None)),
        TypeError,
        "takes a QuantizationState, got .*PowerSGD",
    ),
    "replicas without a group": (
        lambda g: compress_whole(g, replica_state=QuantizationState()),
        TypeError,
        "compress_fsdp takes a state with the replicas' process group as its replica_state",
    ),
    "replicas without a state": (
        lambda g: compress_whole(g, replica_state=g.replicas),
        TypeError,
        "compress_fsdp takes a state with the replicas' process group as its replica_state",
    ),
}
if replicate_with_fsdp is not None:
    REFUSED["replicate() of FSDP2"] = (
        lambda g: compress_all_gather(replicate_with_fsdp(Net(), mesh=g.mesh["replicate"])),
        ValueError,
        r"compress_all_gather: the model is replicated with replicate\(\)",
    )


def refuse(rank):
    grid, found = new_grid(), {}
    for name, (call, error, message) in REFUSED.items():
        with pytest.raises(error) as caught:
            call(grid)
        found[name] = re.search(message, str(caught.value)) is not None or str(caught.value)
    return found


def test_what_is_refused(run_ranks):
    for found in run_ranks(refuse, RANKS):
        assert found == dict.fromkeys(REFUSED, True)


def old_torch(rank):
    model = sharded(new_grid(1, 1).shards)
    del FSDPModule.set_custom_all_gather
    with pytest.raises(RuntimeError) as caught:
        compress_all_gather(model)
    return str(caught.value)


def test_an_old_torch_is_named(run_ranks):
    (text,) = run_ranks(old_torch, 1)
    assert f"needs FSDPModule.set_custom_all_gather, which torch {torch.__version__} lacks" in text


def differ(rank, odd_rank, what, mesh_name):
    """Call compress_all_gather with another argument or model on odd_rank; return the error message."""
    grid, is_odd = new_grid(), rank == odd_rank
    model = Net()
    if is_odd and what == "modules":
        model.layers[1] = nn.Sequential(nn.Linear(33, 33))
    dtype = torch.bfloat16 if is_odd and what == "dtypes" else None
    mesh = grid.mesh if mesh_name == "HSDP" else new_grid(1, 4).shards
    model = sharded(mesh, model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    options = {
        "block_size": {"block_size": 64},
        "ignored": {"ignored": [model.embed.weight]},
        "nodes": {"ranks_per_node": 2},
    }
    with pytest.raises(RuntimeError) as caught:
        compress_all_gather(model, **(options.get(what, {}) if is_odd else {}))
    return str(caught.value)


DIFFERENCES = {
    "block_size": (1, "block_size.*64"),
    "ignored": (2, r"ignored.*embed\.weight"),
    "nodes": (0, "ranks_per_node.*2"),
    "modules": (2, r"shapes\[\d\] is"),
    "dtypes": (1, r"dtypes\[0\].*bfloat16"),
}


def test_every_rank_is_told_how_one_differs(run_ranks):
    cases = [(odd, what, mesh) for what, (odd, _) in DIFFERENCES.items() for mesh in ("HSDP", "shards")]
    for texts in run_ranks(run_cases, RANKS, differ, cases):
        for (_, what, mesh_name), text in zip(cases, texts, strict=True):
            assert re.search(DIFFERENCES[what][1], text), (mesh_name, text)


def refuse_and_go_on(rank):
    """Give compress_fsdp bad arguments, then good ones for the same model."""
    grid = new_grid()
    model = sharded(grid.shards)
    for options in (
        {"weight_bits": 4},
        {"ignored": None},
        {"replica_state": QuantizationState(grid.replicas), "ignored": [Net()]},
        {"replica_state": QuantizationState(grid.shards.get_group())},
        {"state": PowerSGDState(None), "replica_state": QuantizationState(grid.replicas)},
    ):
        with pytest.raises((TypeError, ValueError)):
            compress_fsdp(model, options.pop("state", None) or QuantizationState(), **options)
    compress_fsdp(model, QuantizationState(), replica_state=QuantizationState(grid.replicas))
    model(batch_of(rank, 0)).square().mean().backward()
    return True


def test_a_refused_call_leaves_the_model_as_it_was(run_ranks):
    assert run_ranks(refuse_and_go_on, RANKS) == [True] * RANKS
