"""Test that one rank's tensors of all shapes, dtypes and strides are broadcast, in few operators."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradcomp
from gradcomp.reducer import RepeatedBroadcast, broadcast, broadcast_coalesced
from tests.reducer.models import on_device, run_cases

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex128, torch.bfloat16, torch.uint8)


def assorted_tensors(seed):
    """Return 0-dim, empty, prime-length, non-contiguous and channels-last tensors, in alternating dtypes."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape):
        return torch.randn(*shape, generator=generator) * 9

    made = []
    for dtype in DTYPES:
        flat = [values(()), values(0), values(7), values(3, 0), values(2, 3)]
        flat += [values(4, 5).t(), values(10)[::3], values(2, 3, 4, 5).to(memory_format=torch.channels_last)]
        made.append([each.abs().to(dtype) for each in flat])
    # Neighbors in the list have different dtypes.
    return [each for several in zip(*made, strict=True) for each in several]


def broadcast_all(rank, chunk_bytes):
    """Broadcast the last rank's: twice with one object, once with the function, fewer with the object."""
    broadcast.BROADCAST_BYTES = chunk_bytes
    repeated, last = RepeatedBroadcast(), dist.get_world_size() - 1
    results = []
    for seed, copy_all in ((0, repeated), (10, repeated), (20, broadcast_coalesced)):
        tensors = [on_device(each) for each in assorted_tensors(seed + rank)]
        strides = [each.stride() for each in tensors]
        copy_all(tensors, last, dist.group.WORLD)
        assert [each.stride() for each in tensors] == strides
        results.append(tensors)
    fewer = [on_device(each) for each in assorted_tensors(30 + rank)[::2]]  # the object hasn't seen this list
    repeated(fewer, last, dist.group.WORLD)
    return [*results, fewer]


def test_assorted_tensors(run_group):
    for broadcasts in zip(*run_group(run_cases, broadcast_all, [(250 << 20,), (100,), (1,)]), strict=True):
        for index, seed in enumerate((0, 10, 20, 30)):
            expected = assorted_tensors(seed + len(broadcasts) - 1)[:: 2 if seed == 30 else 1]
            for results in broadcasts:
                for got, want in zip(results[index], expected, strict=True):
                    assert got.dtype == want.dtype
                    assert torch.equal(got, want)


def refuse(rank):
    """Broadcast a tensor after another one, of which nothing may be sent."""
    broadcast.BROADCAST_BYTES = 1
    expanded, sparse = torch.ones(1).expand(4), torch.eye(3).to_sparse()
    for tensor, message in ((expanded, r"\[4\] in .* expanded, with strides \[0\]"), (sparse, "sparse_coo")):
        for copy_all in (broadcast_coalesced, RepeatedBroadcast()):
            first = torch.full((2,), float(rank))
            with pytest.raises(ValueError, match=message):
                copy_all([first, tensor], 0, dist.group.WORLD)
            assert first.eq(rank).all()


def test_sparse_and_expanded_tensors_are_refused_on_every_rank(run_group):
    run_group(refuse)


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class ManyBuffers(nn.Module):
    """This model has 159 buffers of two dtypes, like ResNet-50."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        for index in range(53):
            self.register_buffer(f"mean_{index}", torch.zeros(3))
            self.register_buffer(f"variance_{index}", torch.ones(3))
            self.register_buffer(f"count_{index}", torch.tensor(0))

    def forward(self, x):
        return self.weight * x


@pytest.mark.ranks(2)
def test_buffers_take_a_few_operators_per_forward(rank):
    model = ManyBuffers()
    ddp = gradcomp.DistributedDataParallel(model)
    ddp(torch.ones(3))
    with torch.no_grad():
        for each in model.buffers():
            each.add_(rank + 1)
    versions = [each._version for each in model.buffers()]
    x = torch.ones(3)
    with Operators() as seen:
        ddp(x)
    # An earlier forward may need them in backward.
    assert [each._version for each in model.buffers()] == versions
    names = [name for name in seen.names if not name.startswith("_record_function")]  # a profiler's label
    assert sorted(names) == ["_foreach_copy_.default"] * 2 + ["broadcast_.default", "mul.Tensor"]
    assert [each.tolist() for each in model.buffers()] == [[1.0] * 3, [2.0] * 3, 1] * 53
    assert len(list(copy.deepcopy(ddp).buffers())) == 159
