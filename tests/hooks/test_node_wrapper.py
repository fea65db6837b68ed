"""Test node_wrapper: exact sums within nodes, the wrapped hook between nodes."""

import pytest
import torch
from torch import nn

from gradcomp import testing
from gradcomp.comm.nodes import nodes_of
from gradcomp.hooks import default_hooks
from gradcomp.hooks.default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook, node_wrapper
from gradcomp.hooks.quantization_hooks import quantization_pertensor_hook
from tests.depth import everyday
from tests.hooks.powersgd_oracle import Bucket, random_gradient, relative

SHAPES = [(13, 7), (5,), (1,)]

pytestmark = pytest.mark.usefixtures("plain_torch")


def averaged(rank, group, hook, ranks_per_node, dtype):
    gradient = random_gradient(SHAPES, rank, 0, dtype)
    bucket = Bucket(gradient.clone(), SHAPES)
    output = node_wrapper(hook, ranks_per_node)(group, bucket).wait()
    assert output.data_ptr() == bucket.buffer().data_ptr()
    return gradient, output


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(4, 2), (6, 3), (6, 2), (3, 3), (2, 1)])
@pytest.mark.parametrize(
    ("hook", "dtype", "bound"),
    [
        (allreduce_hook, torch.float32, 1e-6),
        (allreduce_hook, torch.float64, 1e-14),
        (allreduce_hook, torch.bfloat16, 2**-7),
        (fp16_compress_hook, torch.float32, 2**-10),
        (bf16_compress_hook, torch.float32, 2**-7),
        (quantization_pertensor_hook, torch.float32, 0.02),
    ],
)
def test_the_mean(world_size, ranks_per_node, hook, dtype, bound):
    results = testing.run_ranks(averaged, world_size, hook, ranks_per_node, dtype)
    mean = torch.stack([gradient.double() for gradient, _ in results]).mean(0)
    for _, output in results:
        assert output.dtype == dtype
        assert torch.equal(output, results[0][1])
        assert relative(output, mean) <= bound


def test_every_property_of_the_kit():
    hook = node_wrapper(allreduce_hook, 2)
    report = testing.check_hook(hook, world_size=4, max_examples=everyday(2, 4))
    report.raise_if_failed()


def sent_between_nodes(rank, group):
    bucket = Bucket(random_gradient([(400, 30)], rank, 0), [(400, 30)])
    node_wrapper(allreduce_hook, 2)(group, bucket).wait()
    return nodes_of(group, 2).between.sent_bytes


def test_a_rank_sends_its_part_between_nodes():
    assert testing.run_ranks(sent_between_nodes, 4) == [4 * 400 * 30 / 2] * 4


def trained(rank, hook):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 1))
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    ddp.register_comm_hook(None, node_wrapper(hook, 2) if hook else allreduce_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    x = torch.randn(32, 20, generator=torch.Generator().manual_seed(rank))
    for _ in range(8):
        optimizer.zero_grad()
        (ddp(x) - x[:, :4].sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    del ddp
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def test_it_trains_on_torchs_ddp(run_ranks):
    plain = run_ranks(trained, 4, None)
    for hook, bound in ((allreduce_hook, 1e-5), (bf16_compress_hook, 0.02)):
        results = run_ranks(trained, 4, hook)
        assert all(torch.equal(each, results[0]) for each in results)
        assert relative(results[0], plain[0].double()) < bound


def test_arguments_that_make_no_sense():
    with pytest.raises(TypeError, match="node_wrapper wraps a communication hook, got 4"):
        node_wrapper(4)
    with pytest.raises(ValueError, match="ranks_per_node is 0; it must be 'auto' or a whole number"):
        node_wrapper(allreduce_hook, 0)
    assert default_hooks.node_wrapper is node_wrapper
