"""Test PowerSGD's tables without kernels: the properties that the kernels rely on."""

import functools
import math
from collections import Counter
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradcomp.kernels.powersgd import back_project, project, reconstruct
from gradcomp.kernels.powersgd import work as powersgd_work
from gradcomp.kernels.powersgd.work import (
    COPY,
    MAX_NORMS,
    NEXT_Q,
    TILES,
    PowerSGDWork,
    padded_rank,
    wire_stride,
)
from gradcomp.layout import PowerSGDLayout
from tests.depth import everyday
from tests.kernels.waves import mean_wastes, times_streaming

SHAPES = [(1, 300), (300, 1), (31, 33), (32, 64), (33, 65), (10, 5000), (5000, 10), (257, 129)]
OTHERS = [(3,), (5000,)]


@pytest.fixture
def few_programs(monkeypatch):
    """Let every program walk through several tiles."""
    monkeypatch.setattr(powersgd_work, "NUM_PROGRAMS", dict.fromkeys(powersgd_work.NUM_PROGRAMS, 3))


def work_of(rank: int, itemsize: int = 4) -> PowerSGDWork:
    return PowerSGDWork(PowerSGDLayout([OTHERS[0], *SHAPES, OTHERS[1]], rank, 0), itemsize, itemsize)


@settings(max_examples=everyday(50, 1000))
@given(
    st.just(SHAPES) | st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=3),
    st.sampled_from([1, 3, 8, 16, 32, 100]),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([3, 500]),
)
def test_every_tile_of_any_matrices_is_worked_on_once(shapes, rank, itemsize, num_programs):
    """And the programs whose partial sums are added up are all programs of their block."""
    programs = dict.fromkeys(powersgd_work.NUM_PROGRAMS, num_programs)
    with mock.patch.object(powersgd_work, "NUM_PROGRAMS", programs):
        work = PowerSGDWork(PowerSGDLayout(shapes, rank, 0), itemsize, itemsize)
    for kernel, (block, length) in work.tiles.items():
        sizes = [(each.rows, each.cols) for each in work.matrices]
        if kernel != "project":
            sizes = [(cols, rows) for rows, cols in sizes]
        tiles = {
            (i, across, along)
            for i, (size, other_size) in enumerate(sizes)
            for across in range(-(-size // block))
            for along in range(-(-other_size // length))
        }
        rows = [row for row in getattr(work, f"{kernel}_work") if row[0] == TILES]
        walked = [(i, across, along) for _, i, across, *span, _, _ in rows for along in range(*span)]
        assert Counter(walked) == dict.fromkeys(tiles, 1)
        of_block = {}
        for index, (_, i, across, _, _, first, count) in enumerate(rows):
            of_block.setdefault((i, across), []).append((index, first, count))
        for programs_of_one in of_block.values():
            first, count = programs_of_one[0][0], len(programs_of_one)
            assert programs_of_one == [(first + i, first, count) for i in range(count)]


def resident_programs(kernel: str, rank: int) -> int:
    """Return how many programs of a kernel in fp32 fit a multiprocessor."""
    if kernel == "project":
        options = project.launch_options(rank, torch.float32)
        return 65536 // (options["maxnreg"] * 32 * options["num_warps"])
    module = back_project if kernel == "back_project" else reconstruct
    return module.PROGRAMS.get(rank, 2)


@pytest.mark.parametrize("rank", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(
    ("kernel", "most"), [("project", 1.82), ("back_project", 2.03), ("reconstruct", 2.23)]
)
def test_few_programs_end_together(kernel, most, rank):
    """Many programs spend their time on starts; few of them end one after another."""

    @functools.cache
    def numels_of(bucket, _):
        work = PowerSGDWork(PowerSGDLayout(bucket, rank, 2.0), 4, 4)
        sizes = {TILES: math.prod(work.tiles[kernel]), NEXT_Q: work.block_cols * work.rank}
        rows = getattr(work, f"{kernel}_work")
        return [row[3] if row[0] == COPY else (row[4] - row[3]) * sizes[row[0]] for row in rows]

    times = mean_wastes(numels_of, resident_programs(kernel, rank), times_streaming)
    assert max(times.values()) <= most, times


def elements_of(work: PowerSGDWork, factor: str, itemsize: int) -> Counter:
    """Return how often a launch writes each element of a wire."""
    written = Counter()
    rows, length, block_size = (
        (work.project_work, "rows", work.block_rows)
        if factor == "p"
        else (work.back_project_work, "cols", work.block_cols)
    )
    for index, (kind, a, b, c, d, first, _) in enumerate(rows):
        if kind == COPY:
            assert d < 16 // itemsize
            written.update(range(b, b + c + d))
        elif index == first:  # one program of every block adds up
            fields = work.fields(a)
            stride = wire_stride(fields[length], itemsize)
            assert fields[f"{factor}_wire"] % (16 // itemsize) == 0
            for column in range(fields["rank"]):
                start = fields[f"{factor}_wire"] + column * stride
                stop = min((b + 1) * block_size, stride)
                written.update(range(start + b * block_size, start + stop))
    return written


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("rank", [1, 3, 16, 100])
@pytest.mark.usefixtures("few_programs")
def test_wires_are_filled_once_without_gaps(rank, itemsize):
    work = work_of(rank, itemsize)
    assert elements_of(work, "p", itemsize) == dict.fromkeys(range(work.p_wire_numel), 1)
    assert elements_of(work, "q", itemsize) == dict.fromkeys(range(work.q_wire_numel), 1)


@pytest.mark.parametrize("shape", [(10, 50257), (50257, 10), (1, 10**6), (10**6, 1), (4096, 4096)])
def test_every_aspect_ratio_stays_parallel(shape):
    """There are enough programs for all of a GPU's multiprocessors."""
    work = PowerSGDWork(PowerSGDLayout([shape], 4, 0), 4, 4)
    for programs in (work.project_work, work.back_project_work, work.reconstruct_work):
        assert len(programs) >= 150


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_the_memory_is_the_size_of_the_gradients(itemsize):
    """Each row is padded to a multiple of 16 bytes at most, each matrix to a multiple of 128 bytes."""
    vector = 16 // itemsize
    bound = sum(n * (m + vector - 1) + 128 // itemsize for n, m in SHAPES)
    assert sum(n * m for n, m in SHAPES) <= work_of(4, itemsize).memory_numel <= bound


@pytest.mark.parametrize("cols", [1, 64, 50257, 10**6])
def test_norms_fit_their_table(cols):
    assert 1 <= PowerSGDWork(PowerSGDLayout([(2, cols)], 1, 0), 4, 4).num_norms <= MAX_NORMS


def test_padded_ranks():
    ranks = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 17: 32, 32: 32, 33: 64, 64: 64, 65: 96}
    assert {rank: padded_rank(rank) for rank in ranks} == ranks


@pytest.mark.parametrize(
    ("shape", "rank", "message"), [((1, 2**26), 1, "columns"), ((2**26, 20), 20, "factors of rank 32")]
)
def test_matrices_that_are_too_large(shape, rank, message):
    with pytest.raises(ValueError, match=message):
        PowerSGDWork(PowerSGDLayout([shape], rank, 0), 4, 4)


def test_the_layout_and_its_work_agree():
    """They agree on the wires' lengths and on where uncompressed tensors start."""
    layout = PowerSGDLayout([(31, 33), (7,), (4, 300), (65, 2, 3), (31, 33)], 4, 0.5)
    assert [matrix.rank for matrix in layout.matrices] == [4, 4, 4, 4]
    work = PowerSGDWork(layout, 4, 4)
    # Columns and uncompressed tensors are padded to multiples of 4: P has 31, 4 or 65 rows, Q 33, 300 or 6.
    assert work.p_wire_numel == layout.wire_numel + 4 * (1 + 0 + 3 + 1) + 1
    assert work.q_wire_numel == layout.q_numel + 4 * (3 + 0 + 2 + 3)
    assert work.uncompressed_start == layout.p_numel + 4 * (1 + 0 + 3 + 1)
