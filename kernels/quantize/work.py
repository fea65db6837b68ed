"""The tables of the quantized all-reduce's kernels: one row per program.

They depend on shapes and on the number of multiprocessors. A payload holds one shard as ranks exchange it, in
three sections: its codes, the scales of its blocks in bf16, and its exact elements. Every section begins on a
multiple of 16 bytes (layout.py).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradcomp.layout import BlockLayout

WORK_FIELDS = 9
BLOCKS, COPY = 0, 1  # what a program does: a row's first field
COPY_BLOCK = 2048  # most exact elements that a program copies or averages
AVERAGED = 1024  # most exact elements that a program averages in codes: as long as a small share
THREAD_BYTES = 64  # bytes of a tile in each thread: with 128, two programs fit a multiprocessor, not four
WARP_SIZE = 32
MIN_WARPS, MAX_WARPS = 4, 32
# Warps that a multiprocessor's registers must hold at once. The few: where tiles are masked, as blocks aren't
# a power of two.
RESIDENT_WARPS, RESIDENT_FEW_WARPS = 20, 16


def padded_size(block_size: int) -> int:
    """Return the number of a tile's columns: block_size, rounded up to a power of two."""
    return 1 << (block_size - 1).bit_length()


def tile_shape(block_size: int, itemsize: int) -> tuple[int, int]:
    """Return (blocks of a tile, warps of its program). itemsize: of the arithmetic."""
    columns, thread_numel = padded_size(block_size), THREAD_BYTES // itemsize
    num_warps = min(max(columns // (WARP_SIZE * thread_numel), MIN_WARPS), MAX_WARPS)
    return max(1, num_warps * WARP_SIZE * thread_numel // columns), num_warps


class QuantizedWork:
    """The table of one launch.

    layout: the blocks and shards of the bucket; of a sum the one shard.
    bits: bits of a code, 4 or 8.
    itemsize: bytes of an element in the bucket.
    exact_itemsize: bytes of an exact element in the payloads, itemsize by default.
    num_multiprocessors: of the GPU.
    is_average: True for a sum in codes, which nobody places in a bucket.

    rows: one row for each program, either of
        (BLOCKS, first element in the bucket, number of elements, number of blocks, first block over all
        shards, byte of the first code in the payloads, byte of the first scale, shard, first block in it)
        (COPY, first element in the bucket, number of elements, byte of the first one in the payloads)

    Rows have WORK_FIELDS fields; unused ones are 0.
    """

    def __init__(
        self, layout: BlockLayout, bits: int, itemsize: int, exact_itemsize: int | None = None,
        num_multiprocessors: int = 132, *, is_average: bool = False,
    ):  # fmt: skip
        self.layout, self.bits = layout, bits
        self.code_bytes = layout.code_bytes(bits)
        self._exact_itemsize = exact_itemsize or itemsize
        sections, self.payload_bytes = layout.sections(bits, self._exact_itemsize)
        self._scales_at, self._exact_at = sections[1].start, sections[2].start
        self.tile_blocks, self.num_warps = tile_shape(layout.block_size, max(itemsize, 4))
        is_masked = padded_size(layout.block_size) != layout.block_size
        warps = RESIDENT_FEW_WARPS if is_masked else RESIDENT_WARPS
        self.resident_programs = max(1, warps // self.num_warps)
        self._places = num_multiprocessors * self.resident_programs
        copies = list(self._copy_work(AVERAGED if is_average else COPY_BLOCK))
        total = layout.world_size * layout.num_blocks
        starts = range(0, total, max(1, layout.num_blocks))
        shares = self._shares(total, len(copies) + len(layout.runs) + layout.world_size - 1)
        self.rows = [*copies, *self._block_work(sorted({*shares, *starts}))]

    def _block_work(self, tiles: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield the rows of every run's tiles, then of the padding blocks behind the last run.

        tiles: the first blocks of tiles. A run also ends a tile.
        """
        size, num_blocks = self.layout.block_size, self.layout.num_blocks
        end = 0
        for run in self.layout.runs:
            first, end = run.stored.start // size, -(-run.stored.stop // size)
            for start, stop in _cut(first, end, tiles):
                done = start * size - run.stored.start
                numel = min(run.stored.stop, stop * size) - start * size
                yield self._tile(run.in_bucket.start + done, numel, start, stop)
        total = self.layout.world_size * num_blocks
        if end < total:
            yield from (self._tile(0, 0, start, stop) for start, stop in _cut(end, total, tiles))

    def _tile(self, in_bucket: int, numel: int, start: int, stop: int) -> tuple[int, ...]:
        shard, block = divmod(start, self.layout.num_blocks)
        payload = shard * self.payload_bytes
        codes, scales = payload + block * self.code_bytes, payload + self._scales_at + block * 2
        return (BLOCKS, in_bucket, numel, stop - start, start, codes, scales, shard, block)

    def _shares(self, num_blocks: int, others: int) -> list[int]:
        """Return the bounds of shares of blocks: programs that fill all places, the longer first.

        others: programs beside the shares.
        """
        waves = -(-(num_blocks + others * self.tile_blocks) // (self._places * self.tile_blocks))
        sizes = self.tile_blocks, max(1, self.tile_blocks // 4)
        least, most = (-(-num_blocks // size) for size in sizes)
        count = min(max(waves * self._places - others, least), most)
        size, longer = divmod(num_blocks, max(count, 1))
        return [*(i * size + min(i, longer) for i in range(count)), num_blocks]

    def _copy_work(self, most: int) -> Iterator[tuple[int, ...]]:
        """Yield the rows of exact elements, of up to `most` each. No row has elements of two shards."""
        per_shard = self.layout.exact_numel
        for part in self.layout.exact:
            start, offset = part.stored.start, part.in_bucket.start - part.stored.start
            while start < part.stored.stop:
                shard, index = divmod(start, per_shard)
                numel = min(most, part.stored.stop - start, per_shard - index)
                at = shard * self.payload_bytes + self._exact_at + index * self._exact_itemsize
                yield (COPY, start + offset, numel, at, 0, 0, 0, 0, 0)
                start += numel


def _cut(first: int, last: int, bounds: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return the parts (start, stop) of first .. last between the bounds within."""
    return pairwise([first, *bounds[bisect_right(bounds, first) : bisect_left(bounds, last)], last])
