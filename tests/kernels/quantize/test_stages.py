"""Compare the quantized all-reduce on the kernels with float64 and plain torch, stage by stage."""

import math

import pytest
import torch

from gradcomp import ops
from gradcomp.kernels.launch import Stage
from gradcomp.kernels.quantize import kernels
from gradcomp.kernels.quantize.work import QuantizedWork
from gradcomp.layout import BlockLayout
from tests.depth import mixed
from tests.kernels.copies import FLOATS
from tests.kernels.quantize.ranks import (
    all_gather,
    all_reduce,
    all_to_all,
    assert_quantized,
    blocks_of,
    dequantized,
    padding_of,
    plain_plans_of,
    plans_of,
    random_grads,
    sections_of,
)
from tests.tolerances import QUANTIZED_IDENTITY, UNIT_ROUNDOFF, average

BITS = pytest.mark.parametrize("bits", [4, 8])
# Matrices at offsets that aren't multiples of 16 bytes, with vectors between them. Some are one element
# shorter, or longer, than a block of 16.
MIXED = [(3,), (7, 13), (3, 5), (4, 4), (1, 17), (0, 4), (40, 9), (33,)]
# With blocks of 128: a matrix of two tiles, and a matrix of a bit more than two.
WHOLE = [(32, 128), (5,), (33, 131)]
WIDE = {dtype: torch.promote_types(dtype, torch.float32) for dtype in FLOATS}


def check_quantized(plans, grads, bits, dtype):
    """Quantize every rank's bucket, and check the payloads and the errors."""
    layout, wide = plans[0].layout, WIDE[dtype]
    for rank, (plan, grad) in enumerate(zip(plans, grads, strict=True)):
        values = plan.error.cpu().view(-1, layout.block_size) + blocks_of(layout, grad, wide)
        is_own = torch.arange(len(values)) // max(1, layout.num_blocks) == rank
        plan.encode(grad, rank)
        sent = [sections_of(payload, layout, dtype, bits) for payload in plan.payload]
        codes, scales, exact = (torch.cat(section) for section in zip(*sent, strict=True))
        assert_quantized(values[~is_own], codes[~is_own], scales[~is_own], bits)
        assert torch.equal(scales[is_own] != 0, values[is_own].any(1))
        lost = values - dequantized(codes, scales, wide, bits, torch.finfo(dtype).max)
        lost = torch.where(is_own[:, None], values, lost).flatten()
        assert torch.equal(plan.error.cpu(), lost)
        assert not any(lost[padding].any() for padding in padding_of(layout))
        for part in layout.exact:
            assert torch.equal(exact[part.stored], grad[part.in_bucket].cpu())


def check_averaged(plans, bits, dtype):
    """Average every shard, and check the means and the errors."""
    layout, wide = plans[0].layout, WIDE[dtype]
    for rank, plan in enumerate(plans):
        expected = plan.error.clone().cpu()
        own = expected[layout.shard(rank)].view(-1, layout.block_size)
        plan.average(rank)
        total, is_sent = own.clone(), False
        exact = []
        for sender, payload in enumerate(plan.received):
            codes, scales, exact_of_one = sections_of(payload, layout, dtype, bits)
            if sender != rank:
                total += dequantized(codes, scales, wide, bits, torch.finfo(dtype).max)
            is_sent = is_sent | (scales != 0)[:, None]
            exact.append(exact_of_one.double())
        total = torch.where(is_sent, total, 0.0) / layout.world_size
        codes, scales, mean = sections_of(plan.mean, layout, dtype, bits)
        assert_quantized(total, codes, scales, bits)
        lost = (total - dequantized(codes, scales, wide, bits, torch.finfo(dtype).max)) * layout.world_size
        own.copy_(torch.where(is_sent, lost, own))
        assert torch.equal(plan.error.cpu(), expected)
        means = torch.stack(exact).mean(0)
        bound = average(dtype, layout.world_size, torch.stack(exact).abs().amax(0))
        assert ((mean.double() - means).abs() <= bound).all()


def check_dequantized(plans, flats, bits, dtype):
    """Dequantize on every rank, and check the buckets."""
    layout, wide = plans[0].layout, WIDE[dtype]
    for plan, flat in zip(plans, flats, strict=True):
        sent = [sections_of(payload, layout, dtype, bits) for payload in plan.payload]
        codes, scales, exact = (torch.cat(section) for section in zip(*sent, strict=True))
        blocks = dequantized(codes, scales, wide, bits, torch.finfo(dtype).max).flatten().to(dtype)
        flat.fill_(math.nan)
        plan.decode(flat)
        for parts, values in ((layout.quantized, blocks), (layout.exact, exact)):
            for part in parts:
                assert torch.equal(flat[part.in_bucket].cpu(), values[part.stored])


def check_steps(layout, bits, dtype, device, num_steps=2, offset=0):
    """Check every stage of some steps. offset: how far a bucket lies from its memory's start, in elements."""
    plans = plans_of(layout, dtype, device, bits=bits)
    for step in range(num_steps):
        grads = random_grads(layout, dtype, device, step)
        flats = [torch.empty(layout.numel + offset, dtype=dtype, device=device)[offset:] for _ in grads]
        for flat, grad in zip(flats, grads, strict=True):
            flat.copy_(grad)
        check_quantized(plans, flats, bits, dtype)
        all_to_all(plans)
        check_averaged(plans, bits, dtype)
        all_gather(plans)
        check_dequantized(plans, flats, bits, dtype)


@pytest.mark.smallest
@BITS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_stage_of_every_dtype(bits, dtype, device):
    check_steps(BlockLayout(MIXED, 16, 2), bits, dtype, device)


@pytest.mark.parametrize(("bits", "world_size"), mixed([4, 8], [1, 3, 5]))
def test_every_number_of_ranks(bits, world_size, device):
    check_steps(BlockLayout(MIXED, 16, world_size), bits, torch.float32, device)


@BITS
@pytest.mark.parametrize("block_size", [2, 6, 128, 256])
def test_every_block_size(bits, block_size, device):
    check_steps(BlockLayout(WHOLE, block_size, 1 if block_size < 128 else 2), bits, torch.float32, device, 1)


@pytest.mark.smallest
@BITS
@pytest.mark.parametrize(
    "shapes", [[(4, 4)], [(1, 16)], [(17, 1)], [(5,)], [(2, 8), (8, 2)], [(0,), (0, 3)], []], ids=str
)
def test_few_blocks(bits, shapes, device):
    """One block, one element more than a block, only vectors, two tensors in one run, no elements."""
    for world_size in (1, 3):
        check_steps(BlockLayout(shapes, 16, world_size), bits, torch.float32, device, 1)


@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_buckets_that_do_not_start_on_16_bytes(bits, dtype, device):
    check_steps(BlockLayout([(32, 128), (5, 3)], 128, 1), bits, dtype, device, 1, offset=3)


@BITS
def test_many_tensors(bits, device):
    check_steps(BlockLayout([(4, 5), (3,)] * 8 + [(4, 4)] * 5, 4, 2), bits, torch.float32, device, 1)


@pytest.mark.parametrize(("bits", "dtype", "world_size"), mixed([4, 8], FLOATS, [1, 2, 5]), ids=str)
def test_bits_are_those_of_plain_torch(bits, dtype, world_size, device):
    """Outputs, errors, codes and scales have the same bits; sums of exactly sent elements may differ."""
    layout = BlockLayout(MIXED, 16, world_size)
    plans = plans_of(layout, dtype, device, bits=bits)
    plain = plain_plans_of(layout, dtype, bits=bits)
    for step in range(2):
        outputs = all_reduce(plans, random_grads(layout, dtype, device, step))
        expected = all_reduce(plain, random_grads(layout, dtype, torch.device("cpu"), step))
        for one, other in zip(plans, plain, strict=True):
            assert torch.equal(one.error.cpu(), other.error)
            for index in (0, 1):
                pair = [sections_of(each.mean, layout, dtype, bits)[index] for each in (one, other)]
                assert torch.equal(*pair)
        for output, other in zip(outputs, expected, strict=True):
            for part in layout.quantized:
                assert torch.equal(output[part.in_bucket].cpu(), other[part.in_bucket])


@pytest.mark.parametrize(("bits", "dtype"), mixed([4, 8], FLOATS), ids=str)
def test_nothing_is_lost(bits, dtype, device):
    """Σ outputs + mean error = Σ mean inputs, and every rank has the same output."""
    layout = BlockLayout(MIXED, 16, 3)
    plans = plans_of(layout, dtype, device, bits=bits)
    inputs, outputs = torch.zeros(layout.numel).double(), torch.zeros(layout.numel).double()
    for step in range(3):
        grads = random_grads(layout, dtype, device, step)
        inputs += torch.stack(grads).double().mean(0).cpu()
        results = all_reduce(plans, grads)
        assert all(torch.equal(result, results[0]) for result in results)
        outputs += results[0].double().cpu()
    errors = torch.stack([plan.error.double().cpu() for plan in plans]).mean(0)
    for part in layout.quantized:
        outputs[part.in_bucket] += errors[part.stored]
    assert (outputs - inputs).norm() <= QUANTIZED_IDENTITY[dtype] * inputs.norm()
    assert errors.any()


@BITS
def test_without_feedback(bits, device):
    layout = BlockLayout(MIXED, 16, 2)
    plans = plans_of(layout, torch.float32, device, bits=bits, error_feedback=False)
    same = plans_of(layout, torch.float32, device, bits=bits)
    grads = random_grads(layout, torch.float32, device, 0)
    for _ in range(2):
        assert all(plan.error is None for plan in plans)
        outputs = all_reduce(plans, grads)
    for output, other in zip(outputs, all_reduce(same, grads), strict=True):  # same has zero errors so far
        assert torch.equal(output, other)


@BITS
@pytest.mark.parametrize("scale", [1e38, 1e-38, 1e-42], ids=str)
def test_magnitudes_at_the_ends_of_fp32(bits, scale, device):
    layout = BlockLayout([(8, 16)], 16, 1)
    (plan,) = plans_of(layout, torch.float32, device, bits=bits)
    flat = torch.linspace(-3, 3, 128, device=device) * scale
    check_quantized([plan], [flat], bits, torch.float32)
    assert plan.error.isfinite().all()
    if scale == 1e38:
        all_to_all([plan])
        plan.average(0)
        assert plan.error.isfinite().all()
        codes, scales, _ = sections_of(plan.mean, layout, torch.float32, bits)
        decoded = dequantized(codes, scales, torch.float32, bits, torch.finfo(torch.float32).max).flatten()
        assert (decoded - flat.cpu()).double().norm() < 0.2 * flat.cpu().double().norm()


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
def test_layers_that_are_skipped_keep_their_errors(bits, users, device):
    """A tensor that no rank uses is sent as zeros, and its errors stay.

    Rank 0 owns a part of it, and rank 1 the rest. If rank 1 uses it, rank 0's own errors are sent.
    """
    layout = BlockLayout([(9, 7), (4, 5)], 16, 2)
    plans = plans_of(layout, torch.float32, device, bits=bits)
    plain = plain_plans_of(layout, torch.float32, bits=bits)
    for each in (plans, plain):
        all_reduce(each, random_grads(layout, torch.float32, each[0].error.device, 0))
    first = layout.quantized[0]
    assert layout.shard(0).stop < first.stored.stop
    before = [plan.error.clone() for plan in plans]
    grads = random_grads(layout, torch.float32, device, 1)
    sums = torch.stack([*grads, *(blocks_to(layout, error) for error in before)]).sum(0)
    for rank in {0, 1} - set(users):
        sums[first.in_bucket] -= grads[rank][first.in_bucket]
    unused = [[] if rank in users else [first] for rank in range(2)]
    outputs = all_reduce(plans, grads, unused)
    expected = all_reduce(plain, [grad.cpu() for grad in grads], unused)
    for plan, other, output, theirs in zip(plans, plain, outputs, expected, strict=True):
        assert torch.equal(plan.error.cpu(), other.error)
        assert torch.equal(output.cpu(), theirs)
    owned, rest = slice(0, layout.shard(0).stop), slice(layout.shard(0).stop, first.stored.stop)
    assert torch.equal(plans[0].error[rest], before[0][rest])  # rank 0's of what rank 1 owns
    for rank, plan in enumerate(plans):
        assert torch.equal(plan.error[owned], before[rank][owned]) == (not users)
    assert outputs[0][first.in_bucket].any() == bool(users)
    kept = sum(blocks_to(layout, plan.error) for plan in plans)
    assert torch.allclose(2 * outputs[0] + kept, sums, atol=1e-5)


def blocks_to(layout, blocks):
    """Return values in the order of the padded blocks in the bucket's order."""
    flat = blocks.new_zeros(layout.numel)
    for part in layout.quantized:
        flat[part.in_bucket] = blocks[part.stored]
    return flat


def sums_of(plans, grads, errors, out_dtype):
    """Reduce-scatter the ranks' buckets: return every rank's shard, and its own part of the sum."""
    for rank, (plan, grad, error) in enumerate(zip(plans, grads, errors, strict=True)):
        if error is not None:
            plan.error = error
        plan.encode(grad, rank)
    all_to_all(plans)
    numel = plans[0].layout.numel // len(plans)
    shards = [plan.layout.shard(rank) for rank, plan in enumerate(plans)]
    owns = [
        error if error is None else error[own].clone().cpu()
        for error, own in zip(errors, shards, strict=True)
    ]
    outputs = [torch.full((numel,), math.nan, dtype=out_dtype, device=grads[0].device) for _ in plans]
    for rank, (plan, output) in enumerate(zip(plans, outputs, strict=True)):
        plan.add(output, rank)
    return outputs, owns


def check_sums(plans, outputs, owns, bits, dtype):
    """Check every rank's shard: own and received summed in the wide dtype, divided by 1/4, rounded once."""
    layout, wide = plans[0].layout, WIDE[dtype]
    for rank, (plan, output, blocks) in enumerate(zip(plans, outputs, owns, strict=True)):
        assert not plan.error[layout.shard(rank)].any()
        exact = torch.zeros(layout.exact_numel, dtype=wide)
        for sender, payload in enumerate(plan.received):
            codes, scales, exact_of_one = sections_of(payload, layout, dtype, bits)
            if sender != rank:
                blocks += dequantized(codes, scales, wide, bits, torch.finfo(dtype).max).flatten()
            exact += exact_of_one.to(wide)
        of_shard = len(layout.quantized) // layout.world_size, len(layout.exact) // layout.world_size
        for parts, values, number in zip(
            (layout.quantized, layout.exact), (blocks, exact), of_shard, strict=True
        ):
            for part in parts[:number]:
                assert torch.equal(output[part.in_bucket].cpu(), (values[part.stored] * 4).to(dtype)), rank


@pytest.mark.parametrize(("dtype", "world_size", "bits"), mixed(FLOATS, [1, 3, 5], [4, 8]), ids=str)
def test_sums_of_shards_with_equal_tensors(dtype, world_size, bits, device):
    layout = BlockLayout(MIXED * world_size, 16, world_size)
    options = {"bits": bits, "of_row": BlockLayout(MIXED, 16, 1), "divisor": 0.25}
    plans, plain = plans_of(layout, dtype, device, **options), plain_plans_of(layout, dtype, **options)
    zeros = torch.zeros(world_size, world_size * layout.shard_numel, dtype=WIDE[dtype])
    errors, plain_errors = list(zeros.to(device)), list(zeros.clone())
    for step in range(2):
        check_sums(
            plans, *sums_of(plans, random_grads(layout, dtype, device, step), errors, dtype), bits, dtype
        )
        grads = random_grads(layout, dtype, torch.device("cpu"), step)
        check_sums(plain, *sums_of(plain, grads, plain_errors, dtype), bits, dtype)
        assert torch.equal(torch.stack(errors).cpu(), torch.stack(plain_errors))
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
    """All ranks have the same bits, which are plain torch's. Errors are what rounding has lost."""
    layout, wide = BlockLayout(MIXED, 16, 1), WIDE[dtype]
    options = {"bits": bits, "error_feedback": feedback, "num_senders": num_senders}
    plans = plans_of(layout, dtype, device, num_senders, **options)
    plain = plain_plans_of(layout, dtype, num_senders, **options)
    before = [torch.zeros(layout.shard_numel, dtype=wide) for _ in plans]
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
        for rank, (plan, other) in enumerate(zip(plans, plain, strict=True)):
            if not feedback:
                assert plan.error is None
                continue
            assert torch.equal(plan.error.cpu(), other.error)
            codes, scales, _ = sections_of(plan.payload[0], layout, dtype, bits)
            sent = dequantized(codes, scales, wide, bits, torch.finfo(dtype).max).flatten()
            values = blocks_of(layout, grads[rank], wide).flatten() + before[rank]
            torch.testing.assert_close(sent + other.error, values)
            before[rank] = other.error.clone()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_of_16_bits_are_in_fp32(dtype, device):
    """Three equal numbers' sum isn't rounded twice."""
    layout = BlockLayout([(5,)] * 3, 16, 3)
    options = {"bits": 8, "error_feedback": False, "uncompressed_dtype": dtype}
    options |= {"of_row": BlockLayout([(5,)], 16, 1), "divisor": 1}
    plans = plans_of(layout, torch.float32, device, **options)
    grads = [torch.full((15,), 1 + 2.0**-7, device=device) for _ in plans]
    for output in sums_of(plans, grads, [None] * 3, torch.float32)[0]:
        assert torch.equal(output.cpu(), torch.full((5,), 3 + 3 * 2.0**-7))


def test_it_is_chosen_where_kernels_run(monkeypatch):
    monkeypatch.setattr(ops, "_INTERPRETED", False)
    arguments = BlockLayout([(16, 16)], 16, 1), torch.float32
    for device, on_kernels in (("cpu", False), ("meta", True)):
        operation = ops.encoder(*arguments, torch.device(device), bits=4)
        assert isinstance(operation, Stage) == on_kernels


@BITS
def test_gpus_with_any_number_of_multiprocessors_compute_the_same_bits(bits, device, monkeypatch):
    """Two steps of two ranks on a large GPU, and on one with a single multiprocessor."""
    layout = BlockLayout(WHOLE, 128, 2)
    results, tables = [], []
    for number in (132, 1):
        monkeypatch.setattr(kernels, "num_multiprocessors", lambda _, number=number: number)
        plans = plans_of(layout, torch.float32, device, bits=bits)
        tables.append(len(QuantizedWork(layout, bits, 4, num_multiprocessors=number).rows))
        outputs = [all_reduce(plans, random_grads(layout, torch.float32, device, seed)) for seed in range(2)]
        kept = [tensor for plan in plans for tensor in (plan.error, plan.mean)]
        results.append([*kept, *(output for step in outputs for output in step)])
    assert tables[0] > tables[1], "the test is idle"
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
