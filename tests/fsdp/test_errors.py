"""Test what compress_replicas refuses, and that one rank's error reaches all ranks."""

import re
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param_group
from torch.distributed.tensor import Shard

from gradcomp.comm.bucket import GradBucket
from gradcomp.compress import CompressorState
from gradcomp.fsdp import compress_replicas
from gradcomp.fsdp.param_groups import ParamGroup
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.fsdp.models import RANKS, Exact, Net, batch_of, new_grid, sharded

TIMEOUT_S = 5


def step(model, rank, number):
    model(batch_of(rank, number)).square().mean().backward()


def on_meta(mesh):
    with torch.device("meta"):
        return sharded(mesh, Net())


def over_two_meshes(grid):
    """Shard a module's weight and bias over two different meshes."""
    meshes = [_fsdp_common.FSDPMeshInfo(each, 0) for each in (grid.shards, grid.mesh["replicate"])]
    return fully_shard(
        nn.Linear(4, 4),
        mesh=grid.shards,
        shard_placement_fn=lambda each: _fsdp_common.ShardPlacementResult(Shard(0), meshes[each.ndim - 1]),
    )


def used_state(grid):
    """A state that has averaged another model's bucket."""
    state = QuantizationState(grid.replicas)
    bucket = torch.zeros(4)
    quantization_hook(state, GradBucket(0, bucket, [nn.Parameter(torch.zeros(4))], True)).wait()
    return state


def called_before(grid):
    model = sharded(grid.shards)
    compress_replicas(model, grid.replicas)
    return model


def hooked_by_the_user(grid):
    model = sharded(grid.shards)
    model.layers[1].set_all_reduce_hook(lambda output: None)
    return model


def without_parameters(grid):
    return fully_shard(nn.Tanh(), mesh=grid.shards)


# case -> (the call's arguments, the error, its message)
REFUSED = {
    "unsharded": (lambda g: (Net(), g.replicas), ValueError, "Net is not: call fully_shard on the model"),
    "sharded parts": (
        lambda g: (nn.Sequential(fully_shard(nn.Linear(2, 2), mesh=g.shards)), g.replicas),
        ValueError,
        "Sequential is not: call fully_shard on the model itself",
    ),
    "no module": (lambda g: ([Net()], g.replicas), TypeError, r"takes a module, got \[Net"),
    "2-D mesh": (
        lambda g: (sharded(g.mesh), g.replicas),
        ValueError,
        "the model is replicated by torch.*Give fully_shard a 1-D mesh",
    ),
    "no parameters": (lambda g: (without_parameters(g), g.replicas), ValueError, "no sharded parameters"),
    "several meshes": (
        lambda g: (over_two_meshes(g), g.replicas),
        ValueError,
        "the model has 2 parameter groups",
    ),
    "meta": (lambda g: (on_meta(g.shards), g.replicas), ValueError, "but spare is a meta tensor"),
    "second call": (
        lambda g: (called_before(g), g.replicas),
        ValueError,
        "the model has an all-reduce hook already. Likely cause: a second call",
    ),
    "the user's hook": (
        lambda g: (hooked_by_the_user(g), g.replicas),
        ValueError,
        r"layers\.1 has an all-reduce hook already",
    ),
    "no group": (lambda g: (sharded(g.shards), None), TypeError, "replicate_group, got None"),
    "a mesh": (lambda g: (sharded(g.shards), g.mesh), TypeError, "replicate_group, got .* DeviceMesh"),
    "all ranks": (
        lambda g: (sharded(g.shards), dist.group.WORLD),
        ValueError,
        r"ranks \[0, 1, 2, 3\], of which \[(0, 1|2, 3)\] hold different shards of the model",
    ),
    "the shards": (
        lambda g: (sharded(g.shards), g.shards.get_group()),
        ValueError,
        "one rank of every replica",
    ),
    "a hook": (lambda g: (sharded(g.shards), g.replicas, powerSGD_hook), TypeError, "got <function powerSGD"),
    "another group": (
        lambda g: (sharded(g.shards), g.replicas, PowerSGDState(dist.group.WORLD)),
        ValueError,
        "set state.process_group = replicate_group",
    ),
    "a used state": (
        lambda g: (sharded(g.shards), g.replicas, used_state(g)),
        ValueError,
        "one state per model",
    ),
}
if not hasattr(_fsdp_common, "ShardPlacementResult"):  # torch 2.11 has one mesh per module
    del REFUSED["several meshes"]


def refuse(rank):
    grid, found = new_grid(), {}
    for name, (make_arguments, error, message) in REFUSED.items():
        with pytest.raises(error) as caught:
            compress_replicas(*make_arguments(grid))
        found[name] = re.search(message, str(caught.value)) is not None or str(caught.value)
    return found


def test_what_is_refused(run_ranks):
    for found in run_ranks(refuse, RANKS):
        assert found == dict.fromkeys(REFUSED, True)


def shared_state(rank):
    grid = new_grid()
    state = QuantizationState(None)
    model = sharded(grid.shards)  # kept alive: a state forgets a collected model
    compress_replicas(model, grid.replicas, state)
    with pytest.raises(ValueError, match="one state per model"):
        compress_replicas(sharded(grid.shards), grid.replicas, state)
    return True


def test_two_models_with_one_state_are_refused(run_ranks):
    assert run_ranks(shared_state, RANKS) == [True] * RANKS


def differ(rank, odd_rank, what):
    """Call compress_replicas with another argument or model on odd_rank; return the error message."""
    grid, is_odd = new_grid(), rank == odd_rank
    options = {"bits": 8 if is_odd and what == "options" else 4}
    state = None if is_odd and what == "no state" else QuantizationState(None, **options)
    model = Net()
    if is_odd and what == "modules":
        model.layers[1] = nn.Sequential(nn.Linear(33, 33))
    model = sharded(grid.shards, model)
    with pytest.raises(RuntimeError) as caught:
        compress_replicas(model, grid.replicas, state)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "odd_rank", "message"),
    [
        ("options", 3, "bits.*8"),
        ("no state", 0, "state is .*quantization_hook"),
        ("modules", 2, r"shapes\[\d\] is"),
    ],
)
def test_every_rank_is_told_how_one_differs(run_ranks, what, odd_rank, message):
    for text in run_ranks(differ, RANKS, odd_rank, what):
        assert re.search(message, text)


def swapped_replicas(rank):
    """Join ranks of different shards in the replicas' groups; return the error message."""
    grid = new_grid()
    groups = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    with pytest.raises(RuntimeError) as caught:
        compress_replicas(sharded(grid.shards), groups[rank in (1, 2)])
    return str(caught.value)


def test_replicas_with_other_shards_are_refused(run_ranks):
    for text in run_ranks(swapped_replicas, RANKS):
        assert "rank in the shard mesh" in text


def other_step(rank):
    """Give rank 2 another step, as another checkpoint would; return the first step's error message."""
    grid = new_grid()
    state = QuantizationState(None)
    model = sharded(grid.shards)
    compress_replicas(model, grid.replicas, state)
    state.iter = 7 if rank == 2 else 5
    with pytest.raises(RuntimeError) as caught:
        step(model, rank, 0)
    return str(caught.value)


def test_every_rank_is_told_of_a_checkpoint_of_another_step(run_ranks):
    for text in run_ranks(other_step, RANKS):
        assert re.search("iter is 5 on rank 0 and 7 on rank 2", text)


class FailsLater(Exact):
    """Raises an error on rank 1 in the fourth step."""

    num_calls = 0

    def reduce(self, flat, out, group, seed, unused=()):
        FailsLater.num_calls += 1
        if dist.get_rank() == 1 and FailsLater.num_calls > 7:
            raise ZeroDivisionError("on rank 1")
        yield from super().reduce(flat, out, group, seed, unused)


def fail_later(rank):
    """Take steps until rank 1's compressor fails; return this rank's step and error."""
    numbers = torch.arange(RANKS).view(2, 2)
    groups = {}
    for dimension, lists in (("replicate", numbers.t()), ("shard", numbers)):
        for ranks in lists.tolist():
            group = dist.new_group(ranks, timeout=timedelta(seconds=TIMEOUT_S))
            if rank in ranks:
                groups[dimension] = group
    mesh = DeviceMesh.from_group(list(groups.values()), "cpu", mesh=numbers, mesh_dim_names=tuple(groups))
    model = sharded(mesh["shard"])
    compress_replicas(model, groups["replicate"], CompressorState(FailsLater))
    store = dist.distributed_c10d._get_default_store()
    for number in range(5):
        try:
            step(model, rank, number)
        except Exception as error:
            # Keep all connections open until every rank has its error.
            store.set(f"rank {rank} has ended", "")
            store.wait([f"rank {each} has ended" for each in range(RANKS)], timedelta(seconds=30))
            return f"step {number} raised {error!r}"
    return "finished"


def test_an_error_in_a_later_step_reaches_every_rank(run_ranks):
    """Since rank 1's process doesn't end, the groups' time-out raises the other ranks' errors."""
    texts = run_ranks(fail_later, RANKS)
    assert texts[1] == "step 3 raised ZeroDivisionError('on rank 1')"
    for rank in (0, 2, 3):
        assert re.match(r"step 3 raised \w*Error\(.*[Tt]im(ed ?out|eout)", texts[rank]), texts[rank]


def other_parts(rank):
    grid = new_grid()
    model = sharded(grid.shards)
    compress_replicas(model, grid.replicas)
    x = batch_of(rank, 0)
    model.set_requires_all_reduce(False)
    model(x).square().mean().backward()
    model.set_requires_all_reduce(True)
    with pytest.raises(RuntimeError) as caught:
        model(x, use_spare=True).square().mean().backward()
    return str(caught.value)


def test_other_parameters_after_a_backward_that_was_not_averaged(run_ranks):
    for text in run_ranks(other_parts, RANKS):
        assert re.search("the model has gradients of 3 parameters now, but of 2 in the last backward", text)


def unknown_layouts(rank):
    """Take a step with a torch that reduces fewer gradients, or in another order; return the errors."""
    grid, reduce, texts = new_grid(), _fsdp_param_group.foreach_reduce, []

    def reduce_backwards(parameters, gradients, *rest):
        return reduce(parameters[::-1], gradients[::-1], *rest)

    for owner, name, other in (
        (ParamGroup, "_will_be_reduced", lambda self, parameter: True),
        (_fsdp_param_group, "foreach_reduce", reduce_backwards),
    ):
        model = sharded(grid.shards)
        compress_replicas(model, grid.replicas)
        with mock.patch.object(owner, name, other), pytest.raises(RuntimeError) as caught:
            step(model, rank, 0)
        texts.append(str(caught.value))
    return texts


def test_a_torch_that_reduces_something_else_is_noticed(run_ranks):
    for fewer, backwards in run_ranks(unknown_layouts, RANKS):
        assert re.search(r"FSDP2 reduced \d+ elements of the model, .* doesn't know torch", fewer)
        assert re.search(r"gradients of .* in another order than expected.* doesn't know torch", backwards)
