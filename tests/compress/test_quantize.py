"""Compare the quantization of blocks with its definition in float64."""

import math

import pytest
import torch

from gradcomp.compress import BucketSpec
from gradcomp.compress.quantized import QuantizedCompressor, QuantizedOptions
from gradcomp.cpu import quantize as plain
from gradcomp.layout import BlockLayout
from tests.kernels.quantize.ranks import padding_of

BOTH = pytest.mark.parametrize("bits", [4, 8])
WIDE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def quantized(values, bits, top=None):
    """Return the blocks' codes, scales, dequantized values and errors."""
    lost, top = values.clone(), torch.finfo(values.dtype).max if top is None else top
    codes = torch.empty(len(values), values.shape[1] * bits // 8, dtype=torch.uint8)
    scales = torch.empty(len(values), dtype=torch.bfloat16)
    plain.quantize(lost, codes=codes, scales=scales, bits=bits, top=top)
    out = torch.full_like(values, math.nan)
    plain.dequantize(codes, scales, out=out, bits=bits, top=top)
    return codes, scales, out, lost


def random_blocks(dtype, num_blocks=200, block_size=32):
    """Return blocks whose magnitudes reach from 1e-20 to 1e20."""
    magnitudes = torch.logspace(-20, 20, num_blocks, dtype=dtype)[:, None]
    return torch.randn(num_blocks, block_size, dtype=dtype) * magnitudes


@BOTH
@WIDE
@pytest.mark.parametrize("magnitude", [1e-44, 1e-40, 1e-38, 1e-20, 1.0, 1e20, 1e37])
def test_no_element_is_off_by_more_than_half_a_step(bits, dtype, magnitude):
    """Half of the largest value / L, and the scale's rounding up, by 2⁻⁷ of it, or by bf16's least number."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(500, 16, generator=generator, dtype=torch.float64).mul_(magnitude).to(dtype)
    # Largest values that cover a binade densely, so that scales are rounded by all of 2⁻⁷.
    values[:, 0] = torch.linspace(4, 8, 500, dtype=torch.float64).mul_(magnitude).to(dtype)
    values[:, 1] = 0.0
    largest_code = plain.LARGEST_CODE[bits]
    codes, scales, out, lost = quantized(values, bits)
    wide, exact = values.double(), values.double().abs().amax(1) / largest_code
    scale = scales.double()
    rounding = 1e-6 * exact + 2.0**-149  # of a quotient in fp32
    assert (scale >= exact - rounding).all()
    assert (scale <= exact * (1 + 2**-7) + 2.0**-133 + rounding).all()
    assert ((wide - out.double()).abs() <= (scale / 2 + largest_code * rounding)[:, None]).all()
    assert ((wide - out.double() - lost.double()).abs() <= rounding[:, None]).all()
    assert not out[:, 1].any()
    if magnitude >= 1e-38:
        assert (out.double() / scale[:, None]).abs().round().max() == largest_code
    if bits == 8:
        assert torch.equal(out.double(), codes.view(torch.int8) * scale[:, None])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_decoded_values_fit_the_buckets_dtype(bits, dtype):
    """The largest number of a dtype stays it: L times a scale that was rounded up would be infinite."""
    top = torch.finfo(dtype).max
    values = torch.tensor([[top, -top, top / 2, 0.0]])
    if dtype == torch.float16:
        values = torch.cat([values, 3 * values])  # gradients with errors, in fp32, may exceed the dtype
    _, scales, out, lost = quantized(values, bits, top)
    assert float(scales[0]) * plain.LARGEST_CODE[bits] > top
    assert out.to(dtype).isfinite().all()
    assert ((out - values.clamp(-top, top)).abs() <= scales.float()[:, None] / 2).all()
    assert torch.equal(out + lost, values)
    total = torch.zeros_like(values)
    codes, scales, _, _ = quantized(values, bits, top)
    plain.dequantize(codes, scales, out=total, bits=bits, top=top, factor=0.25, add=True)
    assert torch.equal(total, out / 4)


def test_fp64_values_that_no_scale_reaches_become_nan():
    largest = 7 * torch.finfo(torch.bfloat16).max
    values = torch.tensor([[1.0, largest], [1.0, 1.01 * largest], [-1e300, 0.0]], dtype=torch.float64)
    _, scales, out, lost = quantized(values, 4)
    assert scales.isnan().tolist() == out.isnan().all(1).tolist() == [False, True, True]
    assert out[0, 1] == largest
    assert not lost[1:].any()


def samples():
    """Yield (name, values, the relative error of one rounding at 4 bits, its tolerance)."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4096, 128, generator=generator)
    chi = torch.randn(3, 4096, 128, generator=generator).square()
    signs = normal.sign()
    yield "normal", normal, 0.117, 0.01
    yield "Laplace", signs * -torch.rand(4096, 128, generator=generator).log(), 0.160, 0.01
    yield "Student t, 3 degrees of freedom", normal / (chi.mean(0)).sqrt(), 0.221, 0.01
    yield "Student t, 2 degrees of freedom", normal / (chi[:2].mean(0)).sqrt(), 0.175, 0.035
    scales = torch.randn(4096, 8, 1, generator=generator).exp()
    yield "log-normal scales of 16", (normal.view(4096, 8, 16) * scales).view(4096, 128), 0.171, 0.01
    yield "90 % zeros", normal * (torch.rand(4096, 128, generator=generator) < 0.1), 0.082, 0.01


def test_the_relative_error_of_values_that_are_not_normal():
    for name, values, expected, tolerance in samples():
        _, _, _, lost = quantized(values, 4)
        assert float(lost.norm() / values.norm()) == pytest.approx(expected, abs=tolerance), name


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
        for one, other in zip(quantized(values[row : row + 1], bits), together, strict=True):
            assert torch.equal(one[0].nan_to_num(), other[row].nan_to_num())
    _, _, out, lost = together
    finite = values[values.isfinite().all(1)].double()
    kept = (out.double() + lost.double())[values.isfinite().all(1)]
    assert ((finite - kept).abs() <= 1e-6 * finite.abs().amax(1, keepdim=True)).all()


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
    for padding in padding_of(layout):
        blocks[padding] -= 1
    assert (blocks != 0).all()
    assert len(layout.quantized) == sum(len(s) > 1 and math.prod(s) >= block_size for s in shapes)


def test_bytes_per_rank_do_not_grow_with_the_number_of_ranks():
    layouts = [BlockLayout([(1024, 1024), (1024,)], 128, world_size) for world_size in (1, 2, 64)]
    sizes = [layout.world_size * layout.sections(4, 4)[1] for layout in layouts]
    assert max(sizes) <= 1.01 * min(sizes)
    assert sizes[0] == 8192 * 66 + 4096


def test_taking_back_changes_one_tensors_error():
    spec = BucketSpec(((4, 8), (3,), (6, 8)), torch.float32, torch.device("cpu"), 2, 0)
    compressor, values = QuantizedCompressor(spec, QuantizedOptions(4, 16)), torch.randn(48)
    compressor.add_to_error(35, values)
    assert torch.equal(compressor.state()["error"], torch.cat([torch.zeros(35), values]))
