"""Test gradcomp.DistributedDataParallel with code from scripts that were written for torch's."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gradcomp
from gradcomp.hooks import default_hooks
from tests.parallel.beside_torch import CLASSES, TorchDDP, assert_alike, batch_of, gradients
from tests.ranks import of_all_ranks
from tests.reducer.models import MLP, STATIC, UNUSED, ConvNet, loss_of

needs_new_torch = pytest.mark.skipif(
    not hasattr(TorchDDP, "broadcast_buffers"), reason="this torch's wrapper has no forward_sync_buffers"
)


def attributes_of(cls, rank):
    """Return attributes of several wrappers, and of their copies after broadcast_buffers was set.

    A wrapper's: (has the device_mesh, forward_sync_buffers, broadcast_buffers).
    A copy's: (has a device_mesh, forward_sync_buffers).
    """
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    results = []
    for options in (
        {},
        {"device_mesh": mesh},
        {"broadcast_buffers": False},
        {"forward_sync_buffers": False},
        {"forward_sync_buffers": True, "broadcast_buffers": False},
    ):
        ddp = cls(ConvNet(), **options)
        results.append(
            (getattr(ddp, "device_mesh", None) is mesh, ddp.forward_sync_buffers, ddp.broadcast_buffers)
        )
        if "device_mesh" not in options:
            other = copy.deepcopy(ddp)
            other.broadcast_buffers = not other.broadcast_buffers
            results.append((hasattr(other, "device_mesh"), other.forward_sync_buffers))
    return results


@needs_new_torch
@pytest.mark.ranks(1)
def test_attributes(rank):
    assert_alike(rank, attributes_of)


def warnings_of(cls, rank):
    results = []
    for options in (
        {},
        {"broadcast_buffers": True},
        {"broadcast_buffers": False, "forward_sync_buffers": True},
        {"forward_sync_buffers": False},
        {"check_reduction": True},
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cls(MLP(), **options)
        results.append([(each.category, str(each.message), each.filename == __file__) for each in caught])
    return results


@needs_new_torch
@pytest.mark.ranks(1)
def test_warnings(rank):
    assert [len(each) for each in assert_alike(rank, warnings_of)] == [0, 1, 1, 0, 1]


@pytest.mark.ranks(2)
def test_a_profiler_shows_torchs_operators_from_the_first_step_on(rank):
    """Count how often each ran in steps of one bucket, by class: without a hook, and with one."""
    shown = ("DistributedDataParallel.forward", "c10d::allreduce_", "gloo:all_reduce")
    for (name, cls), hook in itertools.product(CLASSES.items(), (None, default_hooks.fp16_compress_hook)):
        ddp = cls(ConvNet())
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        for step in range(3):
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                loss_of(ddp(batch_of(ddp.module, rank, step))).backward()
            counts = {event.key: event.count for event in seen.key_averages()}
            assert [counts.get(each, 0) for each in shown] == [1, 1, 1], (name, hook, step)
            assert counts["c10d::broadcast_"] >= 1, (name, hook, step)
            assert hook is not None or "c10d::send" not in counts, (name, step)


@pytest.mark.ranks(1)
def test_a_profiler_shows_the_search_for_unused_parameters_as_torchs(rank):
    """Count how often the search for unused parameters is recorded, by options, profiler and class."""
    counts = {}
    cases = {"plain": {}, "unused": UNUSED, "static": STATIC, "both": UNUSED | STATIC}
    for (key, cls), (name, options) in itertools.product(CLASSES.items(), cases.items()):
        ddp = cls(MLP(), **options)
        for step in range(3):
            loss_of(ddp(batch_of(ddp.module, rank, step))).backward()
        for profiler in (torch.autograd.profiler.profile(), profile(activities=[ProfilerActivity.CPU])):
            with profiler as seen:
                loss_of(ddp(batch_of(ddp.module, rank, 3))).backward()
            ranges = [each for each in seen.key_averages() if each.key.endswith("search_unused_parameters")]
            counts.setdefault((name, type(profiler).__module__), {})[key] = [
                (each.key, each.count) for each in ranges
            ]
    assert len(counts) == 8
    for (name, profiler), of_class in counts.items():
        assert of_class["gradcomp"] == of_class["torch"], (name, profiler)
        assert len(of_class["torch"]) == (name == "unused")


@pytest.mark.ranks(1)
def test_near_misses_say_what_to_pass(rank):
    dtensor = dist.tensor.distribute_tensor
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    model = MLP()
    with pytest.raises(TypeError, match="takes a module, got generator: pass the model itself"):
        gradcomp.DistributedDataParallel(model.parameters())
    ddp = gradcomp.DistributedDataParallel(model)
    with pytest.raises(TypeError, match=r"must be callable\. .*: state and hook are swapped"):
        ddp.register_comm_hook(default_hooks.allreduce_hook, None)
    model[2].weight = nn.Parameter(dtensor(model[2].weight.detach(), mesh, [dist.tensor.Shard(0)]))
    for construct in (
        gradcomp.DistributedDataParallel,
        lambda model: gradcomp.Reducer(model.named_parameters()),
    ):
        with pytest.raises(
            TypeError, match=r"parameter 2\.weight is a DTensor. Models of FSDP2 .* tensor parallel"
        ):
            construct(model)


@pytest.mark.ranks(2)
def test_arguments_of_newer_versions(rank):
    """Run the loop of a newer torch, which finalizes each backward itself."""
    torch.manual_seed(0)
    model = MLP()
    ddp = gradcomp.DistributedDataParallel(model, lazy_bucket_allocation=True)
    assert not ddp.should_finalize_after_backward
    ddp.require_manual_backward_finalization = True
    loss = loss_of(ddp(batch_of(model, rank, 0)))
    assert ddp.should_finalize_after_backward
    loss.backward()
    ddp.finalize_backward()
    first, second = of_all_ranks(gradients(model))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
