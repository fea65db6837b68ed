"""Test sums of shards in codes on simulated ranks, flat and hierarchical, against float64."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradcomp.comm.bucket import ShardBucket
from gradcomp.compress import BucketSpec
from gradcomp.compress.quantized import QuantizedCompressor, QuantizedOptions
from gradcomp.hooks.quantization_hooks import QuantizationState
from gradcomp.layout import ShardLayout
from gradcomp.testing import run_ranks
from tests.depth import mixed
from tests.kept import error_in
from tests.reducer.models import on_device, run_cases
from tests.tolerances import QUANTIZED_IDENTITY, UNIT_ROUNDOFF

# One row, one column, fewer rows than ranks, no rows, vectors, rows that don't fill all shards.
SHAPES = [(7, 13), (1, 40), (3,), (64, 1), (2, 3, 5), (0, 4), (33, 9), (10,)]


def in_rows(whole, layout):
    """Return whole tensors' elements in the order of a ShardBucket's buffer, padded with zeros."""
    buffer = whole.new_zeros(layout.world_size, layout.row_numel)
    for row, in_tensors, in_row in layout.shards():
        buffer[row, in_row] = whole[in_tensors]
    return buffer.view(-1)


def of_rows(rows, layout):
    """Return the elements of whole tensors from all ranks' shards: the reverse of in_rows."""
    whole = rows[0].new_zeros(layout.numel)
    for row, in_tensors, in_row in layout.shards():
        whole[in_tensors] = rows[row][in_row]
    return whole


def gradients(rank, step, layout, dtype):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(layout.numel, generator=generator, dtype=torch.float64).to(dtype)


def steps(rank, group, dtype, num_steps, options, place=torch.Tensor.clone):
    """Return this rank's shards of every step, and its state at the end."""
    layout = ShardLayout(SHAPES, group.size())
    state = QuantizationState(group, block_size=16, **options)
    parameters = [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in SHAPES]
    state.number_parameters((str(index), each) for index, each in enumerate(parameters))
    shards = []
    for step in range(num_steps):
        shard = place(torch.full((layout.row_numel,), math.nan, dtype=dtype))
        buffer = place(in_rows(gradients(rank, step, layout, dtype), layout))
        state.average("compress_reduce_scatter", ShardBucket(0, buffer, parameters, shard)).wait()
        state.end_step()
        shards.append(shard)
    return shards, state.state_dict()


def sums_of(ranks, step, layout):
    return of_rows([shards[step].double() for shards, _ in ranks], layout)


def exact_sum(world_size, step, layout, dtype):
    return sum(gradients(rank, step, layout, dtype).double() for rank in range(world_size))


FORMS = [(2, 1), (3, 1), (5, 1), (6, 2), (6, 3)]  # ranks, ranks per node
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize(("form", "dtype", "bits"), mixed(FORMS, DTYPES, [4, 8], together=2), ids=str)
def test_nothing_is_lost(plain_torch, form, dtype, bits):
    world_size, ranks_per_node = form
    options = {"bits": bits, "ranks_per_node": ranks_per_node}
    assert_nothing_is_lost(run_ranks(steps, world_size, dtype, 4, options), dtype)


def steps_on_device(rank, bits):
    return steps(rank, dist.group.WORLD, torch.float32, 4, {"bits": bits, "start_iter": 1}, on_device)


def test_nothing_is_lost_on_the_ranks_devices(run_group):
    for ranks in zip(*run_group(run_cases, steps_on_device, [(4,), (8,)]), strict=True):
        assert_nothing_is_lost(ranks, torch.float32)


def assert_nothing_is_lost(ranks, dtype):
    """Σ sums + Σ errors = Σ of all gradients."""
    world_size = len(ranks)
    layout = ShardLayout(SHAPES, world_size)
    sums, expected = 0.0, 0.0
    rounding = 0.0  # of the sums to the bucket's dtype
    for step in range(4):
        of_step = sums_of(ranks, step, layout)
        sums, expected = sums + of_step, expected + exact_sum(world_size, step, layout, dtype)
        rounding += UNIT_ROUNDOFF[dtype] * of_step.norm()
    errors = sum(error_in(state_dict).double() for _, state_dict in ranks)
    # One rank sends nothing, so it loses nothing.
    assert (errors.norm() > 0.001 * expected.norm()) == (world_size > 1)
    assert (sums + errors - expected).norm() <= QUANTIZED_IDENTITY[dtype] * expected.norm() + rounding


@pytest.mark.parametrize(("world_size", "ranks_per_node"), FORMS)
@pytest.mark.parametrize("options", [{"bits": 16}, {"bits": 8, "use_error_feedback": False}], ids=str)
def test_without_errors(plain_torch, world_size, ranks_per_node, options):
    layout = ShardLayout(SHAPES, world_size)
    options = {**options, "ranks_per_node": ranks_per_node}
    ranks = run_ranks(steps, world_size, torch.float32, 2, options)
    relative = 2.0**-8 if options["bits"] == 16 else 0.01
    for step in range(2):
        expected = exact_sum(world_size, step, layout, torch.float32)
        assert 0 < (sums_of(ranks, step, layout) - expected).norm() <= relative * expected.norm()
    assert all(error_in(each) is None for _, each in ranks)


@pytest.mark.parametrize("world_size", [2, 3])
def test_plain_steps_are_exact(plain_torch, world_size):
    layout = ShardLayout(SHAPES, world_size)
    ranks = run_ranks(steps, world_size, torch.float32, 2, {"start_iter": 2})
    for step in range(2):
        expected = exact_sum(world_size, step, layout, torch.float32)
        assert (sums_of(ranks, step, layout) - expected).abs().max() <= 1e-5
    assert all(state_dict["iter"] == 2 for _, state_dict in ranks)


def two_nodes_then_none(rank, group):
    """Return this rank's errors with nodes, and after a flat step of zeros with the shards that it brings."""
    layout = ShardLayout(SHAPES, group.size())
    state = QuantizationState(group, block_size=16, ranks_per_node=2)
    parameters = [nn.Parameter(torch.empty(shape, device="meta")) for shape in SHAPES]
    results = []
    for number, ranks_per_node in enumerate((2, 1, 2)):
        state.ranks_per_node = ranks_per_node
        whole = gradients(rank, number, layout, torch.float32) if number == 0 else torch.zeros(layout.numel)
        shard = torch.empty(layout.row_numel)
        bucket = ShardBucket(0, in_rows(whole, layout), parameters, shard)
        state.average("compress_reduce_scatter", bucket).wait()
        state.end_step()
        results.append((shard, error_in(state).double()))
    return results


def test_other_nodes_keep_the_errors(plain_torch):
    layout = ShardLayout(SHAPES, 4)
    ranks = run_ranks(two_nodes_then_none, 4)
    totals = [sum(results[step][1] for results in ranks) for step in range(3)]
    assert totals[0].any()
    for step in (1, 2):
        sums = of_rows([results[step][0].double() for results in ranks], layout)
        assert sums.any()
        assert (sums + totals[step] - totals[step - 1]).abs().max() <= 1e-5


def test_the_rows_of_tensors():
    """Compare with torch.chunk, as FSDP2 cuts tensors."""
    for world_size in (1, 2, 3, 4, 7):
        layout = ShardLayout(SHAPES, world_size)
        whole = torch.arange(1.0, layout.numel + 1)
        rows = in_rows(whole, layout).view(world_size, -1)
        parts = whole.split([math.prod(shape) for shape in SHAPES])
        tensors = [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]
        for row in range(world_size):
            expected = []
            for tensor, (length, *_) in zip(tensors, layout.shard_shapes, strict=True):
                shard = tensor[row * length : (row + 1) * length]
                padding = torch.zeros(length - len(shard), *tensor.shape[1:])
                expected.append(torch.cat([shard, padding]).flatten())
            assert torch.equal(rows[row], torch.cat(expected))
        assert torch.equal(of_rows(list(rows), layout), whole)


def sums_with(rank, group, options_of_steps):
    """Return the sums of two equal layers in steps with these options, which may change."""
    state = QuantizationState(group, **options_of_steps[0])
    layers = [nn.Parameter(torch.empty(64, 64, device="meta")) for _ in range(2)]
    state.number_parameters((str(index), each) for index, each in enumerate(layers))
    generator, shards = torch.Generator().manual_seed(rank), []
    for options in options_of_steps:
        state.change(replace(state.settings, options=replace(state.options, bits=options["bits"])))
        for index, layer in enumerate(layers):
            gradient = torch.randn(64 * 64, generator=generator)
            shards.append(torch.zeros(64 * 64 // group.size()))
            bucket = ShardBucket(index, gradient, [layer], shards[-1])
            state.average("compress_reduce_scatter", bucket).wait()
        state.end_step()
    return shards


def test_other_bits_take_another_plan(plain_torch):
    """Of equal layers, two buckets take one plan in turns, but not those of other options."""
    alike = {"use_error_feedback": False, "uncompressed_dtype": torch.bfloat16}
    eight, sixteen = ({"bits": bits, **alike} for bits in (8, 16))
    changed, always = (run_ranks(sums_with, 2, [first, first, eight, eight])[0] for first in (sixteen, eight))
    for got, expected in zip(changed[4:], always[4:], strict=True):
        assert torch.equal(got, expected)
    assert not torch.equal(changed[0], always[0])


@pytest.mark.parametrize(("bits", "ranks_per_node"), [(8, 1), (8, 4), (4, 1), (4, 4)])
def test_bytes_and_errors_by_hand(bits, ranks_per_node):
    """A rank sends a payload per shard; a node, one per node. It keeps errors of what it quantizes."""
    shapes = ((1001, 512), (1001,))
    matrix, vector = 126 * 512, 126  # elements in one of 8 shards
    # Codes, a scale of 2 bytes per block, and the vector's elements; sections begin on 16 bytes.
    payload = matrix * bits // 8 + 2 * matrix // 128 + 4 * vector
    bucket = BucketSpec(shapes, torch.float32, torch.device("meta"), 8, 0, ranks_per_node, is_shard=True)
    compressor = QuantizedCompressor(bucket, QuantizedOptions(bits))
    assert 0 <= 4 * compressor.sent_numel - 8 * payload <= 8 * 3 * 16
    assert compressor._sum.error.nbytes == 4 * matrix * 8 // ranks_per_node
