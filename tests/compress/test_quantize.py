"""Compare the quantization of blocks with its definition in float64."""

import math

import pytest
import torch

from gradcomp.compress import BucketSpec
from gradcomp.compress.quantized import QuantizedCompressor, QuantizedOptions
from gradcomp.cpu import quantize as plain
from gradcomp.layout import BlockLayout

BOTH = pytest.mark.parametrize("bits", [4, 8])
WIDE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def quantized(values, bits):
    """Return the blocks' codes, scales, dequantized values and errors."""
    lost = values.clone()
    codes = torch.empty(len(values), values.shape[1] * bits // 8, dtype=torch.uint8)
    scales = torch.empty(len(values), dtype=torch.bfloat16)
    plain.quantize(lost, codes=codes, scales=scales, bits=bits)
    out = torch.full_like(values, math.nan)
    plain.dequantize(codes, scales, out=out, bits=bits)
    return codes, scales, out, lost


def random_blocks(dtype, num_blocks=200, block_size=32):
    """Return blocks whose magnitudes reach from 1e-20 to 1e20."""
    magnitudes = torch.logspace(-20, 20, num_blocks, dtype=dtype)[:, None]
    return torch.randn(num_blocks, block_size, dtype=dtype) * magnitudes


@WIDE
@pytest.mark.parametrize("sign", [1, -1])
def test_no_code_of_8_bits_is_beyond_127(sign, dtype):
    """The largest values cover a binade. They include the scales that are rounded down most, by 2⁻⁸."""
    steps = 1 + torch.arange(2**12, dtype=dtype) / 2**12
    worst = torch.tensor([1 + 2**-8, 1 + 2**-8 - 2**-23], dtype=dtype)
    largest = 127 * torch.cat([steps, worst])[:, None]
    codes, _, _, _ = quantized(sign * largest * torch.tensor([1.0, 0.5], dtype=dtype), 8)
    assert (codes.view(torch.int8)[:, 0].int().abs() >= 126).all()
    assert (codes.view(torch.int8)[:, 0].int().sign() == sign).all()


def test_the_levels_are_lloyds():
    """Each level is the mean of a normal variable between its thresholds: Lloyd's condition."""
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)
    bounds = torch.tensor([-math.inf, *plain.THRESHOLDS, math.inf], dtype=torch.float64)
    density = torch.exp(-bounds.square() / 2) / math.sqrt(2 * math.pi)
    means = (density[:-1] - density[1:]) / (normal.cdf(bounds[1:]) - normal.cdf(bounds[:-1]))
    assert torch.allclose(means, plain.levels()[1:].double(), atol=2e-5)
    assert plain.levels()[[0, 8]].tolist() == [0.0, 0.0]


@WIDE
def test_4_bits_are_the_nearest_level_at_the_best_scale(dtype):
    values = random_blocks(dtype)
    _, scales, out, lost = quantized(values, 4)
    wide = values.double()
    levels = plain.levels().double()
    unit = wide / wide.square().mean(1, keepdim=True).sqrt()
    # fp16 rounds the quotient: near a threshold, either neighboring level is right.
    sides = (unit * (1 - 2**-11), unit * (1 + 2**-11))
    low, high = (levels[(side[:, :, None] - levels).abs().argmin(2)] for side in sides)
    nearest = torch.where((out.double() / scales.double()[:, None] - low).abs() < 1e-6, low, high)
    best = (wide * nearest).sum(1) / nearest.square().sum(1)
    assert torch.allclose(scales.double(), best, rtol=2**-8)
    assert torch.allclose(out.double(), scales.double()[:, None] * nearest, rtol=1e-6)
    assert ((wide - out.double() - lost.double()).abs() <= 1e-6 * wide.abs().amax(1, keepdim=True)).all()


@WIDE
def test_8_bits_are_the_nearest_multiple_of_the_scale(dtype):
    values = random_blocks(dtype)
    codes, scales, out, lost = quantized(values, 8)
    wide, scale = values.double(), scales.double()[:, None]
    assert torch.allclose(scales.double() * 127, wide.abs().amax(1), rtol=2**-8)
    # Two roundings lose something: the code's, up to half a scale, and the scale's, to 8 significant bits.
    assert ((wide - out.double()).abs() <= scale * (0.5 + 127 * 2**-8)).all()
    assert torch.equal(out.double(), (scale * codes.view(torch.int8).double()).to(dtype).double())
    assert ((wide - out.double() - lost.double()).abs() <= 1e-6 * scale).all()


@BOTH
@WIDE
def test_blocks_that_are_not_finite_become_nan_and_lose_nothing(bits, dtype):
    values = torch.randn(5, 16, dtype=dtype)
    values[1, 3], values[2, 0], values[3, 15] = math.inf, -math.inf, math.nan
    _, _, out, lost = quantized(values, bits)
    assert out[1:4].isnan().all()
    assert (lost[1:4] == 0).all()
    assert out[[0, 4]].isfinite().all()


@BOTH
def test_zeros_stay_zeros(bits):
    _, scales, out, lost = quantized(torch.zeros(3, 8), bits)
    assert not scales.any()
    assert not out.any()
    assert not lost.any()


@BOTH
@pytest.mark.parametrize("block_size", [2, 6, 128])
def test_blocks_do_not_depend_on_one_another(bits, block_size):
    """A block's result doesn't depend on the chunk that it is quantized in, either."""
    values = torch.randn(plain.CHUNK_NUMEL // block_size + 3, block_size)
    _, _, together, _ = quantized(values, bits)
    for row in (0, 1, len(values) - 4, len(values) - 1):
        _, _, alone, _ = quantized(values[row : row + 1], bits)
        assert torch.equal(alone[0], together[row])


@BOTH
@WIDE
def test_unusual_blocks_change_nothing_for_others(bits, dtype):
    """Each block has the result that it has alone, beside zeros, tiny, huge and non-finite values."""
    values = random_blocks(dtype, num_blocks=60)
    values[5:20:3] = 0.0
    values[6] = -0.0
    values[21] = 1e-45
    values[22] *= 1e-38
    values[23] = 1e38
    values[[24, 25, 26], 3] = torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype)
    together = quantized(values, bits)
    for row in range(len(values)):
        alone = quantized(values[row : row + 1], bits)
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one[0].nan_to_num(), other[row].nan_to_num())
    _, _, out, lost = together
    finite = values[values.isfinite().all(1)].double()
    kept = (out.double() + lost.double())[values.isfinite().all(1)]
    assert ((finite - kept).abs() <= 1e-6 * finite.abs().amax(1, keepdim=True)).all()


def test_dequantizing_may_add():
    codes, scales, out, _ = quantized(torch.randn(4, 8), 4)
    total = torch.ones(4, 8)
    plain.dequantize(codes, scales, out=total, bits=4, add=True)
    assert torch.allclose(total, out + 1, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("block_size", [2, 16])
def test_every_element_is_in_one_place(block_size, world_size):
    """Each tensor is quantized or exact, no block has elements of two, and padding fills the rest."""
    shapes = [(7, 5), (3,), (), (16, 16), (0, 4), (2, 2), (4, 4), (33,)]
    layout = BlockLayout(shapes, block_size, world_size)
    blocks = torch.zeros(world_size * layout.shard_numel, dtype=torch.int64)
    exact = torch.zeros(world_size * layout.exact_numel, dtype=torch.int64)
    bucket = torch.zeros(layout.numel, dtype=torch.int64)
    for parts, places in ((layout.quantized, blocks), (layout.exact, exact)):
        for index, part in enumerate(parts):
            assert places is exact or part.stored.start % block_size == 0
            assert not places[part.stored].any()
            places[part.stored] = index + 1
            bucket[part.in_bucket] += 1
    assert (bucket == 1).all()
    for row in blocks.view(-1, block_size):
        assert len(set(row.tolist()) - {0}) <= 1
    for padding in layout.padding:
        blocks[padding] -= 1
    assert (blocks != 0).all()
    assert len(layout.quantized) == sum(len(s) > 1 and math.prod(s) >= block_size for s in shapes)


def test_bytes_per_rank_do_not_grow_with_the_number_of_ranks():
    shapes = [(1024, 1024), (1024,)]
    layouts = [BlockLayout(shapes, 128, world_size) for world_size in (1, 2, 64)]
    sizes = [layout.world_size * layout.sections(4, 4)[1] for layout in layouts]
    assert max(sizes) <= 1.01 * min(sizes)
    assert sizes[0] == 8192 * 66 + 4096


def test_taking_back_changes_one_tensors_error():
    spec = BucketSpec(((4, 8), (3,), (6, 8)), torch.float32, torch.device("cpu"), 2, 0)
    compressor, values = QuantizedCompressor(spec, QuantizedOptions(4, 16)), torch.randn(48)
    compressor.add_to_error(35, values)
    compressor.add_to_error(32, torch.ones(3))  # sent exactly, so there is no error
    assert torch.equal(compressor.state()["error"], torch.cat([torch.zeros(35), values]))
