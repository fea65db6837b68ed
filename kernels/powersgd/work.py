"""The tables of PowerSGD's kernels for one bucket: where tensors are, and what every program works on.

Arithmetic on shapes alone: every rank that sees the same shapes gets the same tables. Paper letters:
`M` n×m gradient matrix, `P` n×r, `Q` m×r, r = min(n, m, rank).

Memory `M` (private): matrix after matrix, row-major, rows padded with zeros to 16 B, matrices to 128 B, so
that every access to it can be 128 bits wide; it is the size of the gradients.

Factor panels (private): column after column, columns padded with zeros to whole blocks, and as many columns
as the bucket's largest padded rank. Wires (all-reduced): P and Q column after column, every column and every
uncompressed tensor padded with zeros to 16 B, so that all accesses can be 128 bits wide:

    p_wire: P_0 | P_1 | ... | uncompressed tensors         q_wire: Q_0 | Q_1 | ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradcomp.layout import Matrix, PowerSGDLayout

# The columns of matrix_table, which tile.py describes.
MATRIX_FIELDS = (
    "gradient", "rows", "cols", "rank", "numel", "memory", "memory_cols", "p_panel", "p_stride",
    "q_panel", "q_stride", "random_panel", "p_wire", "q_wire", "first_random", "first_norm", "num_norms",
)  # fmt: skip
WORK_FIELDS = 7
REDUCE, COPY = 0, 1  # work types of the packing kernel
NEXT_Q, TILES, UNPACK = 0, 1, 2  # work types of the reconstructing kernel

MAX_NORMS = 32  # programs that compute the norms of one Q's columns together
COPY_BLOCK = 2048  # elements of uncompressed tensors that a program copies
FACTOR_TILE = 1024  # elements of a factor: 128 bits of a 16-bit wire for each of 128 threads
# Enough programs for every multiprocessor to have several; more would only mean more partial sums.
NUM_PROGRAMS = 1024
MAX_TILES = 16  # tiles that one program processes
# Programs that orthonormalize one P, each of which adds up all their partial Gram matrices.
MAX_CHUNKS = 32
CHUNK_NUMEL = 4096  # elements of P that are worth a program


def padded_rank(rank: int) -> int:
    """Return the number of columns of a kernel's panel: a power of two up to 32, then a multiple of 32."""
    return 1 << (rank - 1).bit_length() if rank <= 32 else -(-rank // 32) * 32


def block_shape(itemsize: int, rank: int) -> tuple[int, int]:
    """Return (BLOCK_ROWS, BLOCK_COLS) for gradients of itemsize bytes and a padded rank."""
    if itemsize == 8:
        return 32, 32
    if rank > 8:
        return 64, 64  # the least that Hopper's matrix instructions take
    return 32, 64  # 16 elements for each of 128 threads, or 8 for each of 256


def wire_stride(length: int, itemsize: int) -> int:
    """Return the number of elements from one column of a factor to the next on a wire of this itemsize."""
    vector = 16 // itemsize
    return -(-length // vector) * vector


def factor_tile(rank: int, block: int, itemsize: int) -> tuple[int, int]:
    """Return (rows, columns) of a factor that a program packs, or unpacks, at once: 8 elements per thread.

    rank: padded. block: rows of a partial sum or panel block. itemsize: bytes of an element of the panels.
    """
    cols = min(rank, 16 if itemsize == 4 else 4)  # in fp64, packing 8 spills beyond rank 32
    return max(block, FACTOR_TILE // cols), cols


class PowerSGDWork:
    """The tables and sizes of one bucket.

    matrices: the compressed matrices. uncompressed: (offset, numel) of the other tensors in the bucket.
    rank: matrix_approximation_rank. itemsize: bytes per gradient element.
    wire_itemsize: bytes per element of the wires, if they differ.

    matrix_table: one row of MATRIX_FIELDS per matrix. The other tables have one row of WORK_FIELDS per
    program (unused fields are 0), see `_project_work` and so on. Sizes are in elements.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        uncompressed: Sequence[tuple[int, int]],
        *,
        rank: int,
        itemsize: int,
        wire_itemsize: int | None = None,
    ):
        if rank < 1:
            raise ValueError(f"rank is {rank}; it has to be at least 1")
        self.matrices = tuple(matrices)
        self.uncompressed = tuple((offset, numel) for offset, numel in uncompressed if numel)
        self.ranks = tuple(min(matrix.rows, matrix.cols, rank) for matrix in self.matrices)
        self.rank = padded_rank(max(self.ranks, default=1))
        self._itemsize, self._wide = itemsize, max(itemsize, 4)
        self._wire_itemsize = wire_itemsize or itemsize
        self.block_rows, self.block_cols = block_shape(itemsize, self.rank)
        for matrix in self.matrices:
            _validate(matrix, self.rank)
        self._place()

        num_tiles = sum(self.num_row_blocks(matrix) * self.num_col_blocks(matrix) for matrix in self.matrices)
        self._tiles_per_program = min(max(-(-num_tiles // NUM_PROGRAMS), 1), MAX_TILES)
        self.project_work = list(self._project_work())
        self.back_project_work = list(self._back_project_work())
        self.pack_work = [
            *self._reduce_work(self.project_work, self.block_rows, "rows", "p_wire"),
            *((COPY, *copy, 0, 0) for copy in self._copies()),
        ]
        self.reduce_work = list(self._reduce_work(self.back_project_work, self.block_cols, "cols", "q_wire"))
        self.orthonormalize_work = list(self._orthonormalize_work())
        self.orthonormalize_numel = 3 * len(self.orthonormalize_work) * self.rank * (self.rank + 1)
        self.reconstruct_work = [
            *self._next_q_work(),
            *((TILES, *row[:4], 0, 0) for row in self.project_work),
            *((UNPACK, *copy, 0, 0) for copy in self._copies()),
        ]
        self.partial_numel = self.rank * max(
            len(self.project_work) * self.block_rows, len(self.back_project_work) * self.block_cols
        )

    @classmethod
    def of(cls, layout: PowerSGDLayout, itemsize: int, wire_itemsize: int | None = None) -> PowerSGDWork:
        """Make the tables of a bucket with this layout."""
        rank = max((matrix.rank for matrix in layout.matrices), default=1)
        return cls(
            layout.matrices, layout.uncompressed, rank=rank, itemsize=itemsize, wire_itemsize=wire_itemsize
        )

    def fields(self, index: int) -> dict[str, int]:
        """Return a matrix's row of matrix_table by name."""
        return dict(zip(MATRIX_FIELDS, self.matrix_table[index], strict=True))

    def num_row_blocks(self, matrix: Matrix) -> int:
        return -(-matrix.rows // self.block_rows)

    def num_col_blocks(self, matrix: Matrix) -> int:
        return -(-matrix.cols // self.block_cols)

    def _place(self) -> None:
        """Fill matrix_table and the sizes of the buffers."""
        itemsize, wire_itemsize = self._itemsize, self._wire_itemsize
        line = 128 // itemsize
        memory = p_panel = q_panel = p_wire = q_wire = random_numel = norms = 0
        rows: list[tuple[int, ...]] = []
        for matrix, rank in zip(self.matrices, self.ranks, strict=True):
            memory_cols = wire_stride(matrix.cols, itemsize)
            p_stride = self.num_row_blocks(matrix) * self.block_rows
            q_stride = self.num_col_blocks(matrix) * self.block_cols
            num_norms = len(self._norm_segments(matrix))
            rows.append(
                (
                    matrix.offset, matrix.rows, matrix.cols, rank, matrix.numel, memory, memory_cols,
                    p_panel, p_stride, q_panel, q_stride, q_panel, p_wire, q_wire, random_numel,
                    norms, num_norms,
                )
            )  # fmt: skip
            memory += -(-matrix.rows * memory_cols // line) * line
            p_panel += self.rank * p_stride
            q_panel += self.rank * q_stride
            p_wire += wire_stride(matrix.rows, wire_itemsize) * rank
            q_wire += wire_stride(matrix.cols, wire_itemsize) * rank
            random_numel += matrix.cols * rank
            norms += num_norms
        # Behind them are the random panels, which replace columns of Q that are zero or not finite.
        random = MATRIX_FIELDS.index("random_panel")
        self.matrix_table = [(*row[:random], row[random] + q_panel, *row[random + 1 :]) for row in rows]
        self.memory_numel = memory
        self.p_panel_numel = p_panel
        self.q_panel_numel = 2 * q_panel
        self.uncompressed_start = p_wire
        self.p_wire_numel = p_wire + sum(wire_stride(numel, wire_itemsize) for _, numel in self.uncompressed)
        self.q_wire_numel = q_wire
        self.num_norms = norms

    def _norm_segments(self, matrix: Matrix) -> list[tuple[int, int]]:
        """Return the ranges of column blocks into which _next_q_work divides Q's rows."""
        blocks = self.num_col_blocks(matrix)
        rows, _ = factor_tile(self.rank, self.block_cols, self._wide)
        return _ranges(blocks, max(4, rows // self.block_cols, -(-blocks // MAX_NORMS)))

    def _project_work(self) -> Iterator[tuple[int, ...]]:
        """Yield (matrix, row block, first column block, one past the last), in the order of the partial P."""
        for index, matrix in enumerate(self.matrices):
            for block in range(self.num_row_blocks(matrix)):
                for span in _ranges(self.num_col_blocks(matrix), self._tiles_per_program):
                    yield index, block, *span, 0, 0, 0

    def _back_project_work(self) -> Iterator[tuple[int, ...]]:
        """Yield (matrix, column block, first row block, one past the last), in the order of the partial Q."""
        for index, matrix in enumerate(self.matrices):
            for block in range(self.num_col_blocks(matrix)):
                for span in _ranges(self.num_row_blocks(matrix), self._tiles_per_program):
                    yield index, block, *span, 0, 0, 0

    def _orthonormalize_work(self) -> Iterator[tuple[int, ...]]:
        """Yield (matrix, first row of P, one past the last, the matrix's first program, their number).

        The last program's rows include the panel's padding.
        """
        programs = 0
        for index, matrix in enumerate(self.matrices):
            rows = max(CHUNK_NUMEL // self.rank, -(-matrix.rows // MAX_CHUNKS))
            starts = range(0, matrix.rows, -(-rows // 64) * 64)
            stops = [*starts[1:], self.num_row_blocks(matrix) * self.block_rows]
            for start, stop in zip(starts, stops, strict=True):
                yield index, start, stop, programs, len(starts), 0, 0
            programs += len(starts)

    def _reduce_work(
        self, work: Sequence[tuple[int, ...]], block_size: int, length: str, wire: str
    ) -> Iterator[tuple[int, ...]]:
        """Yield rows of _pack_kernel for a factor, each for several of the blocks that work walks through.

        (REDUCE, first element on the wire, rows, rank, first partial sum, partial sums of a block, all rows)
        """
        rows, _ = factor_tile(self.rank, block_size, self._wide)
        starts = [i for i, row in enumerate(work) if i == 0 or row[:2] != work[i - 1][:2]]
        for start, stop in pairwise([*starts, len(work)]):
            index, block = work[start][:2]
            first = block * block_size
            if first % rows == 0:
                fields = self.fields(index)
                yield (
                    REDUCE, fields[wire] + first, min(rows, fields[length] - first), fields["rank"],
                    start, stop - start, fields[length],
                )  # fmt: skip

    def _next_q_work(self) -> Iterator[tuple[int, ...]]:
        """Yield (NEXT_Q, matrix, index of the norms, first column block, one past the last)."""
        norm = 0
        for index, matrix in enumerate(self.matrices):
            for span in self._norm_segments(matrix):
                yield NEXT_Q, index, norm, *span, 0, 0
                norm += 1

    def _copies(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (element of the bucket, element of the wire, number of elements, zeros behind them)."""
        wire = self.uncompressed_start
        for offset, numel in self.uncompressed:
            padded = wire_stride(numel, self._wire_itemsize)
            for start in range(0, numel, COPY_BLOCK):
                length = min(COPY_BLOCK, numel - start)
                padding = padded - numel if start + length == numel else 0
                yield offset + start, wire + start, length, padding
            wire += padded


def _validate(matrix: Matrix, rank: int) -> None:
    if not 0 < matrix.numel <= matrix.rows * matrix.cols:
        raise ValueError(f"{matrix}: numel has to lie between 1 and rows · cols")
    # The kernels count in 32 bits within a tile, up to 64 rows of the gradient, and within a factor's panel.
    if matrix.cols >= 2**31 // 64:
        raise ValueError(f"{matrix}: a matrix may have at most {2**31 // 64 - 1} columns")
    if (max(matrix.rows, matrix.cols) + 64) * rank >= 2**31:
        raise ValueError(f"{matrix}: its factors of rank {rank} (padded) would have 2³¹ elements or more")


def _ranges(stop: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, stop)) for start in range(0, stop, step)]
