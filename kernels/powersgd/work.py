"""The tables of PowerSGD's kernels for one bucket: where tensors are, and one row of work per program.

They depend on shapes alone: every rank that sees the same shapes gets the same tables. Letters are the
paper's: `M` is an n×m gradient matrix, `P` is n×r, `Q` is m×r, r = min(n, m, rank).

`memory` (private to a rank, the size of the gradients) keeps M of every matrix, one matrix after another,
row-major. Rows are padded with zeros to 16 B, and matrices to 128 B, so every access can be 128 bits wide.

Factor panels (private to a rank) are stored column after column. Columns are padded with zeros to whole
blocks. Every panel has as many columns as the bucket's largest padded rank.

Wires (all-reduced) hold P and Q column after column. Every column and every uncompressed tensor is padded
with zeros to 16 B, so every access can be 128 bits wide:

    p_wire: P_0 | P_1 | ... | uncompressed tensors         q_wire: Q_0 | Q_1 | ...
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradcomp.layout import Matrix, PowerSGDLayout

# The columns of matrix_table. tile.py says what each one holds.
MATRIX_FIELDS = (
    "gradient", "rows", "cols", "rank", "numel", "memory", "memory_cols", "p_panel", "p_stride",
    "q_panel", "q_stride", "random_panel", "p_wire", "q_wire", "draw", "first_norm", "num_norms",
)  # fmt: skip
WORK_FIELDS = 7
TILES, COPY, NEXT_Q = 0, 1, 2  # what a program does: the first field of a row of work

MAX_NORMS = 32  # most programs that compute the norms of one Q's columns
COPY_BLOCK = 2048  # most elements of an uncompressed tensor that a program copies
FACTOR_TILE = 1024  # elements of a factor at once: 128 bits of a 16-bit wire for each of 128 threads
# At first, a program gets one of this many parts of all tiles: about as many as a GPU holds at once. A
# program's start and end take as long as 20 KB, so more of them take longer.
NUM_PROGRAMS = {"project": 384, "back_project": 448, "reconstruct": 576}
LAST_SHARE = 0.45  # of the tiles, for programs that get smaller and smaller
MAX_TILES = 32  # most tiles per program
# Most programs that orthonormalize one P. Each of these programs adds up the partial Gram matrices of all.
MAX_CHUNKS = 32
CHUNK_NUMEL = 4096  # least elements of a long P per program


def padded_rank(rank: int) -> int:
    """Return the number of a panel's columns: a power of two up to 32, then a multiple of 32."""
    return 1 << (rank - 1).bit_length() if rank <= 32 else -(-rank // 32) * 32


def block_shape(itemsize: int, rank: int) -> tuple[int, int]:
    """Return the rows of a block of P, and of a block of Q. rank: padded."""
    if itemsize == 8:
        return 32, 32
    if rank > 8:
        return 64, 64  # the smallest tile for Hopper's matrix instructions
    return 32, 64  # 16 elements for each of 128 threads, or 8 for each of 256


def tile_shapes(itemsize: int, rank: int) -> dict[str, tuple[int, int]]:
    """Return (block, length) of a tile by kernel: project's tiles lie in a block of rows, others' of columns.

    Programs take whole tiles, so tiles are as small as wide accesses and matrix products allow.
    """
    rows, cols = block_shape(itemsize, rank)
    is_dot = rank > 8
    # In FMAs at rank 8 in fp32, a tile of 64 columns takes all registers; in products, of 64 rows or columns.
    is_narrow = is_dot or (rank == 8 and itemsize == 4)
    return {
        "project": (rows, min(cols, 32) if is_narrow else cols),
        "back_project": (cols, 32 if is_dot else 16),
        "reconstruct": (min(cols, 32), rows) if is_dot else (cols, 16),
    }


def wire_stride(length: int, itemsize: int) -> int:
    """Return length, rounded up to 16 bytes: elements from one column of a factor to the next on a wire."""
    vector = 16 // itemsize
    return -(-length // vector) * vector


def factor_tile(rank: int, block: int, itemsize: int) -> tuple[int, int]:
    """Return (rows, columns) of Q that a program copies from the wire at once: 8 elements per thread.

    block: rows of a panel's block.
    itemsize: bytes of an element in the panels.
    """
    cols = min(rank, 16 if itemsize == 4 else 4)
    return max(block, FACTOR_TILE // cols), cols


class PowerSGDWork:
    """The tables and sizes of one bucket.

    layout: the compressed matrices, and the other tensors of the bucket.
    itemsize: bytes of a gradient element.
    wire_itemsize: bytes of an element on the wires.

    matrix_table: one row of MATRIX_FIELDS per matrix.
    project_work, back_project_work, orthonormalize_work, reconstruct_work: one row of WORK_FIELDS per
        program; see `_walk` and the methods below it. Unused fields are 0.
    num_walks: the most programs of one launch that compute partial sums.
    p_wire_numel and other sizes: in elements.
    """

    def __init__(self, layout: PowerSGDLayout, itemsize: int, wire_itemsize: int):
        self.matrices, self._uncompressed = layout.matrices, layout.uncompressed
        self.rank = padded_rank(max((matrix.rank for matrix in self.matrices), default=1))
        self._itemsize, self._wire_itemsize = itemsize, wire_itemsize
        self.block_rows, self.block_cols = block_shape(itemsize, self.rank)
        for matrix in self.matrices:
            _validate(matrix, self.rank)
        self._place()

        self.tiles = tile_shapes(itemsize, self.rank)
        copies = list(self._copies())
        walk = self._walk("project")
        self.project_work = [*walk, *copies]
        self.back_project_work = self._walk("back_project")
        self.orthonormalize_work = list(self._orthonormalize_work())
        self.reconstruct_work = [*self._next_q_work(), *copies, *self._walk("reconstruct")]
        self.num_walks = max(len(walk), len(self.back_project_work))
        self.partial_numel = self.rank * max(
            len(walk) * self.block_rows, len(self.back_project_work) * self.block_cols
        )
        self.grams_numel = len(self.orthonormalize_work) * self.rank**2

    def fields(self, index: int) -> dict[str, int]:
        """Return a matrix's row of matrix_table, by name."""
        return dict(zip(MATRIX_FIELDS, self.matrix_table[index], strict=True))

    def num_row_blocks(self, matrix: Matrix) -> int:
        return -(-matrix.rows // self.block_rows)

    def num_col_blocks(self, matrix: Matrix) -> int:
        return -(-matrix.cols // self.block_cols)

    def _place(self) -> None:
        """Set matrix_table and the sizes of the buffers."""
        itemsize, wire_itemsize = self._itemsize, self._wire_itemsize
        line = 128 // itemsize
        self.memory_numel = self.p_panel_numel = self.q_panel_numel = 0
        self.uncompressed_start = self.q_wire_numel = self.num_norms = 0  # uncompressed tensors follow all P
        # The random panels follow all panels of Q. They replace columns of Q that are zero or not finite.
        all_q = self.rank * sum(self.num_col_blocks(each) * self.block_cols for each in self.matrices)
        self.matrix_table: list[tuple[int, ...]] = []
        for matrix in self.matrices:
            memory_cols = wire_stride(matrix.cols, itemsize)
            p_stride = self.num_row_blocks(matrix) * self.block_rows
            q_stride = self.num_col_blocks(matrix) * self.block_cols
            num_norms = len(self._norm_segments(matrix))
            self.matrix_table.append(
                (
                    matrix.offset, matrix.rows, matrix.cols, matrix.rank, matrix.numel, self.memory_numel,
                    memory_cols, self.p_panel_numel, p_stride, self.q_panel_numel, q_stride,
                    all_q + self.q_panel_numel, self.uncompressed_start, self.q_wire_numel, matrix.draw,
                    self.num_norms, num_norms,
                )
            )  # fmt: skip
            self.memory_numel += -(-matrix.rows * memory_cols // line) * line
            self.p_panel_numel += self.rank * p_stride
            self.q_panel_numel += self.rank * q_stride
            self.uncompressed_start += wire_stride(matrix.rows, wire_itemsize) * matrix.rank
            self.q_wire_numel += wire_stride(matrix.cols, wire_itemsize) * matrix.rank
            self.num_norms += num_norms
        self.q_panel_numel = 2 * all_q
        uncompressed = sum(wire_stride(numel, wire_itemsize) for _, numel in self._uncompressed)
        self.p_wire_numel = self.uncompressed_start + uncompressed

    def _norm_segments(self, matrix: Matrix) -> list[tuple[int, int]]:
        """Return the ranges of column blocks (rows of Q) that _next_q_work's programs process."""
        blocks = self.num_col_blocks(matrix)
        rows, _ = factor_tile(self.rank, self.block_cols, max(self._itemsize, 4))
        step = max(4, rows // self.block_cols, -(-blocks // MAX_NORMS))
        return [(start, min(start + step, blocks)) for start in range(0, blocks, step)]

    def _walk(self, kernel: str) -> list[tuple[int, ...]]:
        """Return the rows of a kernel's programs that walk through all matrices, block by block.

        (TILES, matrix, block, first tile in the block, one past the last, the block's first program, number
        of its programs)

        Programs start in this order, each where an earlier one has ended. Those for LAST_SHARE of the tiles
        get smaller and smaller, so that the last ones end together, however many a GPU holds at once.
        """
        rows: list[tuple[int, ...]] = []
        block_size, length = self.tiles[kernel]
        sizes = [(matrix.rows, matrix.cols) for matrix in self.matrices]
        if kernel != "project":
            sizes = [(cols, rows) for rows, cols in sizes]
        counts = [(-(-across // block_size), -(-along // length)) for across, along in sizes]
        total = left = sum(num_blocks * num_tiles for num_blocks, num_tiles in counts)
        for index, (num_blocks, num_tiles) in enumerate(counts):
            for block in range(num_blocks):
                most = min(1 + int(min(total, left / LAST_SHARE) / NUM_PROGRAMS[kernel]), MAX_TILES)
                first, count = len(rows), -(-num_tiles // most)
                stops = [num_tiles * i // count for i in range(count + 1)]
                rows += [(TILES, index, block, *span, first, count) for span in pairwise(stops)]
                left -= num_tiles
        return rows

    def _orthonormalize_work(self) -> Iterator[tuple[int, ...]]:
        """Yield (matrix, first row, one past the last, the matrix's first program, number of its programs).

        The last program of a matrix also gets the rows of padding in P's panel.
        """
        programs = 0
        for index, matrix in enumerate(self.matrices):
            rows = max(CHUNK_NUMEL // self.rank, -(-matrix.rows // MAX_CHUNKS))
            starts = range(0, matrix.rows, -(-rows // 64) * 64)
            stops = [*starts[1:], self.num_row_blocks(matrix) * self.block_rows]
            for start, stop in zip(starts, stops, strict=True):
                yield index, start, stop, programs, len(starts), 0, 0
            programs += len(starts)

    def _next_q_work(self) -> Iterator[tuple[int, ...]]:
        """Yield (NEXT_Q, matrix, index of the norms, first column block, one past the last)."""
        for index, matrix in enumerate(self.matrices):
            for norm, span in enumerate(self._norm_segments(matrix), self.fields(index)["first_norm"]):
                yield NEXT_Q, index, norm, *span, 0, 0

    def _copies(self) -> Iterator[tuple[int, ...]]:
        """Yield (COPY, first bucket element, first wire element, number of elements, zeros behind them)."""
        wire = self.uncompressed_start
        for offset, numel in self._uncompressed:
            padded = wire_stride(numel, self._wire_itemsize)
            for start in range(0, numel, COPY_BLOCK):
                length = min(COPY_BLOCK, numel - start)
                padding = padded - numel if start + length == numel else 0
                yield COPY, offset + start, wire + start, length, padding, 0, 0
            wire += padded


def _validate(matrix: Matrix, rank: int) -> None:
    # The kernels use 32-bit offsets within a tile (at most 64 rows of M) and within a factor's panel.
    if matrix.cols >= 2**31 // 64:
        raise ValueError(
            f"{matrix}: a matrix may have at most {2**31 // 64 - 1} columns, as PowerSGD's kernels count in "
            "32 bits within a tile. Use another hook"
        )
    if (max(matrix.rows, matrix.cols) + 64) * rank >= 2**31:
        raise ValueError(
            f"{matrix}: its factors of rank {rank} (padded) would have 2³¹ elements or more, but PowerSGD's "
            "kernels count in 32 bits within a factor. Use a smaller rank, or another hook"
        )
