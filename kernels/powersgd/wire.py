"""Fill PowerSGD's wires: add up partial factors, and copy uncompressed tensors.

The programs that compute a block of P or Q store partial sums. The last one of them to finish adds these up,
in the order of their indices. So which one is last changes no bits, and no launch waits for another one.
On ROCm a second launch adds them up, to the same bits.
"""

from typing import Any

import triton
import triton.language as tl

from ...device import is_rocm
from ..launch import Launch
from ..tile import copy_tile, round_to
from .tile import COPY_BLOCK, SHRINK, factor_on_wire


def launches_that_add_up(*arguments: Any, **constants: Any) -> list[Launch]:
    """Return the launches of a kernel with the constants STORES and ADDS: one, on ROCm two.

    STORES, ADDS: whether the launch stores partial sums, and whether it adds them up.
    arguments, constants: see Launch.

    On ROCm a program can't tell that it is a block's last one. The atomic addition is miscompiled there
    (gfx942, Triton 3.6 and 3.7): it waits neither for the write-back of its cache nor for the stores of the
    program's other waves, so partial sums might be read too early.
    """
    parts = [(True, False), (False, True)] if is_rocm() else [(True, True)]
    return [Launch(*arguments, STORES=stores, ADDS=adds, **constants) for stores, adds in parts]


@triton.jit
def is_adding(arrived_ptr, work, STORES: tl.constexpr):
    """Return whether this program adds up its block's partial sums.

    If STORES, it is the last one of the block to have stored its partial sum and called this; otherwise the
    first one.

    arrived_ptr: [programs], int32. A block's programs count themselves at the place of the first one. The
        count is zero before a launch, and after it.
    work: the program's row, see PowerSGDWork._walk.
    """
    if STORES:
        # One thread counts. The barrier puts the other threads' stores before its release; atomic_add has a
        # barrier that puts their loads after its acquire.
        tl.debug_barrier()
        count_ptr = arrived_ptr + tl.load(work + 5)
        adds = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == tl.load(work + 6) - 1
        if adds:
            tl.store(count_ptr, 0)
    else:
        adds = tl.load(work + 5) == tl.program_id(0)
    return adds


@triton.jit
def add_up(
    partial_ptr, wire_ptr, matrix_ptr, work, scale,
    LENGTH: tl.constexpr, WIRE: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write scale · (sum of a block's partial sums, in the order of their indices) to the wire.

    partial_ptr: [programs, RANK, BLOCK], panels column after column, times SHRINK. A float16 wire gets the
        sums without SHRINK, any other wire with it.
    wire_ptr: see work.py. A column's last block also writes the zeros behind the column.
    work: the row of one of the block's programs.
    LENGTH, WIRE: columns of matrix_table: the factor's rows, and its first element on the wire.
    """
    ACC: tl.constexpr = partial_ptr.dtype.element_ty
    TYPE: tl.constexpr = wire_ptr.dtype.element_ty
    GROW: tl.constexpr = 1.0 / SHRINK if TYPE == tl.float16 else 1.0
    RANK_BLOCK: tl.constexpr = min(RANK, 32)
    factor = (tl.full((), GROW, tl.float64) * scale).to(ACC)
    wire, stride, length, r = factor_on_wire(wire_ptr, matrix_ptr, LENGTH, WIRE)
    offs = tl.arange(0, BLOCK)[None, :]
    offs_row = tl.load(work + 2).to(tl.int32) * BLOCK + offs
    partial = partial_ptr + tl.load(work + 5) * (RANK * BLOCK) + offs
    wire += offs_row
    for rank_start in range(0, RANK, RANK_BLOCK):
        offs_rank = rank_start + tl.arange(0, RANK_BLOCK)[:, None]
        mask = (offs_row < stride) & (offs_rank < r)
        acc = tl.zeros((RANK_BLOCK, BLOCK), ACC)
        # Unrolled, so that four loads are under way at once.
        for i in tl.range(0, tl.load(work + 6).to(tl.int32), loop_unroll_factor=4):
            acc += tl.load(partial + i * (RANK * BLOCK) + offs_rank * BLOCK, mask=mask, other=0.0)
        # If P has NaN, sums beyond the last row may be NaN too.
        values = round_to(tl.where(offs_row < length, acc * factor, 0.0), TYPE)
        tl.store(wire + offs_rank * stride, values, mask=mask)


@triton.jit
def copy_to_wire(grad_ptr, wire_ptr, work, scale):
    """Write scale · gradient to the wire, and zeros behind it.

    work: the program's row, see PowerSGDWork._copies.
    """
    wire = wire_ptr + tl.load(work + 2)
    numel = tl.load(work + 3)
    copy_tile(grad_ptr + tl.load(work + 1), wire, numel, scale, COPY_BLOCK)
    VECTOR: tl.constexpr = 128 // wire_ptr.dtype.element_ty.primitive_bitwidth
    offs = tl.arange(0, VECTOR)
    zeros = tl.zeros((VECTOR,), wire_ptr.dtype.element_ty)
    tl.store(wire + numel + offs, zeros, mask=offs < tl.load(work + 4))
