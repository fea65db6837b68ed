"""Fill the payload of a factor's quantized all-reduce: add up partial factors, and quantize the sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..device import send
from ..launch import Launch, Slot, registers
from ..quantize.tile import WORK_FIELDS, codes_at, element_type, encode, store_codes, store_scales
from ..quantize.work import BLOCKS as _BLOCKS
from ..quantize.work import tile_shape
from ..tile import copy_tile
from .codes_work import BITS, FactorCodesWork
from .codes_work import FACTOR_FIELDS as _FACTOR_FIELDS
from .work import COPY_BLOCK, PowerSGDWork

BLOCKS_WORK = tl.constexpr(_BLOCKS)
FACTOR_FIELDS = tl.constexpr(_FACTOR_FIELDS)
CODE_BITS = tl.constexpr(BITS)
RESIDENT_WARPS = 16  # warps that a multiprocessor's registers must hold at once


@dataclass(frozen=True)
class FactorCodes:
    """The payload that gets a factor's codes, and the tables from which the kernel packs them.

    payload: uint8, the payloads of all shards.
    factors, work: int64, FactorCodesWork's.
    exact_dtype: the dtype of exact elements in the payload.
    block_size: the number of elements with one scale, a power of two.
    largest_scale: the largest scale of a block.
    """

    payload: torch.Tensor
    factors: torch.Tensor
    work: torch.Tensor
    exact_dtype: torch.dtype
    block_size: int
    largest_scale: float

    @classmethod
    def of(cls, work: PowerSGDWork, factor: str, plan: Any, itemsize: int) -> FactorCodes:
        """Make the FactorCodes of one factor.

        work: the bucket's tables.
        factor: "p" or "q".
        plan: the QuantizedPlan of the factor's wire.
        itemsize: bytes of an element on the wire.
        """
        tables = FactorCodesWork(work, factor, plan.layout, itemsize, plan.exact_dtype.itemsize)
        device = plan.payload.device
        factors, programs = (_table(rows, device) for rows in (tables.factors, tables.work))
        size, cap = plan.layout.block_size, plan.largest_scale
        return cls(plan.payload, factors, programs, plan.exact_dtype, size, cap)

    @classmethod
    def on_meta(cls, exact_dtype: torch.dtype, block_size: int, largest_scale: float) -> FactorCodes:
        """Make FactorCodes without memory, to compile the kernel with."""
        meta = torch.device("meta")
        table = torch.empty(1, WORK_FIELDS.value, dtype=torch.int64, device=meta)
        payload = torch.empty(0, dtype=torch.uint8, device=meta)
        return cls(payload, table, table, exact_dtype, block_size, largest_scale)


def _table(rows: Sequence[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    return send(torch.tensor(rows, dtype=torch.int64), device)


@triton.jit
def sums_on_wire(
    partial_ptr, factors_ptr, first, first_factor, last_factor,
    RANK: tl.constexpr, BLOCK: tl.constexpr, NUMEL: tl.constexpr,
):  # fmt: skip
    """Return NUMEL elements of a wire from element `first` on, [NUMEL / V, V], in the partial sums' dtype.

    V: the number of elements in 16 bytes.
    first_factor, last_factor: the first row of factors_ptr to read, and one past the last.

    Beyond the rows of a column, and beyond the factors, the elements are zeros.
    """
    TYPE: tl.constexpr = partial_ptr.dtype.element_ty
    VECTOR: tl.constexpr = 128 // TYPE.primitive_bitwidth
    # Columns begin on 16 bytes, so V elements lie in one column, and in one partial sum.
    starts = tl.arange(0, NUMEL // VECTOR) * VECTOR
    offs = tl.arange(0, VECTOR)[None, :]
    values = tl.zeros((NUMEL // VECTOR, VECTOR), TYPE)
    for index in range(first_factor.to(tl.int32), last_factor.to(tl.int32)):
        factor = factors_ptr + index * FACTOR_FIELDS
        offs_factor = (first - tl.load(factor)).to(tl.int32) + starts
        exists = (offs_factor >= 0) & (offs_factor < tl.load(factor + 1).to(tl.int32))
        stride = tl.load(factor + 2).to(tl.int32)
        num_rows = tl.load(factor + 3).to(tl.int32)
        num_partial = tl.load(factor + 5)
        column = offs_factor // stride
        row = offs_factor - column * stride
        offs_sum = (row // BLOCK) * (num_partial * (RANK * BLOCK)) + column * BLOCK + row % BLOCK
        # Offsets are multiples of V already; dividing shows the compiler that they are.
        partial = partial_ptr + tl.load(factor + 4) * (RANK * BLOCK)
        partial += (offs_sum // VECTOR * VECTOR)[:, None] + offs
        total = tl.zeros((NUMEL // VECTOR, VECTOR), TYPE)
        for i in range(num_partial.to(tl.int32)):
            total += tl.load(partial + i * (RANK * BLOCK), mask=exists[:, None], other=0.0)
        # If P has NaN, sums beyond the last row may be NaN too.
        values = tl.where(exists[:, None] & (row[:, None] + offs < num_rows), total, values)
    return values


@triton.jit
def _pack_codes_kernel(
    partial_ptr,
    grad_ptr,
    payload_ptr,
    factors_ptr,
    work_ptr,
    scale: tl.float64,
    EXACT: tl.constexpr,
    CAP: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
):
    """Write the codes and scales of scale · (sums of partial panels), or scale · gradient, to the payloads.

    The sums are in the order of the partial panels' indices.

    partial_ptr: [partial sums, RANK, BLOCK], panels column after column.
    grad_ptr: the bucket.
    payload_ptr: see QuantizedWork.
    factors_ptr, work_ptr: see FactorCodesWork.
    EXACT: the dtype of exact elements in the payloads.
    CAP: the largest scale.
    SIZE: the number of elements in a block.
    Grid: one program per row of work_ptr: a tile of BLOCKS blocks, or a copy of exact elements.
    Moves each partial sum once (4 B), 1 B of code and 2 / SIZE B of scale per element of the factor, and each
    uncompressed element twice.
    """
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    first = tl.load(work + 1)
    third = tl.load(work + 3)
    if tl.load(work) == BLOCKS_WORK:
        values = sums_on_wire(
            partial_ptr, factors_ptr, first, tl.load(work + 4), tl.load(work + 7), RANK, BLOCK, BLOCKS * SIZE
        )
        values *= (tl.full((), 1.0, tl.float64) * scale).to(values.dtype)
        codes, scales, _ = encode(tl.reshape(values, (BLOCKS, SIZE)), None, SIZE, CODE_BITS, CAP)
        first_code = codes_at(payload_ptr, tl.load(work + 5), SIZE, CODE_BITS)
        store_codes(first_code, codes, third, BLOCKS, SIZE, SIZE, CODE_BITS)
        store_scales(payload_ptr, tl.load(work + 6), scales, third, BLOCKS)
    else:
        exact = (payload_ptr + third).to(tl.pointer_type(EXACT))
        copy_tile(grad_ptr + first, exact, tl.load(work + 2), scale, COPY_BLOCK)


def pack_codes(
    partial: torch.Tensor,
    grad: torch.Tensor | Slot,
    codes: FactorCodes,
    *,
    rank: int,
    block: int,
    scale: float | Slot,
) -> Launch:
    """Return the launch that sums the partial P (or Q), quantizes it, and copies uncompressed tensors.

    Codes have 8 bits. codes.payload gets the same bits as by pack and then quantize (quantize/blocks.py).

    partial, grad, rank, block, scale: see pack.
    codes: the factor's FactorCodes.
    """
    tile_blocks, num_warps = tile_shape(codes.block_size, partial.itemsize)
    return Launch(
        _pack_codes_kernel,
        len(codes.work),
        partial,
        grad,
        codes.payload,
        codes.factors,
        codes.work,
        scale,
        EXACT=element_type(codes.exact_dtype),
        CAP=codes.largest_scale,
        RANK=rank,
        BLOCK=block,
        SIZE=codes.block_size,
        BLOCKS=tile_blocks,
        COPY_BLOCK=COPY_BLOCK,
        num_warps=num_warps,
        maxnreg=registers(num_warps, max(1, RESIDENT_WARPS // num_warps)),
        enable_fp_fusion=False,
    )
