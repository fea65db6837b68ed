"""Compare gradcomp.DistributedDataParallel's constructor with torch's: arguments, errors, synchronization."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradcomp
from gradcomp.parallel.module import to_device
from tests.parallel.beside_torch import assert_alike, batch_of, flat, gradients
from tests.ranks import of_all_ranks
from tests.reducer.models import MLP, MODELS, ConvNet, loss_of


def construct(cls, rank, make, options):
    try:
        cls(make(), **options)
    except Exception as error:
        return type(error).__name__, re.sub(r"DistributedDataParallel\([^)]*\)", "", str(error))
    return None


def frozen():
    return MLP().requires_grad_(False)


def lazy():
    return nn.LazyLinear(3)


def mixed_devices():
    return nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])


@pytest.mark.ranks(1)
def test_what_the_constructor_refuses(rank):
    for make, options in (
        (frozen, {}),
        (lazy, {}),
        (mixed_devices, {}),
        (MLP, {"device_ids": [0]}),
        (MLP, {"output_device": 1}),
        (MLP, {"device_ids": [0, 1]}),
    ):
        error, message = assert_alike(rank, construct, make, options)
        assert error in ("RuntimeError", "ValueError")
        assert message


@pytest.mark.parametrize(
    ("option", "value", "alternative"),
    [
        ("mixed_precision", object(), "torch.autocast"),
        ("delay_all_reduce_named_params", [], "Reducer"),
        ("bucket_cap_mb_list", [1, 2], "bucket_cap_mb"),
    ],
)
def test_options_not_taken_name_an_alternative(option, value, alternative):
    with pytest.raises(NotImplementedError, match=f"has no {option}: use .*{alternative}"):
        gradcomp.DistributedDataParallel(MLP(), **{option: value})


def test_the_lengths_in_a_packed_sequence_stay_on_the_cpu():
    (moved,) = to_device([nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])], torch.device("meta"))
    assert (moved.data.is_meta, moved.batch_sizes.is_meta) == (True, False)


def groups_and_meshes(cls, rank):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    results = []
    for options in ({"device_mesh": mesh}, {"process_group": dist.new_group([0, 1])}):
        torch.manual_seed(rank)
        model = MLP()
        ddp = cls(model, **options)
        loss_of(ddp(batch_of(model, rank, 0))).backward()
        results.append(gradients(model))
    with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh arguments"):
        cls(MLP(), device_mesh=mesh, process_group=dist.group.WORLD)
    with pytest.raises(RuntimeError, match="Only 1D device mesh is supported,"):
        cls(MLP(), device_mesh=dist.device_mesh.init_device_mesh("cpu", (2, 1)))
    return results


def ignoring(cls, rank):
    """Return an ignored parameter and buffer, the gradients, and all parameters.

    The ignored tensors keep this rank's values.
    """
    torch.manual_seed(rank)
    model = ConvNet()
    cls._set_params_and_buffers_to_ignore_for_model(model, ["head.weight", "body.1.running_mean"])
    ddp = cls(model)
    loss_of(ddp(batch_of(model, rank, 0))).backward()
    return (
        model.head.weight.detach().clone(),
        model.body[1].running_mean.clone(),
        gradients(model),
        flat(model),
    )


@pytest.mark.ranks(2)
def test_parameters_to_ignore(rank):
    weight, mean, *_ = assert_alike(rank, ignoring)
    for each in (weight, mean):
        assert not torch.equal(*of_all_ranks(each))


def without_init_sync(cls, rank):
    torch.manual_seed(rank)
    model = MLP()
    before = flat(model)
    cls(model, init_sync=False)
    return torch.equal(before, flat(model))


@pytest.mark.ranks(2)
def test_init_sync_off(rank):
    assert assert_alike(rank, without_init_sync)


def set_static_graph(cls, rank):
    torch.manual_seed(0)
    model = MODELS["Repeated"]()
    ddp = cls(model)
    ddp._set_static_graph()
    results = []
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp(batch_of(model, rank, step))).backward()
        results.append(gradients(model))
    return results


@pytest.mark.ranks(2)
def test_all_as_torchs(rank):
    assert_alike(rank, groups_and_meshes)
    assert_alike(rank, set_static_graph)
