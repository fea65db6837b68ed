"""Compare the quantized all-reduce on the kernels with plain torch, stage by stage: the bits are the same.

Only sums of exactly sent elements may differ, by rounding. Plain torch is compared with arithmetic in
tests/compress/test_quantize.py, and with the oracle in tests/test_quantized_oracle.py.
"""

import math

import pytest
import torch

from gradcomp import ops
from gradcomp.kernels.launch import Stage
from gradcomp.kernels.quantize import kernels
from gradcomp.kernels.quantize.work import QuantizedWork
from gradcomp.layout import BlockLayout
from tests.depth import everyday, mixed
from tests.kernels.copies import FLOATS
from tests.kernels.quantize.ranks import (
    all_gather,
    all_reduce,
    all_to_all,
    padding_of,
    plain_plans_of,
    plans_of,
    random_grads,
    sections_of,
)
from tests.tolerances import UNIT_ROUNDOFF, average

BITS = pytest.mark.parametrize("bits", [4, 8])
# Matrices at offsets that aren't multiples of 16 bytes, with vectors between them. Some are one element
# shorter, or longer, than a block of 16.
MIXED = [(3,), (7, 13), (3, 5), (4, 4), (1, 17), (0, 4), (40, 9), (33,)]
# With blocks of 128: a matrix of two tiles, and a matrix of a bit more than two.
WHOLE = [(32, 128), (5,), (33, 131)]
WIDE = {dtype: torch.promote_types(dtype, torch.float32) for dtype in FLOATS}


def assert_same(one, other):
    torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)


def assert_same_codes(payload, expected, layout, dtype, bits, *, is_own=False):
    """Compare codes and scales. Nobody reads the codes of NaN blocks or of a rank's own shard.

    Of its own scales only zeros and NaN are read.
    """
    (codes, scales, _), (other_codes, other_scales, _) = (
        sections_of(each, layout, dtype, bits) for each in (payload, expected)
    )
    if is_own:
        assert_same(scales.sign(), other_scales.sign())
        return
    assert_same(scales, other_scales)
    is_read = ~scales.isnan()
    assert_same(codes[is_read], other_codes[is_read])


def check_encoded(plans, plain, dtype, bits):
    """Compare what every rank sends and keeps. No padding has an error."""
    layout = plans[0].layout
    exact_section = layout.sections(bits, dtype.itemsize)[0][2]
    for rank, (plan, other) in enumerate(zip(plans, plain, strict=True)):
        for shard, (payload, expected) in enumerate(zip(plan.payload, other.payload, strict=True)):
            assert_same_codes(payload, expected, layout, dtype, bits, is_own=shard == rank)
        assert_same(plan.payload[:, exact_section], other.payload[:, exact_section])
        if other.error is None:
            assert plan.error is None
            continue
        assert_same(plan.error, other.error)
        assert not any(plan.error[padding].any() for padding in padding_of(layout))


def check_averaged(plans, plain, dtype, bits):
    """Average every shard, and compare the means and the errors."""
    layout = plans[0].layout
    for rank, (plan, other) in enumerate(zip(plans, plain, strict=True)):
        for each in (plan, other):
            each.average(rank)
        assert_same_codes(plan.mean, other.mean, layout, dtype, bits)
        if other.error is not None:
            assert_same(plan.error, other.error)
        exact = torch.stack([sections_of(sent, layout, dtype, bits)[2] for sent in plan.received]).double()
        bound = average(dtype, layout.world_size, exact.abs().amax(0))
        mean = sections_of(plan.mean, layout, dtype, bits)[2].double()
        assert ((mean - exact.mean(0)).abs() <= bound).all()


def check_dequantized(plans, plain, flats, others, dtype, bits):
    """Dequantize on every rank, and compare the buckets."""
    layout = plans[0].layout
    for plan, other, flat, expected in zip(plans, plain, flats, others, strict=True):
        for each, out in ((plan, flat), (other, expected)):
            out.fill_(math.nan)
            each.decode(out)
        exact = torch.cat([sections_of(payload, layout, dtype, bits)[2] for payload in plan.payload])
        for part in layout.quantized:
            assert_same(flat[part.in_bucket], expected[part.in_bucket])
        for part in layout.exact:
            assert_same(flat[part.in_bucket], exact[part.stored])


def check_steps(layout, bits, dtype, device, num_steps=2, *, offset=0, grads=None, unused=None, **options):
    """Compare every stage of some steps, and return the last averages.

    offset: how far a bucket lies from its memory's start, in elements.
    grads: the ranks' buckets in each step; by default random ones.
    unused: for each rank the layout's parts that it has not used in the last step.
    """
    plans = plans_of(layout, dtype, device, bits=bits, **options)
    plain = plain_plans_of(layout, dtype, bits=bits, **options)
    grads = grads or [random_grads(layout, dtype, device, step) for step in range(num_steps)]
    for of_ranks in grads:
        flats = [torch.empty(layout.numel + offset, dtype=dtype, device=device)[offset:] for _ in plans]
        others = [grad.cpu().clone() for grad in of_ranks]
        for rank, (flat, other) in enumerate(zip(flats, others, strict=True)):
            parts = unused[rank] if unused and of_ranks is grads[-1] else ()
            for part in parts:
                other[part.in_bucket] = 0.0
            flat.copy_(other)
            for plan, given in ((plans[rank], flat), (plain[rank], other)):
                everything = given.new_ones((), dtype=torch.bool)
                plan.encode(given, rank, [(part.stored, everything) for part in parts])
        check_encoded(plans, plain, dtype, bits)
        for each in (plans, plain):
            all_to_all(each)
        check_averaged(plans, plain, dtype, bits)
        for each in (plans, plain):
            all_gather(each)
        check_dequantized(plans, plain, flats, others, dtype, bits)
        for flat in flats:
            assert_same(flat, flats[0].cpu())
    return flats


@pytest.mark.smallest
@BITS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_stage_of_every_dtype(bits, dtype, device):
    check_steps(BlockLayout(MIXED, 16, 2), bits, dtype, device)


RANKS = everyday([1, 3], [1, 3, 5])
FP32, BF16 = torch.float32, torch.bfloat16
# Shapes, elements of a block, numbers of ranks, the dtype, how far a bucket lies from its memory's start.
BUCKETS = [
    (MIXED, 16, RANKS, FP32, 0),
    *((WHOLE, block_size, [1 if block_size < 128 else 2], FP32, 0) for block_size in (2, 6, 128, 256)),
    # One block, one element more than a block, only vectors, two tensors in one run; many tensors.
    *((few, 16, [1, 3], FP32, 0) for few in ([(4, 4)], [(1, 16)], [(17, 1)], [(5,)], [(2, 8), (8, 2)])),
    ([(4, 5), (3,)] * 8 + [(4, 4)] * 5, 4, [2], FP32, 0),
    # Not on 16 bytes.
    *(([(32, 128), (5, 3)], 128, [1], dtype, 3) for dtype in (FP32, BF16)),
]


@pytest.mark.smallest
@BITS
@pytest.mark.parametrize(("shapes", "block_size", "ranks", "dtype", "offset"), BUCKETS)
def test_every_stage_of_unlike_buckets(bits, shapes, block_size, ranks, dtype, offset, device):
    for world_size in ranks:
        check_steps(BlockLayout(shapes, block_size, world_size), bits, dtype, device, 1, offset=offset)


@BITS
@pytest.mark.parametrize("shapes", [[(0,), (0, 3)], []], ids=str)
def test_no_elements(bits, shapes, device):
    for world_size in (1, 3):
        plans = plans_of(BlockLayout(shapes, 16, world_size), torch.float32, device, bits=bits)
        assert all_reduce(plans, [torch.empty(0, device=device) for _ in plans])[0].shape == (0,)


@BITS
def test_without_feedback(bits, device):
    layout = BlockLayout(MIXED, 16, 2)
    grads = [random_grads(layout, torch.float32, device, 0)] * 2
    first, second = (
        check_steps(layout, bits, torch.float32, device, grads=steps, error_feedback=False)
        for steps in (grads[:1], grads)
    )
    assert all(map(torch.equal, first, second)), "something is kept"


@BITS
@pytest.mark.parametrize("scale", [1e38, 1e-38, 1e-42], ids=str)
def test_magnitudes_at_the_ends_of_fp32(bits, scale, device):
    """See tests/hooks/test_ends_of_range.py for what is lost."""
    layout = BlockLayout([(8, 16)], 16, 1)
    grads = [torch.linspace(-3, 3, 128, device=device) * scale]
    assert check_steps(layout, bits, torch.float32, device, grads=[grads])[0].isfinite().all()


@BITS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_blocks_that_are_not_finite(bits, dtype, device):
    """Such blocks are NaN on every rank, and keep their errors. All other blocks are unchanged by them."""
    layout = BlockLayout([(8, 16), (3,)], 16, 2)
    plans, others = (plans_of(layout, dtype, device, bits=bits) for _ in range(2))
    plain = plain_plans_of(layout, dtype, bits=bits)
    grads = random_grads(layout, dtype, device, 0)
    for each in (plans, others):
        all_reduce(each, [grad.clone() for grad in grads])
    all_reduce(plain, [grad.cpu().clone() for grad in grads])
    before = [plan.error.clone() for plan in plans]
    expected = all_reduce(others, grads)[0]
    grads[1][20], grads[1][80], grads[0][127] = math.inf, math.nan, -math.inf
    outputs = all_reduce(plans, grads)
    blocks = torch.arange(layout.numel, device=device) // 16
    is_bad = (blocks == 1) | (blocks == 5) | (blocks == 7)
    for output in outputs:
        assert output[is_bad].isnan().all()
        assert torch.equal(output[~is_bad], expected[~is_bad])
    assert all(plan.error.isfinite().all() for plan in plans)
    expected = all_reduce(plain, [grad.cpu() for grad in grads])
    for rank, start, bad in ((1, 16, 20), (1, 80, 80), (0, 112, 127)):  # the second block is rank 1's own
        block, error = slice(start, start + 16), before[rank].cpu()
        assert torch.equal(plans[rank].error[block].cpu(), error[block])
        error[bad], found = 0.0, plain[rank].error[block]  # zero in plain torch, and else up to rounding
        assert torch.allclose(found, error[block], rtol=0, atol=8 * UNIT_ROUNDOFF[found.dtype])
        found.copy_(plans[rank].error[block])
    for plan, other, output, theirs in zip(plans, plain, outputs, expected, strict=True):
        assert torch.equal(plan.error.cpu(), other.error)
        assert torch.equal(output.isnan().cpu(), theirs.isnan())
        assert torch.equal(output.nan_to_num().cpu()[:128], theirs.nan_to_num()[:128])


@BITS
@pytest.mark.parametrize("users", [[], [1]], ids=str)
def test_layers_that_are_skipped(bits, users, device):
    """A tensor that no rank uses is sent as zeros. Rank 0 owns a part of it, and rank 1 the rest."""
    layout = BlockLayout([(9, 7), (4, 5)], 16, 2)
    first = layout.quantized[0]
    assert layout.shard_numel < first.stored.stop
    unused = [[] if rank in users else [first] for rank in range(2)]
    output = check_steps(layout, bits, torch.float32, device, unused=unused)[0]
    assert output[first.in_bucket].any() == bool(users)


def sums_of(plans, grads, errors):
    """Reduce-scatter the ranks' buckets: return every rank's shard of the sums."""
    for rank, (plan, grad, error) in enumerate(zip(plans, grads, errors, strict=True)):
        plan.error = error
        plan.encode(grad, rank)
    all_to_all(plans)
    outputs = list(grads[0].new_full((len(plans), plans[0].layout.numel // len(plans)), math.nan))
    for rank, (plan, output) in enumerate(zip(plans, outputs, strict=True)):
        plan.add(output, rank)
    return outputs


@pytest.mark.parametrize(("dtype", "world_size", "bits"), mixed(FLOATS, RANKS, [4, 8]), ids=str)
def test_sums_of_shards_with_equal_tensors(dtype, world_size, bits, device):
    shapes = [(3,), (7, 13), (3, 5), (1, 17), (0, 4)]
    layout = BlockLayout(shapes * world_size, 16, world_size)
    options = {"bits": bits, "of_row": BlockLayout(shapes, 16, 1), "divisor": 0.25}
    plans, plain = plans_of(layout, dtype, device, **options), plain_plans_of(layout, dtype, **options)
    zeros = torch.zeros(world_size, world_size * layout.shard_numel, dtype=WIDE[dtype])
    errors, plain_errors = list(zeros.to(device)), list(zeros.clone())
    for step in range(2):
        grads = random_grads(layout, dtype, device, step)
        expected = sums_of(plain, [grad.cpu().clone() for grad in grads], plain_errors)
        assert_same(torch.stack(sums_of(plans, grads, errors)), torch.stack(expected))
        assert_same(torch.stack(errors), torch.stack(plain_errors))
        assert not any(each.view(world_size, -1)[rank].any() for rank, each in enumerate(errors))
    assert all(error.any() for error in errors) == (world_size > 1)


def exchange_once(plans, grads):
    """Average in one exchange: every rank gets all payloads, its own too."""
    outputs = [grad.clone() for grad in grads]
    for rank, plan in enumerate(plans):
        plan.encode(outputs[rank], rank)
    for plan in plans:
        for sender, other in enumerate(plans):
            plan.received[sender].copy_(other.payload[0])
    for rank, plan in enumerate(plans):
        plan.add(outputs[rank], rank)
    return outputs


@pytest.mark.parametrize(
    ("bits", "dtype", "num_senders", "feedback"), mixed([4, 8], FLOATS, [2, 3], [True, False]), ids=str
)
def test_one_exchange(bits, dtype, num_senders, feedback, device):
    """All ranks have the same bits, which are plain torch's."""
    layout, wide = BlockLayout(MIXED, 16, 1), WIDE[dtype]
    options = {"bits": bits, "error_feedback": feedback, "num_senders": num_senders}
    plans = plans_of(layout, dtype, device, num_senders, **options)
    plain = plain_plans_of(layout, dtype, num_senders, **options)
    for step in range(2):
        grads = [random_grads(layout, dtype, device, 10 * step + rank)[0] for rank in range(num_senders)]
        outputs = exchange_once(plans, grads)
        expected = exchange_once(plain, [grad.cpu() for grad in grads])
        assert all(torch.equal(output, outputs[0]) for output in outputs)
        for part in layout.quantized:
            assert torch.equal(outputs[0][part.in_bucket].cpu(), expected[0][part.in_bucket])
        for part in layout.exact:
            mean = sum(grad[part.in_bucket].cpu().to(wide) for grad in grads) / num_senders
            torch.testing.assert_close(outputs[0][part.in_bucket].cpu(), mean.to(dtype))
        for plan, other in zip(plans, plain, strict=True):
            assert plan.error is None if not feedback else torch.equal(plan.error.cpu(), other.error)


def test_it_is_chosen_where_kernels_run(monkeypatch):
    monkeypatch.setattr(ops, "_INTERPRETED", False)
    arguments = BlockLayout([(16, 16)], 16, 1), torch.float32
    for device, on_kernels in (("cpu", False), ("meta", True)):
        assert isinstance(ops.encoder(*arguments, torch.device(device), bits=4), Stage) == on_kernels


@BITS
def test_gpus_with_any_number_of_multiprocessors_compute_the_same_bits(bits, device, monkeypatch):
    """A step of two ranks on a large GPU, and on one with a single multiprocessor."""
    layout = BlockLayout(WHOLE, 128, 2)
    results, tables = [], []
    for number in (132, 1):
        monkeypatch.setattr(kernels, "num_multiprocessors", lambda _, number=number: number)
        plans = plans_of(layout, torch.float32, device, bits=bits)
        tables.append(len(QuantizedWork(layout, bits, 4, num_multiprocessors=number).rows))
        outputs = all_reduce(plans, random_grads(layout, torch.float32, device, 0))
        results.append([*(each for plan in plans for each in (plan.error, plan.mean)), *outputs])
    assert tables[0] > tables[1], "the test is idle"
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
