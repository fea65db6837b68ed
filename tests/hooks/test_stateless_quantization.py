"""The 8-bit hooks under torch's names on real ranks: bounds, replicas, both DDPs, and kept plans."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as torch_quantization

from gradcomp import ops
from gradcomp.comm.bucket import GradBucket
from gradcomp.hooks import quantization_hooks
from gradcomp.hooks.quantization_hooks import (
    LARGEST_BLOCK,
    _largest_blocks,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from gradcomp.testing import run_ranks as run_simulated_ranks
from tests.depth import mixed
from tests.hooks.powersgd_oracle import Bucket, random_gradient
from tests.ranks import simulate
from tests.training import Averaged, Layers, drawn, parameters_of, train

SHAPES = [(120, 70), (17,), (8, 3, 5), (1,)]
HOOKS = {"pertensor": quantization_pertensor_hook, "perchannel": quantization_perchannel_hook}
BLOCKS = {"pertensor": _largest_blocks, "perchannel": lambda *_: 512}
EACH = pytest.mark.parametrize("name", HOOKS)


pytestmark = pytest.mark.usefixtures("plain_torch")


def bound(gradients, block_size):
    """Return the largest error that 8 bits allow, by element.

    A rank's code is off by up to half a scale. The scale is the block's largest value / 127, rounded to bf16.
    Beside a block of zeros the scale is rounded once more, after the codes are chosen. This adds 2⁻⁸ of the
    value. The owner of a shard rounds the mean in the same way.
    """
    stacked = torch.stack(gradients).double().abs()
    numel = stacked.shape[1]
    padded = nn.functional.pad(stacked, (0, -numel % block_size)).view(len(stacked), -1, block_size)
    half_scale = padded.amax(2) / 254 * (1 + 2**-8)
    senders = half_scale.repeat_interleave(block_size, 1)[:, :numel] + stacked * 2**-8
    return senders.mean(0) * (2 + 1 / 64)


def one_step(rank, name, dtype, shapes):
    gradient = random_gradient(shapes, rank, 0, dtype)
    return gradient, HOOKS[name](None, Bucket(gradient.clone(), shapes)).wait()


@EACH
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_every_element_is_within_two_roundings_of_the_mean(name, world_size, dtype):
    results = simulate(one_step, world_size, name, dtype, SHAPES)
    gradients = [gradient for gradient, _ in results]
    mean = torch.stack(gradients).double().mean(0)
    allowed = bound(gradients, BLOCKS[name](mean.numel(), world_size)) + mean.abs() * torch.finfo(dtype).eps
    for _, output in results:
        assert output.dtype == dtype
        assert torch.equal(output, results[0][1])
        assert ((output.double() - mean).abs() <= allowed).all()


@EACH
@pytest.mark.parametrize("shapes", [[(0,)], [(1,)], [(3,)]], ids=str)
def test_a_bucket_smaller_than_a_block_is_exact(name, shapes):
    (gradient, output), (other, _) = simulate(one_step, 2, name, torch.float32, shapes)
    assert torch.equal(output, (gradient + other) / 2)


def train_with(rank, way, hook):
    """Train in several buckets, with a layer that each rank uses in other steps.

    Returns the parameters, the last loss, the plans' bytes after every step, and the gradients'.
    """
    torch.manual_seed(0)
    options, kept = {"bucket_cap_mb": 0.02, "find_unused_parameters": True}, []
    model, data = Averaged(Layers(*[64] * 6), way, hook, **options), drawn(64, 64, rank=rank)

    def loss(call, step):
        return (call(data, () if step % 2 == rank else (4,)) - data.sin()).square().mean()

    def count(step):
        plans = quantization_hooks._all_reduces.by_parameter.values()
        plans = [each.codes for by_name in plans for _, each in by_name.values()]
        kept.append(sum(plan.payload.nbytes + plan.received.nbytes for plan in plans))

    losses = train(model, loss, range(8), 0.5, before_update=count)
    return parameters_of(model), losses[-1], kept, sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(("name", "way"), mixed(list(HOOKS), ["torch", "gradcomp"]))
def test_several_buckets_and_unused_layers_train_as_without_a_hook(run_ranks, name, way):
    (one, loss, kept, gradients), (other, *_) = run_ranks(train_with, 2, way, HOOKS[name])
    (_, exact, *_), _ = run_ranks(train_with, 2, way, None)
    assert torch.equal(one, other)
    assert abs(loss - exact) < 0.01 * exact
    # This rank's codes, and those of both, with scales. The plans of the first step's buckets are dropped.
    assert 0.75 * gradients <= kept[-1] <= 0.9 * gradients
    assert kept[-1] == kept[2]


def test_plans_leave_with_their_parameters(group_of_one):
    before = len(quantization_hooks._all_reduces.by_parameter)
    bucket = Bucket(torch.randn(100, 100).flatten(), [(100, 100)])
    quantization_pertensor_hook(None, bucket).wait()
    assert len(quantization_hooks._all_reduces.by_parameter) == before + 1
    del bucket
    assert len(quantization_hooks._all_reduces.by_parameter) == before


def test_a_plan_is_made_once_and_again_for_another_dtype(group_of_one, monkeypatch):
    made = []
    encoder = ops.encoder

    def counting(*arguments, **options):
        made.append(arguments[1])
        return encoder(*arguments, **options)

    monkeypatch.setattr(ops, "encoder", counting)
    parameter = nn.Parameter(torch.zeros(64, 64))
    for dtype in (torch.float32, torch.float32, torch.float64, torch.float64):
        buffer = torch.randn(64 * 64, dtype=dtype)
        quantization_perchannel_hook(None, GradBucket(0, buffer, [parameter], True)).wait()
    assert made == [torch.float32, torch.float64]


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 1000, 4097, 6_553_600, 1_000_003])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 100])
def test_pertensor_blocks_are_long_and_leave_little_padding(numel, world_size):
    block = _largest_blocks(numel, world_size)
    assert block % 16 == 0
    assert block <= min(LARGEST_BLOCK, max(16, numel))  # smaller buckets are sent exactly
    num_blocks = -(-numel // block)
    padded = -(-num_blocks // world_size) * world_size * block
    assert padded <= 1.02 * numel + 16 * world_size
    # Scales take less than 0.4 % of the codes' bytes, unless shards are short.
    assert block > LARGEST_BLOCK / 2 or num_blocks <= max(2, world_size)


def with_torchs_arithmetic(gradients):
    """Return the mean of the ranks' gradients, quantized like torch's quantization_pertensor_hook."""
    decoded = []
    for gradient in gradients:
        observer = torch.ao.quantization.MinMaxObserver()
        observer(gradient)
        scale, zero = observer.calculate_qparams()
        codes = torch_quantization._quantize_per_tensor_backend(gradient, scale, zero)
        decoded.append(torch_quantization._dequantize_per_tensor_backend(codes, scale, zero))
    return torch.stack(decoded).double().mean(0)


@pytest.mark.parametrize("scales", [[1.0], [0.1, 1.0, 10.0]], ids=["alike", "unlike"])
def test_pertensor_is_as_accurate_as_torchs(scales):
    """gradcomp's hook rounds twice, but in blocks.

    It is as accurate as torch's on normal gradients, and more accurate on layers of unlike magnitudes.
    """
    shapes = [(1024, 1024)] * len(scales)
    factor = torch.tensor(scales).repeat_interleave(1024**2)
    gradients = [
        torch.randn(len(factor), generator=torch.Generator().manual_seed(r)) * factor for r in (0, 1)
    ]

    def average(rank, group):
        return quantization_pertensor_hook(group, Bucket(gradients[rank].clone(), shapes)).wait()

    ours = run_simulated_ranks(average, 2)[0]
    mean = torch.stack(gradients).double().mean(0)
    theirs = with_torchs_arithmetic(gradients)
    assert (ours - mean).norm() < (1.05 if len(scales) == 1 else 0.7) * (theirs - mean).norm()
