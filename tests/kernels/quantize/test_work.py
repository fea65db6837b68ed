"""Test the quantized all-reduce's tables without kernels: the properties that the kernels rely on."""

import functools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradcomp.kernels.quantize import work as quantize_work
from gradcomp.kernels.quantize.work import BLOCKS, COPY, WORK_FIELDS, QuantizedWork, padded_size, tile_shape
from gradcomp.layout import BlockLayout
from tests.depth import everyday
from tests.kernels.waves import MAX_WASTE, MULTIPROCESSORS, mean_wastes, waste

SHAPES = [(3,), (7, 13), (5,), (4, 4), (1, 17), (40, 9), (33,), (2, 8), (64, 70)]


@pytest.fixture
def small_copies(monkeypatch):
    monkeypatch.setattr(quantize_work, "COPY_BLOCK", 8)
    monkeypatch.setattr(quantize_work, "AVERAGED", 8)


@pytest.mark.usefixtures("small_copies")
@pytest.mark.parametrize("is_average", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize(("block_size", "bits"), [(16, 4), (6, 8), (2, 4)])
def test_every_element_is_in_one_program(block_size, bits, world_size, is_average):
    """This holds for all shards, and for the one shard of an average."""
    layout = BlockLayout(SHAPES, block_size, world_size)
    layout = layout.piece(1) if is_average else layout
    work = QuantizedWork(layout, bits, 4, is_average=is_average)
    in_bucket, payload, blocks = Counter(), Counter(), Counter()
    for row in work.rows:
        assert len(row) == WORK_FIELDS
        in_bucket.update(range(row[1], row[1] + row[2]))
        if row[0] == COPY:
            payload.update(range(row[3], row[3] + 4 * row[2]))
            assert row[2] <= 8
            continue
        _, _, numel, num_blocks, first, codes, scales, shard, block = row
        assert 0 < num_blocks <= work.tile_blocks
        assert numel <= num_blocks * block_size
        assert first == shard * layout.num_blocks + block
        assert block + num_blocks <= layout.num_blocks
        blocks.update(range(first, first + num_blocks))
        payload.update(range(codes, codes + num_blocks * work.code_bytes))
        payload.update(range(scales, scales + num_blocks * 2))
    assert in_bucket == Counter(range(layout.numel))
    assert blocks == Counter(range(layout.world_size * layout.num_blocks))
    assert max(payload.values()) == 1
    assert max(payload) < layout.world_size * work.payload_bytes


@pytest.mark.parametrize("block_size", [2, 6, 128, 200, 4096, 100_000])
@pytest.mark.parametrize("itemsize", [4, 8])
def test_tiles_are_powers_of_two_that_hold_a_block(block_size, itemsize):
    blocks, num_warps = tile_shape(block_size, itemsize)
    columns = padded_size(block_size)
    assert block_size <= columns < 2 * block_size
    assert blocks & (blocks - 1) == 0
    assert num_warps in (4, 8, 16, 32)
    assert blocks == 1 or blocks * columns * itemsize == num_warps * 32 * 64
    assert block_size != 128 or (blocks, num_warps) == (64 // itemsize, 4)


@settings(max_examples=everyday(50, 1000))
@given(
    st.lists(st.integers(1, 50_000), min_size=1, max_size=3), st.integers(1, 4), st.sampled_from([1, 7, 132])
)
def test_every_block_is_in_one_program_on_any_gpu(numels, world_size, num_multiprocessors):
    shapes = [*((numel, 1) for numel in numels), (5,), (300, 2)]
    layouts = [BlockLayout(shapes * num_shards, 128, num_shards) for num_shards in (1, world_size)]
    for layout in (*layouts, layouts[1].piece(1)):
        work = QuantizedWork(layout, 4, 4, num_multiprocessors=num_multiprocessors)
        tiles = [(row[4], row[4] + row[3]) for row in work.rows if row[0] == BLOCKS]
        assert all(0 < stop - start <= work.tile_blocks for start, stop in tiles)
        assert [start for start, _ in tiles] == [0, *(stop for _, stop in tiles[:-1])]
        assert tiles[-1][1] == layout.world_size * layout.num_blocks
        spans = sorted((row[1], row[1] + row[2]) for row in work.rows)
        assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
        assert spans[-1][1] == layout.numel


def numels_of_rows(rows) -> list[int]:
    """Return the elements of each program, with the padding of blocks of 128."""
    return [row[2] if row[0] == COPY else row[3] * 128 for row in rows]


RESIDENT = QuantizedWork(BlockLayout([], 128, 1), 8, 4).resident_programs


# Programs are equal at 4 and 8 bits.
@pytest.mark.parametrize("kernel", ["bucket", "shard", "sum"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_programs_end_together(kernel, world_size):
    @functools.cache
    def work_of(bucket, num_multiprocessors):
        if kernel == "sum":  # of a shard of every tensor
            shapes = [(math.prod(shape) // world_size, *(1 for _ in shape[1:])) for shape in bucket]
            layout = BlockLayout(shapes, 128, 1)
        else:
            layout = BlockLayout(bucket, 128, world_size)
            layout = layout.piece(1) if kernel == "shard" else layout
        options = {"num_multiprocessors": num_multiprocessors, "is_average": kernel == "shard"}
        return QuantizedWork(layout, 8, 4, **options)

    def numels_of(bucket, num_multiprocessors):
        return numels_of_rows(work_of(bucket, num_multiprocessors).rows)

    wastes = mean_wastes(numels_of, RESIDENT)
    assert max(wastes.values()) <= MAX_WASTE, wastes


@pytest.mark.parametrize("world_size", [1, 2])
def test_many_small_tensors_leave_no_place_of_average_empty(world_size):
    """Average's programs don't end where tensors do."""
    layout = BlockLayout([(64, 64), (64,)] * 300, 128, world_size).piece(1)
    for num_multiprocessors in MULTIPROCESSORS:
        work = QuantizedWork(layout, 8, 4, num_multiprocessors=num_multiprocessors, is_average=True)
        assert waste(numels_of_rows(work.rows), RESIDENT * num_multiprocessors) < 1.35
