"""Test what compress_reduce_scatter refuses, and what it says of replicate()."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate as replicate_with_ddp
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradcomp.compress import CompressorState, Recorder
from gradcomp.fsdp import compress_reduce_scatter, compress_replicas
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.fsdp.models import RANKS, Exact, Net, batch_of, new_grid, sharded
from tests.fsdp.scenarios import step
from tests.fsdp.test_errors import used_state, without_parameters
from tests.kept import error_in

try:
    from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
except ImportError:  # torch 2.11
    replicate_with_fsdp = None


def called_before(grid):
    model = sharded(grid.shards)
    compress_reduce_scatter(model, QuantizationState())
    return model


def over_two_meshes(grid):
    model = Net()
    fully_shard(model.embed, mesh=grid.mesh["replicate"])
    return fully_shard(model, mesh=grid.shards)


def recorded_state():
    state = QuantizationState()
    Recorder(state)
    return state


# case -> (the call's arguments, the error, its message)
REFUSED = {
    "unsharded": (
        lambda g: (Net(), QuantizationState()),
        ValueError,
        "Net is not: call fully_shard on the model itself",
    ),
    "DDP": (
        lambda g: (DistributedDataParallel(Net()), QuantizationState()),
        ValueError,
        r"DistributedDataParallel is not: call its register_comm_hook\(state, hook\) instead",
    ),
    "replicate() of DDP": (
        lambda g: (replicate_with_ddp(Net()), QuantizationState()),
        ValueError,
        r"DDPNet is not: call its register_comm_hook\(state, hook\) instead",
    ),
    "no module": (lambda g: ([Net()], QuantizationState()), TypeError, r"takes a module, got \[Net"),
    "no parameters": (
        lambda g: (without_parameters(g), QuantizationState()),
        ValueError,
        "no sharded parameters",
    ),
    "second call": (
        lambda g: (called_before(g), QuantizationState()),
        ValueError,
        "has another reduce-scatter already, a CompressedReduceScatter. Likely cause: a second call",
    ),
    "several meshes": (
        lambda g: (over_two_meshes(g), QuantizationState()),
        ValueError,
        r"the model is sharded over ranks \[\d, \d\], but embed over ranks \[\d, \d\].*over one mesh",
    ),
    "PowerSGD": (
        lambda g: (sharded(g.shards), PowerSGDState(None)),
        TypeError,
        "takes a QuantizationState, got .*PowerSGD .* in all-reduces: .*compress_replicas",
    ),
    "another compressor": (
        lambda g: (sharded(g.shards), CompressorState(Exact)),
        TypeError,
        "takes a QuantizationState",
    ),
    "None": (lambda g: (sharded(g.shards), None), TypeError, "takes a QuantizationState, got None"),
    "a hook": (lambda g: (sharded(g.shards), powerSGD_hook), TypeError, "got <function powerSGD"),
    "another group": (
        lambda g: (sharded(g.shards), QuantizationState(dist.group.WORLD)),
        ValueError,
        r"has ranks \[0, 1, 2, 3\], but the shards' group has",
    ),
    "a used state": (lambda g: (sharded(g.shards), used_state(g)), ValueError, "one state per model"),
    "a recorder": (lambda g: (sharded(g.shards), recorded_state()), ValueError, "has a Recorder"),
}
if replicate_with_fsdp is not None:
    REFUSED["replicate() of FSDP2"] = (
        lambda g: (replicate_with_fsdp(Net(), mesh=g.mesh["replicate"]), QuantizationState()),
        ValueError,
        r"is replicated with replicate\(\).*fully_shard over a mesh of size 1 and compress_replicas",
    )


def refuse(rank):
    grid, found = new_grid(), {}
    for name, (make_arguments, error, message) in REFUSED.items():
        with pytest.raises(error) as caught:
            compress_reduce_scatter(*make_arguments(grid))
        found[name] = re.search(message, str(caught.value)) is not None or str(caught.value)
    if replicate_with_fsdp is not None:
        with pytest.raises(
            ValueError, match=r"compress_replicas: the model is replicated with replicate\(\)"
        ):
            compress_replicas(replicate_with_fsdp(Net(), mesh=grid.mesh["replicate"]), grid.replicas)
    return found


def test_what_is_refused(run_ranks):
    for found in run_ranks(refuse, RANKS):
        assert found == dict.fromkeys(REFUSED, True)


def refuse_later(rank):
    """Change what compress_reduce_scatter has set; return the error messages."""
    grid, messages = new_grid(), []
    state = QuantizationState()
    model = sharded(grid.shards)
    compress_reduce_scatter(model, state)
    with pytest.raises(ValueError, match="the state is compress_reduce_scatter's"):
        Recorder(state)
    model.set_force_sum_reduction_for_comms(False)
    with pytest.raises(RuntimeError) as caught:
        step(model, rank, 0)
    messages.append(str(caught.value))
    if hasattr(model, "set_separate_reduce_scatter_group"):
        model = sharded(grid.shards)
        compress_reduce_scatter(model, QuantizationState())
        model.set_separate_reduce_scatter_group(True)
        with pytest.raises(RuntimeError) as caught:
            step(model, rank, 0)
        messages.append(str(caught.value))
    return messages


def test_what_is_refused_later(run_ranks):
    expected = [
        r"FSDP2 asks for .* of the model, but compress_reduce_scatter sums",
        "call set_separate_reduce_scatter_group before compress_reduce_scatter",
    ]
    for messages in run_ranks(refuse_later, RANKS):
        for pattern, message in zip(expected, messages, strict=False):
            assert re.search(pattern, message), message


def separate_group(rank):
    """Reduce-scatter in a group of its own; return whether the state has it, and the step."""
    grid, state = new_grid(), QuantizationState()
    model = sharded(grid.shards)
    model.set_separate_reduce_scatter_group(True)
    compress_reduce_scatter(model, state)
    step(model, rank, 0)
    return state.process_group is not grid.shards.get_group(), state.iter


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="needs a later torch"
)
def test_a_separate_reduce_scatter_group(run_ranks):
    assert run_ranks(separate_group, RANKS) == [(True, 1)] * RANKS


def old_torch(rank):
    grid = new_grid(1, 1)
    del FSDPModule.set_custom_reduce_scatter
    with pytest.raises(RuntimeError) as caught:
        compress_reduce_scatter(sharded(grid.shards), QuantizationState())
    return str(caught.value)


def test_an_old_torch_is_named(run_ranks):
    (text,) = run_ranks(old_torch, 1)
    assert f"FSDPModule.set_custom_reduce_scatter, which torch {torch.__version__} lacks" in text


def differ(rank, odd_rank, what, mesh_name):
    """Call compress_reduce_scatter with another argument or model on odd_rank; return the error message."""
    grid, is_odd = new_grid(), rank == odd_rank
    state = QuantizationState(
        bits=8 if is_odd and what == "options" else 4, ranks_per_node=2 if is_odd and what == "nodes" else 1
    )
    model = Net()
    if is_odd and what == "modules":
        model.layers[1] = nn.Sequential(nn.Linear(33, 33))
    model = sharded(grid.mesh if mesh_name == "HSDP" else new_grid(1, 4).shards, model)
    with pytest.raises(RuntimeError) as caught:
        compress_reduce_scatter(model, state)
    return str(caught.value)


@pytest.mark.parametrize("mesh_name", ["HSDP", "shards"])
@pytest.mark.parametrize(
    ("what", "odd_rank", "message"),
    [("options", 3, "bits.*8"), ("nodes", 0, "ranks_per_node.*2"), ("modules", 2, r"shapes\[\d\] is")],
)
def test_every_rank_is_told_how_one_differs(run_ranks, what, odd_rank, message, mesh_name):
    for text in run_ranks(differ, RANKS, odd_rank, what, mesh_name):
        assert re.search(message, text), text


def other_step(rank, mesh_name):
    """Give rank 2 another step, as another checkpoint would; return the first step's error message."""
    grid, state = new_grid(), QuantizationState()
    model = sharded(grid.mesh if mesh_name == "HSDP" else new_grid(1, 4).shards)
    compress_reduce_scatter(model, state)
    state.iter = 7 if rank == 2 else 5
    with pytest.raises(RuntimeError) as caught:
        step(model, rank, 0)
    return str(caught.value)


@pytest.mark.parametrize("mesh_name", ["HSDP", "shards"])
def test_every_rank_is_told_of_a_checkpoint_of_another_step(run_ranks, mesh_name):
    for text in run_ranks(other_step, RANKS, mesh_name):
        assert re.search("iter is (5 on ranks 0, 1, 3 and 7 on rank 2|7 on rank 2 and 5 on rank 3)", text), (
            text
        )


def hook_of_replicate(rank):
    """Return the largest difference between replicate() and DDP with the same hook, and the state's step."""
    states = [QuantizationState(bits=4, block_size=16) for _ in range(2)]
    torch.manual_seed(0)
    module = Net()
    ddp = DistributedDataParallel(Net(), find_unused_parameters=True)
    ddp.module.load_state_dict(module.state_dict())
    replicate_with_ddp(module, find_unused_parameters=True)
    for model, state in zip((module, ddp), states, strict=True):
        model.register_comm_hook(state, quantization_hook)
    worst = 0.0
    for number in range(3):
        for model in (module, ddp):
            model.zero_grad()
            step(model, rank, number)
        for ours, theirs in zip(module.parameters(), ddp.parameters(), strict=True):
            if theirs.grad is not None:
                worst = max(worst, (ours.grad - theirs.grad).abs().max().item())
    return worst, [state.iter for state in states], bool(error_in(states[0]).any())


def test_hooks_work_on_replicate(run_ranks):
    assert run_ranks(hook_of_replicate, 2) == [(0.0, [3, 3], True)] * 2


def one_rank(rank):
    """Shard over one rank: FSDP2 reduces nothing. Returns the step and the gradients' largest difference."""
    grid, state = new_grid(1, 1), QuantizationState()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(sharded(grid.shards))
    compress_reduce_scatter(models[1], state)
    for model in models:
        model(batch_of(rank, 0)).square().mean().backward()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return state.iter, [
        torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs if a.grad is not None
    ]


def test_one_shard_has_nothing_to_compress(run_ranks):
    ((num_steps, are_equal),) = run_ranks(one_rank, 1)
    assert num_steps == 0
    assert all(are_equal)
