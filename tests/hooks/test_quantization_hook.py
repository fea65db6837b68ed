"""The quantized all-reduce: the kit, its options, a group of one, and a last bucket of another hook."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradcomp
from gradcomp.hooks import default_hooks
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.hooks.powersgd_oracle import Bucket
from tests.ranks import of_all_ranks

SHAPES = [(40, 30), (17,), (8, 3, 5), (1,), (3, 2)]
BITS = pytest.mark.parametrize("bits", [4, 8])


pytestmark = pytest.mark.usefixtures("plain_torch")


def state_of(bits, **options):
    return QuantizationState(bits=bits, block_size=16, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "bits is 3"),
        ({"bits": True}, "bits is True"),
        ({"block_size": 7}, "block_size is 7"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 4098}, "block_size is 4098, but must be an even number of elements from 2 to 4096"),
        ({"use_error_feedback": 1}, "use_error_feedback is 1"),
        (
            {"uncompressed_dtype": torch.float32},
            "uncompressed_dtype is torch.float32, but must be None, torch",
        ),
        ({"start_iter": -1}, "start_iter is -1"),
    ],
    ids=str,
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        QuantizationState(**options)


def test_another_state_is_refused():
    with pytest.raises(TypeError, match="takes a gradcomp QuantizationState"):
        quantization_hook(None, Bucket(torch.zeros(4), [(4,)]))


def test_no_group_is_left(group_of_one):
    """A bucket without elements, or with vectors alone, is averaged as well."""
    state = QuantizationState()
    assert quantization_hook(state, Bucket(torch.zeros(0), [(0,)])).wait().numel() == 0
    vector = torch.randn(5)
    assert torch.equal(quantization_hook(state, Bucket(vector.clone(), [(5,)])).wait(), vector)
    assert dist.is_initialized()


def last_bucket_exactly(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    hook = default_hooks.allreduce_hook if bucket.is_last() else quantization_hook
    return hook(None if bucket.is_last() else state, bucket)


@pytest.mark.ranks(2)
def test_the_last_bucket_may_be_another_hooks(rank):
    """Then only the end of backward completes the other buckets' futures."""
    found = []
    for cls in (nn.parallel.DistributedDataParallel, gradcomp.DistributedDataParallel):
        torch.manual_seed(0)
        model = cls(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), bucket_cap_mb=0.01)
        model.register_comm_hook(state_of(8), last_bucket_exactly)
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            model.zero_grad()
            model(torch.randn(8, 64)).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for by_class in zip(*of_all_ranks(found), strict=True):
        for one, other in zip(*by_class, strict=True):
            assert torch.equal(one, other)
            assert one.any()
