"""The tables of the kernel that packs a PowerSGD factor as codes. They depend on shapes alone.

No wire is written. Each program computes one tile of the wire's blocks directly from partial sums: from the
partial sums of every matrix with a factor in the tile.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..quantize.work import BLOCKS, COPY, QuantizedWork
from . import work as powersgd_work
from .work import PowerSGDWork, wire_stride

if TYPE_CHECKING:
    from gradcomp.layout import BlockLayout

BITS = 8
FACTOR_FIELDS = 6


class FactorCodesWork:
    """The tables of one factor of a bucket.

    work: the bucket's tables.
    factor: "p" or "q".
    layout: the blocks of the factor's wire; for P, with the uncompressed tensors behind the factors.
    itemsize: bytes of an element of the arithmetic, and of the wire.
    exact_itemsize: bytes of an exact element in the payloads.

    factors: one row of FACTOR_FIELDS per matrix:
        (first element on the wire, elements on the wire, elements from one column to the next, rows of the
        factor, first partial sum, partial sums of a block of rows)
    work: one row per program, either of
        (BLOCKS, first element on the wire, number of elements, number of blocks, first row of factors, byte
        of the first code in the payloads, byte of the first scale, one past the last row of factors, 0)
        (COPY, first element in the bucket, number of elements, byte of the first one in the payloads)
    """

    def __init__(
        self, work: PowerSGDWork, factor: str, layout: BlockLayout, itemsize: int, exact_itemsize: int
    ):
        codes = QuantizedWork(layout, BITS, itemsize, exact_itemsize)
        self.factors = list(_factors(work, factor, itemsize))
        self.work = list(self._block_work(codes.bucket_work))
        if factor == "p":
            self.work += _copy_work(work, layout, exact_itemsize)

    def _block_work(self, tiles: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
        """Yield the rows of quantize's tiles, each with its range of factors."""
        starts = [row[0] for row in self.factors]
        stops = [row[0] + row[1] for row in self.factors]
        for row in tiles:
            if row[0] == BLOCKS:
                start, numel = row[1:3]
                # A tile beyond the last factor has no elements: its blocks are zeros.
                first = bisect_right(stops, start) if numel else 0
                last = bisect_left(starts, start + numel) if numel else 0
                yield (*row[:4], first, *row[5:7], last, 0)


def is_packed_as_codes(work: PowerSGDWork, block_size: int) -> bool:
    """Return whether both factors are long enough to be quantized. Shorter ones are sent exactly."""
    return min(work.uncompressed_start, work.q_wire_numel) >= block_size


def _factors(work: PowerSGDWork, factor: str, itemsize: int) -> Iterator[tuple[int, ...]]:
    programs, length = (work.project_work, "rows") if factor == "p" else (work.back_project_work, "cols")
    per_block, per_matrix = Counter(row[:2] for row in programs), Counter(row[0] for row in programs)
    first = 0
    for index in range(len(work.matrices)):
        fields = work.fields(index)
        stride = wire_stride(fields[length], itemsize)
        yield (
            fields[f"{factor}_wire"], fields["rank"] * stride, stride, fields[length],
            first, per_block[index, 0],
        )  # fmt: skip
        first += per_matrix[index]


def _copy_work(work: PowerSGDWork, layout: BlockLayout, exact_itemsize: int) -> Iterator[tuple[int, ...]]:
    """Yield the rows of exact elements. No row has elements of two shards."""
    sections, payload_bytes = layout.sections(BITS, exact_itemsize)
    for work_type, in_bucket, on_wire, numel, *_ in work.pack_work:
        if work_type != powersgd_work.COPY:
            continue
        start, stop = on_wire - work.uncompressed_start, on_wire - work.uncompressed_start + numel
        while start < stop:
            shard, index = divmod(start, layout.exact_numel)
            length = min(stop - start, layout.exact_numel - index)
            at = shard * payload_bytes + sections[2].start + index * exact_itemsize
            yield (COPY, in_bucket, length, at, 0, 0, 0, 0, 0)
            start, in_bucket = start + length, in_bucket + length
