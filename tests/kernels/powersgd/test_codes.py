"""PowerSGD's factors packed as codes in one launch have the bits of packing, then quantizing."""

import pytest
import torch

from gradcomp import ops
from gradcomp.kernels.powersgd.codes_work import FactorCodesWork, is_packed_as_codes
from gradcomp.kernels.quantize.work import BLOCKS
from gradcomp.layout import BlockLayout
from tests.kernels.powersgd.ranks import plans_of, random_grads
from tests.kernels.quantize.ranks import all_gather, all_to_all

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
SIZE = 128
# Some blocks have elements of several matrices. Columns are shorter and longer than a block; their lengths
# aren't multiples of 4. Some vectors have odd lengths.
SHAPES = [(33, 67), (5,), (1, 40), (150, 9), (70,), (9, 20)]


def plans_with_codes(shapes, rank, dtype, device, *, world_size=2, exact_dtype=None):
    """Return a plan, and the plans of the quantized all-reduces of its P and Q."""
    wide = torch.promote_types(dtype, FP32)
    (plan,) = plans_of(shapes, rank, dtype, device, wire_dtype=wide)
    p_numel, uncompressed_numel, q_numel = plan.wire_numels
    codes = [
        ops.quantized_plan(
            BlockLayout(parts, SIZE, world_size),
            wide,
            device,
            bits=8,
            error_feedback=False,
            exact_dtype=exact_dtype or dtype,
        )
        for parts in ([(1, p_numel), (uncompressed_numel,)], [(1, q_numel)])
    ]
    return plan, codes


def check_same_bits(shapes, rank, dtype, device, *, left_out=(), **options):
    """Compare P's and Q's payloads with the quantized wires of another plan."""
    plan, codes = plans_with_codes(shapes, rank, dtype, device, **options)
    other, expected = plans_with_codes(shapes, rank, dtype, device, **options)
    plan.send_in_codes(*codes)
    for scratch in (plan._partial, plan.p_wire, plan.q_wire):
        scratch.fill_(torch.nan)
    (grad,) = random_grads(plan.layout, dtype, device, 0)
    plan.project(grad, 1.0, left_out)
    other.project(grad, 1.0, left_out)
    expected[0].quantize(other.p_wire, 0)
    plan.p_wire.copy_(other.p_wire)
    plan.back_project(grad, 1.0)
    other.back_project(grad, 1.0)
    if other.q_wire.numel():
        expected[1].quantize(other.q_wire, 0)
    for one, another in zip(codes, expected, strict=True):
        assert torch.equal(one.payload, another.payload)
    return codes


@pytest.mark.parametrize(
    ("rank", "shapes"), [(1, SHAPES), (4, SHAPES), (5, SHAPES), (16, [(30, 40), (33, 20)]), (40, [(45, 50)])]
)
def test_every_rank(rank, shapes, device):
    assert all(each.payload.any() for each in check_same_bits(shapes, rank, FP32, device))


@pytest.mark.parametrize(
    ("dtype", "exact_dtype"), [(FP64, None), (FP16, None), (BF16, None), (FP32, BF16), (FP64, FP16)], ids=str
)
def test_every_dtype(dtype, exact_dtype, device):
    check_same_bits(SHAPES, 4, dtype, device, exact_dtype=exact_dtype)


@pytest.mark.parametrize("world_size", [1, 3, 7])
def test_every_number_of_shards(world_size, device):
    """Shards cut the uncompressed tensors. Some shards are padded."""
    check_same_bits(SHAPES, 4, FP32, device, world_size=world_size)


def test_these_matrices_have_all_cases(device):
    plan, codes = plans_with_codes(SHAPES, 4, FP32, device)
    # A block of rows or columns has several partial sums.
    assert max(row[5] for row in plan._work.pack_work) > 1
    assert max(row[5] for row in plan._work.reduce_work) > 1
    for factor, each in zip("pq", codes, strict=True):
        tables = FactorCodesWork(plan._work, factor, each.layout, 4, 4)
        factors_of = {row[7] - row[4] for row in tables.work if row[0] == BLOCKS}
        assert max(factors_of) > 1  # tiles with elements of several matrices
        assert any(row[0] % SIZE for row in tables.factors)


def test_factors_that_are_shorter_than_a_block_are_sent_exactly(device):
    """Short factors are written to the wires. If one factor is short, both factors are written there."""
    for shapes in ([(6, 9), (3,), (30, 10)], [(2, 400)], [(5,), (40,)]):
        (plan,) = plans_of(shapes, 2, FP32, device)
        assert not is_packed_as_codes(plan._work, SIZE)
        check_same_bits(shapes, 2, FP32, device)


def average(codes, wires):
    """Average the ranks' packed codes, and write the means to their wires."""
    all_to_all(codes)
    for rank, each in enumerate(codes):
        each.average(rank)
    all_gather(codes)
    for each, wire in zip(codes, wires, strict=True):
        each.dequantize(wire)


@pytest.mark.parametrize("shapes", [[(40, 60), (5,), (70, 30), (30, 40)], [(12, 9), (8, 3)]], ids=str)
def test_matrices_that_are_left_out_are_sent_as_zeros(shapes, device):
    """This holds for codes, and for short factors on the wires. All other matrices lose nothing."""
    ranks = [plans_with_codes(shapes, 2, FP32, device) for _ in range(2)]
    plans = [plan for plan, _ in ranks]
    layout = plans[0].layout
    grads = random_grads(layout, FP32, device, 0, 2)
    mean = (grads[0] + grads[1]) / 2
    for (plan, codes), grad in zip(ranks, grads, strict=True):
        plan.send_in_codes(*codes)
        plan.project(grad, 1.0, [1])
    average([codes[0] for _, codes in ranks], [plan.p_wire for plan in plans])
    for plan, grad in zip(plans, grads, strict=True):
        plan.back_project(grad, 1.0)
    average([codes[1] for _, codes in ranks], [plan.q_wire for plan in plans])
    for plan, grad in zip(plans, grads, strict=True):
        plan.reconstruct(grad, 0)
    assert torch.equal(*grads)
    for index, matrix in enumerate(layout.matrices):
        part = slice(matrix.offset, matrix.offset + matrix.numel)
        assert grads[0][part].any() == (index != 1)
        # A matrix that is left out stays in the errors, complete.
        errors = sum(plan.error()[part] for plan in plans) / 2
        assert torch.allclose(grads[0][part] + errors, mean[part], atol=1e-5)
        if index == 1:
            assert torch.equal(errors, mean[part])


@pytest.mark.parametrize("left_out", [[0], [1, 3]], ids=str)
def test_the_same_bits_of_the_others(left_out, device):
    check_same_bits(SHAPES, 4, FP32, device, left_out=left_out)
