"""Test what the calls of gradcomp.fsdp refuse: bad arguments, ranks that differ, an old torch."""

import re
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate as replicate_with_ddp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param_group
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from gradcomp.comm.bucket import GradBucket
from gradcomp.compress import CompressorState, Recorder
from gradcomp.fsdp import compress_all_gather, compress_fsdp, compress_reduce_scatter, compress_replicas
from gradcomp.fsdp.param_groups import ParamGroup
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.fsdp.gathered import round_all_gathers
from tests.fsdp.models import RANKS, Exact, Net, new_grid, over_two_meshes, sharded
from tests.fsdp.scenarios import step
from tests.reducer.models import run_cases

WITH_FSDP = "torch.distributed._composable.replicate_with_fsdp"
TIMEOUT_S = 5
CALLS = {
    "replicas": lambda g, model, *state: compress_replicas(model, g.replicas, *state),
    "reduce_scatter": lambda g, model, *state: compress_reduce_scatter(
        model, *state or [QuantizationState()]
    ),
    "all_gather": lambda g, model: compress_all_gather(model),
}
REPLICAS, SCATTER, GATHER = ([name] for name in CALLS)


def on_meta(grid):
    with torch.device("meta"):
        return sharded(grid.shards)


def with_two_groups(grid):
    """Shard a module's weight and bias over two different meshes."""
    meshes = [_fsdp_common.FSDPMeshInfo(each, 0) for each in (grid.shards, grid.mesh["replicate"])]
    return fully_shard(
        nn.Linear(4, 4),
        mesh=grid.shards,
        shard_placement_fn=lambda each: _fsdp_common.ShardPlacementResult(Shard(0), meshes[each.ndim - 1]),
    )


def called_before(name):
    def make(grid):
        model = sharded(grid.shards)
        CALLS[name](grid, model)
        return model

    return make


def changed(change):
    """Return a function that makes a sharded model and changes it."""

    def make(grid):
        model = sharded(grid.shards)
        change(model)
        return model

    return make


def tensor_parallel(grid):
    layer = nn.Sequential(nn.Linear(8, 8))
    parallelize_module(layer, grid.mesh["replicate"], {"0": ColwiseParallel()})
    return fully_shard(layer, mesh=grid.shards)


def replicated(grid):
    return import_module(WITH_FSDP).replicate(Net(), mesh=grid.mesh["replicate"])


def replace_head(model):
    model.head = nn.Linear(33, 1)


def hook_a_layer(model):
    model.layers[1].set_all_reduce_hook(lambda output: None)


def round_a_layer(model):
    round_all_gathers(model.layers[1], 16)


def on_three_dimensions(grid):
    return sharded(init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c")))


# (the calls, the model, the message of the ValueError)
MODELS = [
    (CALLS, lambda g: Net(), "takes a model sharded with .*Net is not: call fully_shard on the model itself"),
    (CALLS, lambda g: nn.Sequential(sharded(g.shards)), "Sequential is not: call fully_shard on the model"),
    (CALLS, lambda g: DistributedDataParallel(Net()), r"for DDP, call its register_comm_hook\(state, hook\)"),
    (CALLS, lambda g: replicate_with_ddp(Net()), r"DDPNet is not: .*for DDP, call its register_c"),
    (CALLS, lambda g: fully_shard(nn.Tanh(), mesh=g.shards), "Tanh has no sharded parameters"),
    (GATHER, tensor_parallel, "the model had DTensors before fully_shard, as with tensor parallelism"),
    ([*SCATTER, *GATHER], changed(replace_head), "weight of a Linear that is no module .* replaced"),
    (CALLS, on_three_dimensions, "expects a 1D or 2D DeviceMesh"),
    (REPLICAS, called_before("replicas"), "has an all-reduce hook already. Likely cause: a second call"),
    (SCATTER, called_before("reduce_scatter"), "another .* already, a CompressedReduceScatter.* second call"),
    (GATHER, called_before("all_gather"), "another all-gather already, a CompressedAllGather.* second call"),
    (REPLICAS, changed(hook_a_layer), r"layers\.1 has an all-reduce hook already"),
    (GATHER, changed(round_a_layer), r"layers\.1 has another all-gather already, a RoundedAllGather"),
    (REPLICAS, lambda g: sharded(g.mesh), "the model is replicated by torch.*Give fully_shard a 1-D mesh"),
    (REPLICAS, on_meta, "but spare is a meta tensor"),
    (SCATTER, over_two_meshes, r"over ranks \[\d, \d\], but embed over ranks \[\d, \d\].*over one mesh"),
]
if find_spec(WITH_FSDP):  # since torch 2.13
    MODELS += [
        (CALLS, replicated, r"is replicated with replicate\(\).* mesh of size 1 and compress_replicas")
    ]
if hasattr(_fsdp_common, "ShardPlacementResult"):  # torch 2.11 has one mesh per module
    MODELS += [(CALLS, with_two_groups, "the model has 2 parameter groups")]


def used(group):
    """Return a state that has averaged another model's bucket."""
    state = QuantizationState(group)
    quantization_hook(state, GradBucket(0, torch.zeros(4), [nn.Parameter(torch.zeros(4))], True)).wait()
    return state


def on_other_nodes(group):
    return QuantizationState(DeviceMesh("cpu", [[0, 2], [1, 3]]))  # FSDP2's are runs of ranks


def recorded(group):
    state = QuantizationState()
    Recorder(state)
    return state


# (the group that compress_replicas is given, the message)
GROUPS = [
    (lambda g: None, "TypeError.*replicate_group, got None"),
    (lambda g: g.mesh, "TypeError.*replicate_group, got .* DeviceMesh"),
    (lambda g: dist.group.WORLD, r"ValueError.*\[0, 1, 2, 3\], of which \[(0, 1|2, 3)\] hold differ"),
    (lambda g: g.shards.get_group(), "ValueError.*one rank of every replica"),
]
NO_STATE, ALL = "TypeError.*takes a QuantizationState, got", r"ValueError.* has ranks \[0, 1, 2, 3\], but "
# (the calls, the state of the replicas' group, the message)
STATES = [
    (REPLICAS, lambda group: powerSGD_hook, "TypeError.*got <function powerSGD"),
    (SCATTER, lambda group: powerSGD_hook, f"{NO_STATE} <function powerSGD"),
    (SCATTER, lambda group: None, f"{NO_STATE} None"),
    (SCATTER, lambda group: PowerSGDState(None), f"{NO_STATE} .*PowerSGD .*reduces: .*compress_replicas"),
    (SCATTER, lambda group: CompressorState(Exact), NO_STATE),
    (REPLICAS, lambda group: PowerSGDState(dist.group.WORLD), f"{ALL}.* set state.process_group = "),
    (SCATTER, lambda group: QuantizationState(dist.group.WORLD), f"{ALL}the shards' group has"),
    (SCATTER, on_other_nodes, r"ValueError.* has ranks \[0, 2, 1, 3\], but the shards' group has"),
    ([*REPLICAS, *SCATTER], used, "ValueError.*one state per model"),
    (SCATTER, recorded, "ValueError.*has a Recorder"),
]
NO_LIST = "TypeError.*ignored takes a list of modules and parameters, got"
# (compress_all_gather's options of a model, the message)
OPTIONS = [
    (lambda model: {"bits": 4}, "ValueError.*bits is 4, but must be 8; for 16 use torch"),
    (lambda model: {"bits": 16}, r"ValueError.*bits is 16, .*param_dtype=torch\.bfloat16"),
    (lambda model: {"bits": "8"}, "ValueError.*bits is '8', but must be 8"),
    (lambda model: {"block_size": 7}, "ValueError.*block_size is 7, but must be an even"),
    (lambda model: {"block_size": 0}, "ValueError.*block_size is 0, but must be an even"),
    (lambda model: {"ranks_per_node": 0}, "ValueError.*ranks_per_node is 0, but must be"),
    (lambda model: {"ranks_per_node": 3}, "ValueError.*ranks_per_node is 3, but 2 ranks don't fill"),
    (lambda model: {"ignored": "embed"}, f"{NO_LIST} 'embed'"),
    (lambda model: {"ignored": None}, f"{NO_LIST} None"),
    (lambda model: {"ignored": model.embed.weight}, f"{NO_LIST} a tensor of shape"),
    (lambda model: {"ignored": model.embed}, f"{NO_LIST} an object"),
    (lambda model: {"ignored": ["embed"]}, "TypeError.*ignored has 'embed', but takes modules and pa"),
    (lambda model: {"ignored": [Net().embed]}, "ValueError.*2 parameters in ignored .* before fully_sh"),
]
NO_REPLICAS = "TypeError.*compress_fsdp takes a state with the replicas' process group as its replica_state"
# (compress_fsdp's arguments, the message)
WHOLE = [
    (lambda g: {"weight_bits": 4}, "ValueError.*weight_bits is 4, but must be 8"),
    (lambda g: {"ignored": None}, NO_LIST),
    (lambda g: {"state": PowerSGDState(None)}, f"{NO_STATE} .*PowerSGD"),
    (lambda g: {"state": PowerSGDState(None), "replica_state": QuantizationState(g.replicas)}, NO_STATE),
    (lambda g: {"replica_state": QuantizationState()}, NO_REPLICAS),
    (lambda g: {"replica_state": g.replicas}, NO_REPLICAS),
    (lambda g: {"replica_state": QuantizationState(g.shards.get_group())}, "ValueError.*one rank of ev"),
    (
        lambda g: {"replica_state": QuantizationState(g.replicas), "ignored": [Net()]},
        "ValueError.*in ignored",
    ),
]


@contextmanager
def refuses(found, message):
    """Add to found (the message, the error) if the block doesn't raise this error."""
    error = None
    try:
        yield
    except (TypeError, ValueError) as caught:
        error = caught
    if not re.match(message, repr(error), re.DOTALL):
        found.append((message, repr(error)))


def refuse(rank):
    """Return (the message, the error) of the calls that aren't refused as expected."""
    grid, found = new_grid(), []
    model = sharded(grid.shards)
    for names, make, message in MODELS:
        for name in names:
            with refuses(found, f"ValueError.*{message}"):
                CALLS[name](grid, make(grid))
    for name, call in CALLS.items():
        with refuses(found, rf"TypeError.*compress_{name} takes a module, got \[Net"):
            call(grid, [Net()])
    for group_of, message in GROUPS:
        with refuses(found, message):
            compress_replicas(model, group_of(grid))
    for names, make, message in STATES:
        for name in names:
            with refuses(found, message):
                CALLS[name](grid, model, make(grid.replicas))
    for options_of, message in OPTIONS:
        with refuses(found, message):
            compress_all_gather(model, **options_of(model))
    for options_of, message in WHOLE:
        with refuses(found, message):
            compress_fsdp(model, **{"state": QuantizationState(), **options_of(grid)})
    # The refused calls have left the model as it was.
    compress_fsdp(model, QuantizationState(), replica_state=QuantizationState(grid.replicas))
    step(model, rank, 0)
    return found


def test_what_is_refused(run_ranks):
    assert run_ranks(refuse, RANKS) == [[]] * RANKS


def mesh_of(name):
    grid = new_grid()
    return {"1-D": grid.shards, "HSDP": grid.mesh, "shards": new_grid(1, RANKS).shards}[name], grid.replicas


def differ(rank, call, mesh_name, odd_rank, what, value):
    """Make a call with another argument or model on odd_rank."""
    (mesh, replicas), model = mesh_of(mesh_name), Net()
    odd = {what: value} if rank == odd_rank else {}
    if odd.pop("modules", False):
        model.layers[1] = nn.Sequential(nn.Linear(33, 33))
    model = sharded(mesh, model, mp_policy=MixedPrecisionPolicy(param_dtype=odd.pop("dtypes", None)))
    if "ignored" in odd:
        odd["ignored"] = [model.embed.weight]
    if call == "all_gather":
        compress_all_gather(model, **odd)
    elif call == "reduce_scatter":
        compress_reduce_scatter(model, QuantizationState(**odd))
    else:
        compress_replicas(model, replicas, None if "state" in odd else QuantizationState(**odd))


def differ_in_step(rank, call, mesh_name):
    """Give rank 2 another step, as another checkpoint would, and take a step."""
    (mesh, replicas), state = mesh_of(mesh_name), QuantizationState()
    model = sharded(mesh)
    if call == "replicas":
        compress_replicas(model, replicas, state)
    else:
        compress_reduce_scatter(model, state)
    state.iter = 7 if rank == 2 else 5
    step(model, rank, 0)


def share_state(rank):
    grid, state = new_grid(), QuantizationState()
    models = [sharded(grid.shards) for _ in range(2)]  # kept alive: a state forgets a collected model
    for model in models:
        compress_replicas(model, grid.replicas, state)


def swap_replicas(rank):
    """Join ranks of different shards in the replicas' groups."""
    grid, groups = new_grid(), [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    compress_replicas(sharded(grid.shards), groups[rank in (1, 2)])


def average_other_parts(rank):
    """Average other parameters after a backward that was not averaged."""
    model = called_before("replicas")(new_grid())
    model.set_requires_all_reduce(False)
    step(model, rank, 0)
    model.set_requires_all_reduce(True)
    step(model, rank, 0, use_spare=True)


def record_later(rank):
    state = QuantizationState()
    compress_reduce_scatter(sharded(new_grid().shards), state)
    Recorder(state)


def reset_sums(rank):
    model = called_before("reduce_scatter")(new_grid())
    model.set_force_sum_reduction_for_comms(False)
    step(model, rank, 0)


def separate_group_later(rank):
    model = called_before("reduce_scatter")(new_grid())
    model.set_separate_reduce_scatter_group(True)
    step(model, rank, 0)


def on_old_torch(rank, call):
    grid = new_grid()
    with pytest.MonkeyPatch.context() as patched:
        patched.delattr(FSDPModule, f"set_custom_{call}")
        CALLS[call](grid, sharded(grid.shards))


def reduce_something_else(rank, owner, name, other):
    """Take a step with a torch that reduces fewer gradients, or in another order."""
    model = called_before("replicas")(new_grid())
    with mock.patch.object(owner, name, other):
        step(model, rank, 0)


def reduce_backwards(parameters, gradients, *rest, reduce=_fsdp_param_group.foreach_reduce):
    return reduce(parameters[::-1], gradients[::-1], *rest)


OTHERS = r"5 on rank 0 and 7 on rank 2|5 on ranks 0, 1, 3 and 7 on rank 2|7 on rank 2 and 5 on rank 3"
IS_OLD = f"needs FSDPModule.set_custom_{{0}}, which torch {re.escape(torch.__version__)} lacks"
SHARDED = ("HSDP", "shards")
# (what every rank is told: the error's type and message, the function, its arguments)
ERRORS = [
    ("bits.*8", differ, "replicas", "1-D", 3, "bits", 8),
    ("state is .*quantization_hook", differ, "replicas", "1-D", 0, "state", None),
    (r"shapes\[\d\] is", differ, "replicas", "1-D", 2, "modules", True),
    *(
        (f"{message}", differ, call, mesh, *case)
        for mesh in SHARDED
        for message, call, *case in (
            ("bits.*8", "reduce_scatter", 3, "bits", 8),
            ("ranks_per_node.*2", "reduce_scatter", 0, "ranks_per_node", 2),
            (r"shapes\[\d\] is", "reduce_scatter", 2, "modules", True),
            ("block_size.*64", "all_gather", 1, "block_size", 64),
            (r"ignored.*embed\.weight", "all_gather", 2, "ignored", None),
            ("ranks_per_node.*2", "all_gather", 0, "ranks_per_node", 2),
            (r"shapes\[\d\] is", "all_gather", 2, "modules", True),
            (r"dtypes\[0\].*bfloat16", "all_gather", 1, "dtypes", torch.bfloat16),
        )
    ),
    (f"iter is ({OTHERS})", differ_in_step, "replicas", "1-D"),
    *((f"iter is ({OTHERS})", differ_in_step, "reduce_scatter", mesh) for mesh in SHARDED),
    ("one state per model", share_state),
    ("rank in the shard mesh", swap_replicas),
    ("gradients of 3 parameters now, but of 2 in the last backward", average_other_parts),
    ("the state is compress_reduce_scatter's", record_later),
    ("FSDP2 asks for .* of the model, but compress_reduce_scatter sums", reset_sums),
    (
        r"FSDP2 reduced \d+ elements of the model, .* doesn't know torch",
        *(reduce_something_else, ParamGroup, "_will_be_reduced", lambda self, parameter: True),
    ),
    (
        "gradients of .* in another order than expected.* doesn't know torch",
        *(reduce_something_else, _fsdp_param_group, "foreach_reduce", reduce_backwards),
    ),
    *((IS_OLD.format(call), on_old_torch, call) for call in ("reduce_scatter", "all_gather")),
]
HAS_SEPARATE_GROUPS = hasattr(FSDPModule, "set_separate_reduce_scatter_group")
if HAS_SEPARATE_GROUPS:
    early = "call set_separate_reduce_scatter_group before compress_reduce_scatter"
    ERRORS += [(early, separate_group_later)]


def raised(rank, index):
    _, function, *arguments = ERRORS[index]
    with pytest.raises((AttributeError, RuntimeError, ValueError)) as caught:
        function(rank, *arguments)
    return str(caught.value)


def test_every_rank_is_told_the_error(run_ranks):
    cases = [(index,) for index in range(len(ERRORS))]
    for texts in run_ranks(run_cases, RANKS, raised, cases, timeout_s=120):
        for (message, *case), text in zip(ERRORS, texts, strict=True):
            assert re.search(message, text, re.DOTALL), (case, text)


def separate_group(rank):
    """Reduce-scatter in a group of its own; return whether the state has it, and the step."""
    grid, state = new_grid(), QuantizationState()
    model = sharded(grid.shards)
    model.set_separate_reduce_scatter_group(True)
    compress_reduce_scatter(model, state)
    step(model, rank, 0)
    return state.process_group is not grid.shards.get_group(), state.iter


@pytest.mark.skipif(not HAS_SEPARATE_GROUPS, reason="needs a later torch")
def test_a_separate_reduce_scatter_group(run_ranks):
    assert run_ranks(separate_group, RANKS) == [(True, 1)] * RANKS


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
