"""The tables of the quantized all-reduce's kernels for one bucket: one row per program.

They depend on shapes alone; shard_work and sum_work, which serve a rank's own shard, also on the number of
multiprocessors. A payload holds one shard as ranks exchange it, in three sections: its codes, the
scales of its blocks in bf16, and its exact elements. Every section begins on a multiple of 16 bytes
(layout/blocks.py).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradcomp.layout import BlockLayout

WORK_FIELDS = 9
BLOCKS, COPY = 0, 1  # what a program does: a row's first field
COPY_BLOCK = 2048  # most exact elements that a program copies or averages
THREAD_BYTES = 64  # bytes of a tile in each thread: with 128, two programs fit a multiprocessor, not four
WARP_SIZE = 32
MIN_WARPS, MAX_WARPS = 4, 32
# bucket_work ends in small tiles of a quarter: its last programs end at about the same time, however many
# programs the GPU holds at once.
QUARTER = 4
NUM_QUARTERED = 192  # tiles, at most a quarter of all, that are cut into small ones
# Warps that a multiprocessor's registers must hold at once in average and sum. The few: where tiles are
# masked (blocks aren't a power of two), or where a row's sums pass through all warps (beyond WIDEST_BLOCK).
RESIDENT_WARPS, RESIDENT_FEW_WARPS = 12, 8
WIDEST_BLOCK = 1024  # elements; with RESIDENT_WARPS, some blocks of 2048 spill on sm_100 and sm_120


def padded_size(block_size: int) -> int:
    """Return the number of a tile's columns: block_size, rounded up to a power of two."""
    return 1 << (block_size - 1).bit_length()


def tile_shape(block_size: int, itemsize: int) -> tuple[int, int]:
    """Return (blocks of a tile, warps of its program).

    itemsize: bytes of an element in the arithmetic.
    """
    columns, thread_numel = padded_size(block_size), THREAD_BYTES // itemsize
    num_warps = min(max(columns // (WARP_SIZE * thread_numel), MIN_WARPS), MAX_WARPS)
    return max(1, num_warps * WARP_SIZE * thread_numel // columns), num_warps


def resident_programs(block_size: int, num_warps: int) -> int:
    """Return how many programs of average or sum fit a multiprocessor."""
    is_regular = padded_size(block_size) == block_size <= WIDEST_BLOCK
    return max(1, (RESIDENT_WARPS if is_regular else RESIDENT_FEW_WARPS) // num_warps)


class QuantizedWork:
    """The tables and sizes of one bucket.

    layout: the blocks and shards of the bucket.
    bits: bits of a code, 4 or 8.
    itemsize: bytes of an element in the bucket.
    exact_itemsize: bytes of an exact element in the payloads, itemsize by default.
    num_multiprocessors: of the GPU.

    bucket_work: one row for each program of quantize or dequantize, either of
        (BLOCKS, first element in the bucket, number of elements, number of blocks, first block over all
        shards, byte of the first code in the payloads, byte of the first scale, shard, first block in it)
        (COPY, first element in the bucket, number of elements, byte of the first one in the payloads)
    shard_work: one row for each program of average, equal for all shards, either of
        (BLOCKS, bytes of a payload, blocks of a shard, number of blocks, first block in the shard, byte of
        the first code in a payload, byte of the first scale)
        (COPY, bytes of a payload, number of elements, byte of the first one in a payload)
    sum_work: one row for each program of sum, if all shards have equal tensors, either of
        (BLOCKS, first element in the shard, number of elements, number of blocks, bytes of a payload, byte of
        the first code in a payload, byte of the first scale)
        (COPY, first element in the shard, number of elements, byte of the first one in a payload, bytes of a
        payload)

    Rows have WORK_FIELDS fields; unused ones are 0.
    """

    def __init__(
        self,
        layout: BlockLayout,
        bits: int,
        itemsize: int,
        exact_itemsize: int | None = None,
        num_multiprocessors: int = 132,
    ):
        self.layout, self.bits = layout, bits
        self.code_bytes = layout.code_bytes(bits)
        self._exact_itemsize = exact_itemsize or itemsize
        sections, self.payload_bytes = layout.sections(bits, self._exact_itemsize)
        self._scales_at, self._exact_at = sections[1].start, sections[2].start
        self.tile_blocks, self.num_warps = tile_shape(layout.block_size, max(itemsize, 4))
        places = num_multiprocessors * resident_programs(layout.block_size, self.num_warps)
        copies = list(self._copy_work())
        self.bucket_work = [*copies, *self._block_work(self._bucket_tiles())]
        num_copies = sum(row[3] < self.payload_bytes for row in copies)
        num_runs = sum(run.stored.start < layout.shard_numel for run in layout.runs)
        num_averaged = 2 * -(-layout.exact_numel // COPY_BLOCK)  # each may take as long as two shares
        self.shard_work = list(self._shard_work(self._shares(places, num_averaged)))
        shares = self._shares(places, num_copies + num_runs)
        self.sum_work = list(self._sum_work([*copies, *self._block_work(shares)]))

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

    def _bucket_tiles(self) -> list[int]:
        """Return the first block of each tile of the bucket. No tile has blocks of two shards."""
        num_blocks, total = self.layout.num_blocks, self.layout.num_blocks * self.layout.world_size
        first_small = total - min(NUM_QUARTERED * self.tile_blocks, total // 4)
        small = self.tile_blocks // QUARTER or self.tile_blocks
        return [
            shard + block
            for shard in range(0, total, num_blocks or 1)
            for block in range(0, num_blocks, small)
            if block % self.tile_blocks == 0 or shard + block >= first_small
        ]

    def _shares(self, places: int, others: int) -> list[int]:
        """Return the bounds of the programs of average or sum: shares that fill all places, the longer first.

        places: programs that the GPU holds at once.
        others: programs beside the shares.
        """
        num_blocks = self.layout.num_blocks
        waves = -(-(num_blocks + others * self.tile_blocks) // (places * self.tile_blocks))
        sizes = self.tile_blocks, max(1, self.tile_blocks // QUARTER)
        least, most = (-(-num_blocks // size) for size in sizes)
        count = min(max(waves * places - others, least), most)
        size, longer = divmod(num_blocks, max(count, 1))
        return [*(i * size + min(i, longer) for i in range(count)), num_blocks]

    def _copy_work(self) -> Iterator[tuple[int, ...]]:
        """Yield bucket_work's rows of exact elements. No row has elements of two shards."""
        per_shard = self.layout.exact_numel
        for part in self.layout.exact:
            in_bucket = part.in_bucket.start
            start, end = part.stored.start, part.stored.stop
            while start < end:
                shard, index = divmod(start, per_shard)
                numel = min(COPY_BLOCK, end - start, per_shard - index)
                at = shard * self.payload_bytes + self._exact_at + index * self._exact_itemsize
                yield (COPY, in_bucket, numel, at, 0, 0, 0, 0, 0)
                start, in_bucket = start + numel, in_bucket + numel

    def _shard_work(self, shares: Sequence[int]) -> Iterator[tuple[int, ...]]:
        num_blocks, payload = self.layout.num_blocks, self.payload_bytes
        for first in range(0, self.layout.exact_numel, COPY_BLOCK):
            numel = min(COPY_BLOCK, self.layout.exact_numel - first)
            yield (COPY, payload, numel, self._exact_at + first * self._exact_itemsize, 0, 0, 0, 0, 0)
        for first, last in pairwise(shares):
            codes, scales = first * self.code_bytes, self._scales_at + first * 2
            yield (BLOCKS, payload, num_blocks, last - first, first, codes, scales, 0, 0)

    def _sum_work(self, rows: Iterable[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
        """Yield the rows of the first shard's tiles and exact elements: the other shards' are equal."""
        payload = self.payload_bytes
        for kind, in_bucket, numel, third, _, codes, scales, shard, _ in rows:
            if kind == BLOCKS and shard == 0 and numel:
                yield (BLOCKS, in_bucket, numel, third, payload, codes, scales, 0, 0)
            elif kind == COPY and third < payload:
                yield (COPY, in_bucket, numel, third, payload, 0, 0, 0, 0)


def _cut(first: int, last: int, bounds: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return the parts (start, stop) of first .. last between the bounds within."""
    return pairwise([first, *bounds[bisect_right(bounds, first) : bisect_left(bounds, last)], last])
