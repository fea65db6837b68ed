"""Compare gradcomp.DistributedDataParallel with torch's: buffers, copies and checkpoints."""

import copy
import inspect
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradcomp
from tests.hooks.powersgd_runs import reload
from tests.parallel.beside_torch import assert_alike, assert_alike_in_groups, batch_of, flat, gradients
from tests.ranks import of_all_ranks
from tests.reducer.models import CAP_MB, MLP, ConvNet, loss_of, on_device


def reassigned_buffers(cls, rank, options):
    torch.manual_seed(0)
    model = on_device(ConvNet())
    ddp = cls(model, **options)
    results = []
    for step in range(3):
        mean = on_device(torch.full((8,), float(10 * rank + step)))
        model.body[1].register_buffer("running_mean", mean)
        ddp.zero_grad()
        loss_of(ddp(batch_of(model, 0, step))).backward()
        results.append(model.body[1].running_mean.clone())
    return results


def test_buffers_come_from_rank_0_in_every_forward(run_group):
    cases = [({},), ({"broadcast_buffers": False},)]
    for (options,), ranks in zip(
        cases, assert_alike_in_groups(run_group, reassigned_buffers, cases), strict=True
    ):
        for one, other in zip(ranks[0], ranks[-1], strict=True):
            assert torch.equal(one, other) == (not options or len(ranks) == 1)


def buffers_at_construction(cls, rank, options):
    model = on_device(ConvNet())
    model.body[1].running_mean.fill_(rank + 1.0)
    if cls is TorchDDP:
        # An older torch has no forward_sync_buffers.
        options = {name: options[name] for name in options if name in inspect.signature(cls).parameters}
    cls(model, **options)
    return model.body[1].running_mean.clone()


def test_buffers_at_construction(run_group):
    """Buffers are broadcast, also with forward_sync_buffers=False, but not with broadcast_buffers=False."""
    cases = [({},), ({"broadcast_buffers": False},), ({"forward_sync_buffers": False},)]
    for (options,), ranks in zip(
        cases, assert_alike_in_groups(run_group, buffers_at_construction, cases), strict=True
    ):
        assert torch.equal(ranks[0], ranks[-1]) == ("broadcast_buffers" not in options or len(ranks) == 1)


def with_other_buffers(rank, change, has_buffers):
    """Change one rank's buffers, or all ranks', before the third of four steps; return the last one's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if has_buffers else nn.Tanh())
    dist.barrier()  # the ranks end the last case at unlike times
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    ddp = gradcomp.DistributedDataParallel(model, process_group=group)
    for step in range(4):
        if step == 2 and change in (rank, "all"):
            model[0].register_buffer("extra", torch.full((5,), float(rank)))
        elif step == 2 and change == "shape":
            model[0].register_buffer("extra", torch.zeros(5, rank + 1, dtype=torch.int64))
        elif step == 2 and change == "removed" and rank == 1:
            del model[1].running_var
            model[1].running_var = torch.ones(4)
        ddp(torch.ones(2, 4)).sum().backward()
    return model[0].extra


MEETS = "a forward whose module has other buffers than in the last one"


@pytest.mark.ranks(2)
def test_buffers_of_one_rank_are_named_on_all_ranks(rank):
    for change, has_buffers, message in [
        (0, False, rf"{MEETS}.*Buffers that have changed: 0.extra \[5\] torch.float32"),
        ("removed", True, rf"{MEETS}.*Buffers that have changed: 1.running_var \[4\] torch.float32"),
        ("shape", True, r'buffers\[0\] is "0.extra \[5, 1\] torch.int64" on rank 0 and "0.extra \[5, 2\]'),
    ]:
        with pytest.raises(RuntimeError, match=message):
            with_other_buffers(rank, change, has_buffers)


@pytest.mark.ranks(2)
def test_buffers_that_change_on_all_ranks_are_copied(rank):
    for has_buffers in (True, False):
        assert with_other_buffers(rank, "all", has_buffers).tolist() == [0.0] * 5


@pytest.mark.ranks(2)
def test_a_buffer_of_one_rank_is_named_at_construction(rank):
    model = nn.Linear(4, 4)
    if rank == 1:
        model.register_buffer("own", torch.zeros(3))
    with pytest.raises(RuntimeError) as caught:
        gradcomp.DistributedDataParallel(model)
    message = str(caught.value)
    number = "the number of buffers is 0 on rank 0 and 1 on rank 1"
    assert f'{number}, with "own [3] torch.float32" on rank 1 alone' in message


def serialize(cls, rank, how):
    torch.manual_seed(0)
    model = MLP()
    ddp = cls(model, bucket_cap_mb=CAP_MB)
    loss_of(ddp(batch_of(model, rank, 0))).backward()
    other = copy.deepcopy(ddp) if how == "deepcopy" else reload(ddp, weights_only=False)
    other.zero_grad()
    loss_of(other(batch_of(model, rank, 1))).backward()
    return gradients(other), list(other.state_dict())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_average(rank, how):
    averaged, names = assert_alike(rank, serialize, how)
    assert torch.equal(*of_all_ranks(averaged[0]))
    assert names[0] == "module.0.weight"


@pytest.mark.ranks(1)
def test_state_dicts_are_interchangeable(rank):
    """Load a state_dict of torch's DDP into ours, and ours into torch's."""
    torch.manual_seed(0)
    theirs, ours = TorchDDP(ConvNet()), gradcomp.DistributedDataParallel(ConvNet())
    ours.load_state_dict(theirs.state_dict())
    same = torch.equal(flat(ours), flat(theirs))
    with torch.no_grad():
        for param in ours.parameters():
            param.mul_(2)
    theirs.load_state_dict(ours.state_dict())
    assert (same, torch.equal(flat(ours), flat(theirs)), ours.train() is ours) == (True, True, True)


@pytest.mark.ranks(1)
def test_copies_need_the_default_group(rank):
    ddp = gradcomp.DistributedDataParallel(MLP(), process_group=dist.new_group([0]))
    with pytest.raises(
        RuntimeError, match="DDP Pickling/Unpickling are only supported when using DDP with the default"
    ):
        copy.deepcopy(ddp)


@pytest.mark.ranks(2)
def test_a_static_graph_survives_a_copy(rank):
    """Copy a wrapper during training. torch's DDP then stops averaging; ours must not."""
    torch.manual_seed(rank)
    model = MLP()
    ddp = gradcomp.DistributedDataParallel(model, static_graph=True)
    for step in range(4):
        ddp.zero_grad()
        loss_of(ddp(batch_of(model, rank, step))).backward()
        if step == 1:
            ddp = copy.deepcopy(ddp)
    first, second = of_all_ranks(gradients(ddp))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
