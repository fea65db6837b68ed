"""Compare the all-gather of shards in codes with plain torch and with rounding in a few lines."""

import math
from unittest import mock

import pytest
import torch

from gradcomp import ops
from gradcomp.fsdp.all_gather import ShardGather
from tests.depth import mixed
from tests.fsdp.gathered import rounded
from tests.kernels.copies import FLOATS

# Matrices at offsets that aren't multiples of 16 bytes, vectors, and an empty tensor. Some are one element
# shorter, or longer, than a block of 16.
MIXED = [(3,), (7, 13), (3, 5), (4, 4), (1, 17), (0, 4), (40, 9), (33,)]
IGNORED = 3
# Of the whole group and of its nodes.
SIZES = [(1, 1), (3, 1), (4, 2), (6, 3)]
LARGE = [(17, 128), (5,), (19, 131)]  # with blocks of 128: more than a tile


def gather_of(bits, sizes, block_size=16, shapes=MIXED):
    return ShardGather(shapes, {IGNORED} if shapes is MIXED else (), *sizes, bits, block_size)


def rows_of(gather):
    """Return the rank that has each row of the payload."""
    world_size, per_node = gather.layout.world_size, gather.ranks_per_node
    return [rank for place in range(per_node) for rank in range(place, world_size, per_node)]


def shards_of(gather, dtype, device, lead=0):
    """Return each rank's shard. lead: how far it lies from its memory's start, in elements."""
    world_size, generator = gather.layout.world_size, torch.Generator().manual_seed(0)
    values = torch.randn(world_size, gather.layout.numel // world_size, generator=generator)
    values[0, 20:50] = 0.0
    placed = torch.zeros(world_size, lead + values.shape[1], dtype=dtype, device=device)
    placed[:, lead:] = values.to(dtype)
    return [row[lead:] for row in placed]


def exchange(gather, shards):
    """Return the payload that all ranks get, and what they decode. Both are poisoned before."""
    dtype, device = shards[0].dtype, shards[0].device
    payload = torch.full((len(shards), gather.payload_bytes(dtype)), 0x7F, dtype=torch.uint8, device=device)
    encode, decode = gather.operations(dtype, device)
    nothing = torch.empty(0, dtype=torch.promote_types(dtype, torch.float32), device=device)
    for row, rank in enumerate(rows_of(gather)):
        encode(buffer=shards[rank], payload=payload[row : row + 1], kept=nothing, rank=-1)
    decoded = shards[0].new_full((gather.layout.numel,), math.nan)
    decode(payload=payload, buffer=decoded)
    return payload, decoded


def check(of, bits, dtype, device, lead=0):
    """Compare a gather on the kernels with one in plain torch. of: gather_of's arguments after bits."""
    gather, other = gather_of(bits, *of), gather_of(bits, *of)
    layout, shards = gather.layout, shards_of(gather, dtype, device, lead)
    payload, decoded = exchange(gather, shards)
    sections, num_bytes = layout.sections(bits, dtype.itemsize)
    assert payload.shape == (layout.world_size, num_bytes)
    kinds = torch.uint8, torch.bfloat16, dtype  # scales of zeros are 0.0 or -0.0
    on_cpu = [shard.cpu() for shard in shards]
    with mock.patch.object(ops, "_INTERPRETED", False):
        theirs, expected = exchange(other, on_cpu)
    for section, kind in zip(sections, kinds, strict=True):
        sent, expected_bytes = (each[:, section].contiguous().view(kind) for each in (payload.cpu(), theirs))
        assert torch.equal(sent, expected_bytes)
    assert torch.equal(decoded.cpu(), expected)
    whole = torch.cat(on_cpu)
    for part in layout.exact:
        assert torch.equal(expected[part.in_bucket], whole[part.in_bucket])
    if bits > 4:
        for part in layout.quantized:
            values = rounded(whole[part.in_bucket], layout.block_size)
            assert torch.equal(expected[part.in_bucket], values)


@pytest.mark.smallest
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gathers_in_every_dtype(dtype, device):
    check([(4, 2)], 8, dtype, device)


FP32, BF16 = torch.float32, torch.bfloat16
# Bits, (sizes of the group and a node, elements of a block, shapes), the dtype, a shard's place in memory.
GATHERS = [
    *((bits, (*of, MIXED), FP32, lead) for bits, *of, lead in mixed([4, 8], SIZES, [2, 6, 16], [0, 3])),
    *((bits, ((2, 1), 128, LARGE), dtype, 0) for bits, dtype in ((4, FP32), (8, BF16))),
    *(
        (8, (sizes, 16, few), FP32, 0)
        for few in ([(4, 4)], [(1, 17)], [(2, 8), (8, 2)], [(5,), (16, 1)])
        for sizes in ((3, 1), (4, 2))
    ),
]


@pytest.mark.parametrize(("bits", "of", "dtype", "lead"), GATHERS, ids=str)
def test_gathers_of_unlike_shards(bits, of, dtype, lead, device):
    check(of, bits, dtype, device, lead)


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_that_are_not_finite_are_nan(bits, device):
    gather = gather_of(bits, (3, 1), 16, [(4, 16)])
    shards = shards_of(gather, torch.float32, device)
    _, expected = exchange(gather, shards)
    shards[1][17], shards[2][0] = math.inf, math.nan
    _, decoded = exchange(gather, shards)
    is_bad = torch.zeros(12, dtype=torch.bool, device=device)
    is_bad[[5, 8]] = True
    assert decoded.view(12, 16)[is_bad].isnan().all()
    assert torch.equal(decoded.view(12, 16)[~is_bad], expected.view(12, 16)[~is_bad])


def test_what_is_compressed():
    shorter = {dtype: [gather_of(bits, (2, 1)).compresses(dtype) for bits in (4, 8, 16)] for dtype in FLOATS}
    assert shorter == {
        torch.float64: [True, True, True],
        torch.float32: [True, True, True],
        torch.float16: [True, True, False],
        torch.bfloat16: [True, True, False],
    }
    gather = gather_of(8, (2, 1))
    assert not any(map(gather.compresses, (torch.int64, torch.uint8, torch.float8_e4m3fn, torch.complex64)))
    assert not gather_of(8, (2, 1), 16, [(100,), (3, 5)]).compresses(torch.float32)
