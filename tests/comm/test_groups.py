"""Test groups that torch doesn't know, and groups that change in place."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradcomp
from gradcomp.comm.exchange import round_trip_s
from gradcomp.comm.nodes import nodes_of
from gradcomp.comm.process_group import timeout_of
from gradcomp.compress import CompressorState
from gradcomp.compress.quantized import QuantizedCompressor, QuantizedOptions
from gradcomp.fsdp import compress_reduce_scatter, compress_replicas
from gradcomp.hooks import default_hooks as hooks
from gradcomp.hooks.auto_hook import AutoState
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import (
    QuantizationState,
    quantization_hook,
    quantization_pertensor_hook,
)
from gradcomp.local_steps import LocalSteps
from gradcomp.reducer import Reducer
from tests.hooks.powersgd_oracle import Bucket, random_gradient
from tests.kept import error_in

SHAPES = [(40, 30), (7,)]


class Group(dist.ProcessGroup):
    """This group belongs to another library, and torch.distributed doesn't know it: torchft's are such."""

    def __init__(self):
        super().__init__(0, 1)

    def size(self):
        raise NotImplementedError


def attempts():
    """Return, by name, functions that give a group to everything that takes one."""
    model = nn.Linear(4, 4)
    reducer = Reducer(nn.Linear(4, 4).parameters())
    ddp = gradcomp.DistributedDataParallel(nn.Linear(4, 4))
    sharded = nn.Linear(4, 4)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))["a"])
    state = QuantizationState()
    stateless = {
        "all-reduce": hooks.allreduce_hook,
        "fp16": hooks.fp16_compress_hook,
        "per tensor": quantization_pertensor_hook,
        "wrapped": hooks.bf16_compress_wrapper(quantization_pertensor_hook),
    }
    return {
        "QuantizationState": QuantizationState,
        "PowerSGDState": PowerSGDState,
        "AutoState": AutoState,
        "CompressorState": lambda group: CompressorState(QuantizedCompressor, QuantizedOptions(), group),
        "an assigned group": lambda group: setattr(state, "process_group", group),
        "Reducer": lambda group: Reducer(model.parameters(), group),
        "a Reducer's hook": lambda group: reducer.register_comm_hook(group, hooks.allreduce_hook),
        "the wrapper": lambda group: gradcomp.DistributedDataParallel(model, process_group=group),
        "the wrapper's hook": lambda group: ddp.register_comm_hook(group, hooks.fp16_compress_hook),
        "average_": lambda group: gradcomp.average_([torch.ones(4)], process_group=group),
        "average_'s hook": lambda group: gradcomp.average_([torch.ones(4)], hooks.bf16_compress_hook, group),
        "LocalSteps": lambda group: LocalSteps(model, process_group=group),
        "LocalSteps' hook": lambda group: LocalSteps(model, hook=hooks.allreduce_hook, state=group),
        "compress_replicas": lambda group: compress_replicas(sharded, group),
        "compress_reduce_scatter": lambda group: compress_reduce_scatter(sharded, QuantizationState(group)),
        **{
            name: lambda group, hook=hook: hook(group, Bucket(torch.ones(1207), SHAPES))
            for name, hook in stateless.items()
        },
    }


@pytest.mark.ranks(2)
def test_a_group_that_torch_does_not_know_is_refused_everywhere(rank):
    unknown, messages = Group(), {}
    for name, attempt in attempts().items():
        with pytest.raises(ValueError, match="torch") as raised:
            attempt(unknown)
        messages[name] = str(raised.value)
    ended = dist.new_group([0, 1])
    dist.destroy_process_group(ended)
    with pytest.raises(ValueError, match="torch") as raised:
        QuantizationState(ended)
    messages = messages | {"ended": str(raised.value)}
    for name, message in messages.items():
        kind = "ProcessGroup" if name == "ended" else "Group"
        assert message.startswith(f"torch.distributed doesn't know the {kind} that "), name
        assert "pass a group that init_process_group, new_group or init_device_mesh has made" in message


@pytest.mark.ranks(4)
def test_a_plain_group_that_torch_has_not_made(rank):
    """Average on a plain group that torch.distributed hasn't made, with four ranks."""
    store = dist.PrefixStore("elsewhere", distributed_c10d._get_default_store())
    group = dist.ProcessGroup(store, rank, 4)
    backend = dist.ProcessGroupGloo(store, rank, 4, timedelta(seconds=20))
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    expected = sum(random_gradient(SHAPES, each, 0) for each in range(4)) / 4
    kinds = {
        "int4": (QuantizationState(group, 4, start_iter=0), quantization_hook),
        "PowerSGD": (PowerSGDState(group, 2, start_powerSGD_iter=2), powerSGD_hook),
        "all-reduce": (group, hooks.allreduce_hook),
    }
    for name, (state, hook) in kinds.items():
        averaged = hook(state, Bucket(random_gradient(SHAPES, rank, 0), SHAPES)).wait()
        assert torch.allclose(averaged, expected, atol=0.5 if name == "int4" else 1e-5), name
    unlike = QuantizationState(group, 4 if rank else 8, start_iter=0)
    nodes = QuantizationState(group, 4, start_iter=0, ranks_per_node=2)
    messages = []
    for state in (unlike, nodes):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            quantization_hook(state, Bucket(torch.ones(1207), SHAPES))
        messages.append(str(raised.value))
    unlike, nodes = messages
    assert "bits is 8 on rank 0 and 4 on ranks 1, 2, 3" in unlike
    assert nodes.startswith("ranks_per_node=2 needs the global ranks of a process group that")


class InPlace(Group):
    """This group's ranks change in place. torch knows it."""

    def become(self, parent):
        """Have the ranks of another group from now on."""
        self.parent, world = parent, distributed_c10d._world
        for table in (world.pg_map, world.pg_group_ranks, world.pg_backend_config):
            table[self] = table[parent]


def passed_on(name):
    return lambda group, *arguments, **options: getattr(group.parent, name)(*arguments, **options)


for name in ("size", "rank", "allreduce", "allgather", "send", "recv", "alltoall_base", "_get_backend"):
    setattr(InPlace, name, passed_on(name))


def changed_in_place(rank):
    """Average on four ranks, then on the first two, with every kind of memory of a group.

    Returns, by hook: the sums of gradients and of averages on two ranks; the delays; the nodes' time-out.
    """
    os.environ["GRADCOMP_ROUND_TRIP_MS"] = "20"
    # torch names groups by the number of groups so far: all ranks need equally many.
    pair, _ = (dist.new_group(ranks, timeout=timedelta(seconds=20)) for ranks in ([0, 1], [2, 3]))
    group = InPlace()
    group.become(dist.group.WORLD)
    kinds = {
        "int4": (QuantizationState(group, 4, 16, ranks_per_node=1), quantization_hook),
        "int4 on nodes": (QuantizationState(group, 4, 16, ranks_per_node=2), quantization_hook),
        "PowerSGD": (PowerSGDState(group, 2, start_powerSGD_iter=2, ranks_per_node=1), powerSGD_hook),
        "fp16": (group, hooks.fp16_compress_hook),
    }
    sums = {name: torch.zeros(2, 1207, dtype=torch.float64) for name in kinds}

    def average(step):
        for name, (state, hook) in kinds.items():
            gradient = random_gradient(SHAPES, rank, step, torch.float32)
            output = hook(state, Bucket(gradient.clone(), SHAPES)).wait()
            sums[name] += torch.stack([gradient, output]).double()

    for step in range(4):
        average(step)
    delays = [round_trip_s(torch.zeros(1), group)]
    if rank > 1:
        return None
    owed = {name: error_in(state.state_dict()) for name, (state, _) in kinds.items() if state is not group}
    os.environ["GRADCOMP_ROUND_TRIP_MS"] = "0"
    if rank == 1:  # as in a process that has come anew, which knows nothing of the group
        group = InPlace()
        for name, (state, hook) in kinds.items():
            kinds[name] = group if isinstance(state, InPlace) else state, hook
    group.become(pair)
    for state, _ in kinds.values() if rank == 1 else ():
        if state is not group:
            state.process_group = group
    for each in sums.values():
        each.zero_()
    for step in range(4, 24):
        average(step)
    left = {name: error_in(kinds[name][0].state_dict()) - before for name, before in owed.items()}
    delays.append(round_trip_s(torch.zeros(1), group))
    return sums, left, delays, timeout_of(nodes_of(group, 2).within)


def test_what_is_kept_of_a_group_goes_when_its_ranks_change(run_ranks):
    one, two, *_ = run_ranks(changed_in_place, 4)
    for name, (first, averages) in one[0].items():
        second, others = two[0][name]
        assert torch.equal(averages, others), name
        given = (first + second - one[1].get(name, 0) - two[1].get(name, 0)) / 2
        assert (given - averages).norm() < 5e-3 * given.norm(), name
    assert one[2:] == two[2:] == ([0.02, 0.0], timedelta(seconds=20))
