"""Test the weights that compress_all_gather gives every rank, the bytes that it sends, and its payloads."""

from collections import Counter
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

from gradcomp.comm import exchange
from gradcomp.fsdp import compress_all_gather
from gradcomp.fsdp.all_gather import GatherWork
from tests.depth import everyday
from tests.fsdp.gathered import group_of, round_all_gathers, rounded
from tests.fsdp.models import RANKS
from tests.fsdp.test_all_gather import mesh_of
from tests.reducer.models import run_cases


def payloads_alive(rank, form):
    """Return the number of payloads in memory at times, the most in a step, and of all gathers."""
    mesh, options = mesh_of(form)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(33, 33)) for _ in range(4)))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(layers, mesh=mesh)
    compress_all_gather(model, 8, 16, **options)
    payloads, alive, at_most = [], [], 0
    start = GatherWork.__init__

    def num_alive():
        return sum(not each.expired() for each in payloads)

    def starting(work, *arguments):
        nonlocal at_most
        start(work, *arguments)
        payloads.append(StorageWeakRef(work._payload.untyped_storage()))
        at_most = max(at_most, num_alive())

    with mock.patch.object(GatherWork, "__init__", starting):
        for handle in [layer.unshard(async_op=True) for layer in model[:3]]:
            alive.append(num_alive())
            handle.wait()
        alive.append(num_alive())
        for layer in model:
            layer.reshard()
        at_most = 0
        model(torch.ones(2, 33)).sum().backward()
        alive.append(num_alive())
    return alive, at_most, len(payloads)


def test_a_payload_lives_as_long_as_its_gather(run_ranks):
    for results in run_ranks(run_cases, RANKS, payloads_alive, [("shards",), ("hierarchical",)]):
        assert results == [([3, 2, 1, 0, 0], 1, 3 + 4 + 4)] * 2


def works(rank):
    """Call an all-gather as FSDP2 does; return whether it returns Works, and whether outputs are equal."""
    model = fully_shard(nn.Linear(33, 33), mesh=init_device_mesh("cpu", (2,)))
    compress_all_gather(model, block_size=16)
    gather, group = group_of(model)._all_gather_comm, dist.group.WORLD
    outputs, are_works = [], []
    for async_op in (False, True):
        output = gather.allocate((2 * 17 * 34,), dtype=torch.float32, device=torch.device("cpu"))
        shard = output.chunk(2)[rank]
        shard.copy_(torch.linspace(-1, 1, len(shard)))
        work = gather(output_tensor=output, input_tensor=shard, group=group, async_op=async_op)
        are_works.append(isinstance(work, dist.Work))
        if work is not None:
            assert [work.wait(), work.wait()] == [True, True]
        outputs.append(output)
    return are_works, torch.equal(*outputs)


def test_a_work_is_returned_only_if_asked_for(run_ranks):
    assert run_ranks(works, 2) == [([False, True], True)] * 2


def wait_in_another_order(rank):
    """Start two gathers, and wait in an order that differs within a node. Return the weights' differences."""
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    whole = [layer.weight.detach().clone() for layer in model]
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    compress_all_gather(model, block_size=16, ranks_per_node=2)
    handles = [layer.unshard(async_op=True) for layer in model]
    for handle in handles if rank % 2 else reversed(handles):
        handle.wait()
    return [(layer.weight - weight).abs().max().item() for layer, weight in zip(model, whole, strict=True)]


def test_ranks_of_a_node_may_wait_in_another_order(run_ranks):
    for differences in run_ranks(wait_in_another_order, RANKS):
        assert max(differences) < 0.002


WIDTH = 256


def bytes_sent(rank, form):
    """Gather a layer; return the bytes that this rank sends (to other nodes, within its node)."""
    mesh, options = mesh_of(form)
    model = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh)
    compress_all_gather(model, **options)
    model.unshard()  # ranks agree on the delay
    model.reshard()
    sent, isend = Counter(), dist.isend

    def counting(tensor, *, group, group_dst, **rest):
        receiver = dist.get_global_rank(group, group_dst)
        has_heading = rest["tag"] >= exchange._FIRST_OF_CHANNELS
        sent[receiver // 2 == rank // 2] += tensor.nbytes - exchange._HEADING_BYTES * has_heading
        return isend(tensor, group=group, group_dst=group_dst, **rest)

    with mock.patch.object(dist, "isend", counting):
        model.unshard()
    return sent[False], sent[True]


def test_codes_cross_each_network_card_once(run_ranks):
    """Of fp32, 8 bits and scales are 3.9 times fewer bytes; the bias is exact."""
    for results in run_ranks(run_cases, RANKS, bytes_sent, [("shards",), ("hierarchical",)]):
        numel = WIDTH * WIDTH // RANKS
        row = numel + numel // 128 * 2 + WIDTH // RANKS * 4
        assert results == [(2 * row, row), (row, 2 * row)]


def on_kernels(rank, form):
    """Gather a module's weights on the kernels and by the reference; return whether they are equal."""
    mesh, options = mesh_of(form)
    gathered = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(33, 9), nn.Linear(9, 33)), mesh=mesh)
        if is_ours:
            compress_all_gather(model, 8, 16, **options)
        else:
            (reference,) = round_all_gathers(model, 16)
        model.unshard()
        gathered.append([each.detach() for each in model.parameters()])
    return all(torch.equal(*each) for each in zip(*gathered, strict=True)), reference.num_rounded


def test_kernels_give_the_references_weights(run_ranks):
    cases = [("hierarchical",), *everyday([], [("shards",)])]
    for results in run_ranks(run_cases, RANKS, on_kernels, cases, interpret=True):
        assert results == [(True, 1)] * len(cases)


def on_meta(rank):
    """Compress a model on the meta device, then give it values; return the gathered weights."""
    with torch.device("meta"):
        model = fully_shard(nn.Linear(33, 33), mesh=init_device_mesh("cpu", (2,)))
    compress_all_gather(model, block_size=16)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    model.unshard()
    return model.weight.detach(), model.bias.detach()


def test_a_model_on_the_meta_device(run_ranks):
    expected = rounded(torch.full((33,), 0.1), 16)[0]
    for weight, bias in run_ranks(on_meta, 2):
        assert weight.eq(expected).all()
        assert bias.eq(0.1).all()
        assert expected != bias[0]
