"""The kernels of the quantized all-reduce: quantize a bucket, average a shard, dequantize the means."""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ...device import num_multiprocessors, send
from ..launch import Launch, Slot, Stage, registers
from ..tile import copy_tile, element_type, on_16_bytes, round_to
from .tile import (
    BLOCKS_WORK,
    COPY_BLOCK,
    WORK_FIELDS,
    codes_at,
    decode,
    divide,
    encode,
    load_codes,
    load_gradients,
    load_scales,
    saturated,
    store_codes,
    store_gradients,
    store_scales,
    tile_of,
)
from .work import QuantizedWork

RANK = Slot("rank", 1000)


def _stage(
    kernel: Any, layout: Any, dtype: torch.dtype, device: torch.device, slots: dict[str, torch.dtype],
    *numbers: Any, bits: int, uncompressed_dtype: torch.dtype | None = None,
    averages_dtype: torch.dtype | None = None, is_average: bool = False, **constants: Any,
) -> Stage:  # fmt: skip
    """Return a kernel's launch. slots: its tensors before work_ptr. numbers: its arguments behind work_ptr.

    For the other arguments see ops.encoder, QuantizedWork and the kernels.
    """
    exact = uncompressed_dtype or dtype
    work = QuantizedWork(
        layout, bits, dtype.itemsize, exact.itemsize, num_multiprocessors(device), is_average=is_average
    )
    rows = send(torch.tensor(work.rows, dtype=torch.int64, device="cpu"), device)
    launch = Launch(
        kernel, len(rows), *(Slot(name, each) for name, each in slots.items()), rows, *numbers,
        EXACT=element_type(exact), BITS=bits, LIMIT=torch.finfo(averages_dtype or dtype).max,
        SIZE=layout.block_size, BLOCKS=work.tile_blocks, num_warps=work.num_warps,
        maxnreg=registers(work.num_warps, work.resident_programs),
        enable_fp_fusion=False,  # each product is rounded, as in plain torch
        **constants,
    )  # fmt: skip
    return Stage([launch], device)


def encoder(
    layout: Any, dtype: torch.dtype, device: torch.device, *, error_feedback: bool = False, **options: Any
) -> Stage:
    """Return the launch of _quantize_kernel, see ops.encoder."""
    wide = torch.promote_types(dtype, torch.float32)
    slots = {"buffer": dtype, "kept": wide, "payload": torch.uint8}
    return _stage(_quantize_kernel, layout, dtype, device, slots, RANK, FEEDBACK=error_feedback, **options)


def adder(
    layout: Any, dtype: torch.dtype, device: torch.device, *, num_payloads: int, divisor: float | None = None,
    in_codes: bool, has_own: bool, error_feedback: bool = False, **options: Any,
) -> Stage:  # fmt: skip
    """Return the launch of _average_kernel, see ops.adder."""
    wide, divisor = torch.promote_types(dtype, torch.float32), divisor or num_payloads
    _, payload_bytes = layout.sections(options["bits"], (options.get("uncompressed_dtype") or dtype).itemsize)
    # A power of two changes no bits. It is at most 1 / num_payloads, so no sum overflows.
    shrink = 0.5 ** (num_payloads - 1).bit_length()
    out_dtype = torch.uint8 if in_codes else options.get("averages_dtype") or dtype
    slots = {"received": torch.uint8, "out": out_dtype, "kept": wide}
    return _stage(
        _average_kernel, layout, dtype, device, slots, RANK, payload_bytes, layout.num_blocks,
        is_average=in_codes, WORLD_SIZE=num_payloads, DIVISOR=divisor, SHRINK=shrink, FEEDBACK=error_feedback,
        HAS_OWN=has_own, ONLY_SUMS=not in_codes, LARGEST=torch.finfo(wide).max, **options,
    )  # fmt: skip


def decoder(layout: Any, dtype: torch.dtype, device: torch.device, **options: Any) -> Stage:
    """Return the launch of _dequantize_kernel, see ops.decoder."""
    wide = element_type(torch.promote_types(dtype, torch.float32))
    slots = {"payload": torch.uint8, "buffer": dtype}
    return _stage(_dequantize_kernel, layout, dtype, device, slots, ACC=wide, **options)


@triton.jit(do_not_specialize=["rank"])
def _quantize_kernel(
    grad_ptr, error_ptr, payload_ptr, work_ptr, rank: tl.int64,
    FEEDBACK: tl.constexpr, EXACT: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr, SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Quantize M = gradient + error: write codes and scales to the payloads, and error = M − decoded codes.

    In this rank's own shard error = M: nobody reads the codes there. Where only M isn't finite, the error
    counts as zero. A block whose scale is NaN keeps its error.

    grad_ptr: the bucket.
    error_ptr: [blocks of all shards, SIZE], fp32 (fp64 for an fp64 bucket). Without FEEDBACK
        [blocks of a shard, SIZE], only for the own shard's M = gradient.
    payload_ptr: the payloads of all shards, see QuantizedWork.
    work_ptr: QuantizedWork's rows.
    EXACT: the dtype of exact elements in the payloads.
    LIMIT: the largest number of the averages' dtype.
    Grid: one program per row of work_ptr: a tile of at most BLOCKS blocks, or a copy of exact elements.
    Moves per fp32 element 4 B of gradient, 8 B of error and BITS / 8 B of codes: 12.5 B at 4 bits. Per
    element of the bucket, with W = 8 ranks, average moves 1.5 B, dequantize 4.5 B, and the scales of blocks
    of 128 elements are 0.05 B: 18.6 B in all.
    """
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    grad = grad_ptr + tl.load(work + 1)
    length = tl.load(work + 2)
    third = tl.load(work + 3)
    if tl.load(work) == BLOCKS_WORK:
        ACC: tl.constexpr = error_ptr.dtype.element_ty
        values = load_gradients(grad, length, third, ACC, BLOCKS, SIZE)
        is_own = tl.load(work + 7) == rank
        mask, offs = tile_of(third, BLOCKS, SIZE)
        if FEEDBACK:
            error = error_ptr + tl.load(work + 4) * SIZE
            total = tl.load(error + offs, mask=mask, other=0.0) + values
            values = tl.where(tl.abs(total) < float("inf"), total, values)
        else:
            error = error_ptr + tl.load(work + 8) * SIZE
            mask = tl.where(is_own, mask, False)
        codes, scale, lost = encode(values, BITS, LIMIT)
        store_codes(codes_at(payload_ptr, tl.load(work + 5), SIZE, BITS), codes, third, BLOCKS, SIZE, BITS)
        store_scales(payload_ptr, tl.load(work + 6), scale, third, BLOCKS)
        tl.store(error + offs, tl.where(is_own, values, lost), mask=mask & (scale == scale)[:, None])
    else:
        copy_tile(grad, (payload_ptr + third).to(tl.pointer_type(EXACT)), length, 1.0, COPY_BLOCK)


@triton.constexpr_function
def exact_inverse(x):
    """Return 1 / x if it is exact, else 0."""
    return 1 / x if math.frexp(x)[0] == 0.5 else 0.0


@triton.jit
def mean_of(total, BY: tl.constexpr):
    """Return total / BY, rounded once."""
    INVERSE: tl.constexpr = exact_inverse(BY)
    if INVERSE > 0:
        mean = total * INVERSE
    else:
        mean = divide(total, tl.full((1,) * len(total.shape), BY, total.dtype))
    return mean


@triton.jit
def sum_of_ranks(
    own, received_ptr, payload_bytes, code_at, scale_at, num_blocks, rank,
    WORLD_SIZE: tl.constexpr, SHRINK: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr,
    SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return (SHRINK · (own + Σ of the others' decoded tiles, in their order), what scales show).

    That is per block: 0 if all are zero, 3 if the own is NaN, otherwise 1. AHEAD ranks' tiles load at a time.

    own: this rank's tile. Where its scale is NaN, the sum is NaN.
    code_at, scale_at: the bytes of the tile's first code and first scale in a payload.
    """
    ACC: tl.constexpr = own.dtype
    AHEAD: tl.constexpr = 4 if WORLD_SIZE > 2 else WORLD_SIZE
    total = own * SHRINK
    shown = tl.zeros((BLOCKS,), tl.int32)
    for start in range(0, WORLD_SIZE, AHEAD):
        packed = ()
        scales = ()
        for i in tl.static_range(AHEAD):
            payload = received_ptr + (start + i) * payload_bytes
            sent_blocks = tl.where(start + i < WORLD_SIZE, num_blocks, 0)
            # The own codes count as zeros, and zero times NaN is NaN.
            other_blocks = tl.where(start + i == rank, 0, sent_blocks)
            codes_ptr = codes_at(payload, code_at, SIZE, BITS)
            packed = packed + (load_codes(codes_ptr, other_blocks, BLOCKS, SIZE, BITS),)
            scales = scales + (load_scales(payload, scale_at, sent_blocks, BLOCKS),)
        for i in tl.static_range(AHEAD):
            total += decode(packed[i], scales[i].to(ACC) * SHRINK, ACC, BITS, LIMIT * SHRINK)
            shown |= (scales[i] != 0.0).to(tl.int32)
            shown |= tl.where((start + i == rank) & (scales[i] != scales[i]), 3, 0)
    return total, shown


@triton.jit
def sum_of_exact(
    received_ptr, payload_bytes, at, mask,
    ACC: tl.constexpr, EXACT: tl.constexpr, WORLD_SIZE: tl.constexpr, SHRINK: tl.constexpr,
):  # fmt: skip
    """Return SHRINK · Σ exact elements, [COPY_BLOCK], in the order of the ranks.

    at: the byte of the first one in a payload.
    mask: which elements there are.
    """
    offs = tl.arange(0, COPY_BLOCK)
    total = tl.zeros((COPY_BLOCK,), ACC)
    for index in range(WORLD_SIZE):
        sent = (received_ptr + at + index * payload_bytes).to(tl.pointer_type(EXACT))
        total += tl.load(sent + offs, mask=mask, other=0.0).to(ACC) * SHRINK
    return total


@triton.jit
def average_exact(
    received_ptr, out_ptr, payload_bytes, length, at,
    ACC: tl.constexpr, EXACT: tl.constexpr, WORLD_SIZE: tl.constexpr, SHRINK: tl.constexpr, BY: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Sum exact elements, and divide.

    length: the number of elements.
    at: the byte of the first one in a payload.
    WIDE: access 128 bits at a time where all addresses allow it. It takes more registers.
    """
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    offs = tl.arange(0, COPY_BLOCK)
    if WIDE and (length == COPY_BLOCK) & (out_ptr.to(tl.uint64) % 16 == 0) & (at % 16 == 0):
        whole = offs < COPY_BLOCK
        aligned = at // 16 * 16
        total = sum_of_exact(received_ptr, payload_bytes, aligned, whole, ACC, EXACT, WORLD_SIZE, SHRINK)
        tl.store(on_16_bytes(out_ptr) + offs, round_to(mean_of(total, BY), TYPE))
    else:
        mask = offs < length
        total = sum_of_exact(received_ptr, payload_bytes, at, mask, ACC, EXACT, WORLD_SIZE, SHRINK)
        tl.store(out_ptr + offs, round_to(mean_of(total, BY), TYPE), mask=mask)


@triton.jit(do_not_specialize=["rank", "payload_bytes", "shard_blocks"])
def _average_kernel(
    received_ptr, out_ptr, error_ptr, work_ptr,
    rank: tl.int64, payload_bytes: tl.int64, shard_blocks: tl.int64, EXACT: tl.constexpr,
    WORLD_SIZE: tl.constexpr, DIVISOR: tl.constexpr, SHRINK: tl.constexpr, FEEDBACK: tl.constexpr,
    HAS_OWN: tl.constexpr, ONLY_SUMS: tl.constexpr, LARGEST: tl.constexpr, BITS: tl.constexpr,
    LIMIT: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute mean = (this rank's own values + Σ the others' decoded values) / DIVISOR, and quantize it.

    The own values are in error. Afterwards error = DIVISOR · (mean − decoded mean). In a block for which
    every rank sent the scale 0, the mean is zero, and error doesn't change; nor where the own scale is NaN.
    Means and errors are limited to ±LARGEST, the largest finite number of error's dtype.

    With ONLY_SUMS the mean isn't quantized: out = round(mean), and error = 0. Without HAS_OWN this rank's own
    values are in its payload like the others', and error isn't used.

    received_ptr: the payloads of all ranks, one after another.
    out_ptr: one payload. With ONLY_SUMS the shard's tensors, one after another.
    work_ptr: the shard's rows; see QuantizedWork.
    payload_bytes, shard_blocks: of one payload, and of one shard.
    WORLD_SIZE: the number of payloads.
    DIVISOR: WORLD_SIZE, unless payloads hold sums over the ranks of a node.
    SHRINK: values are multiplied by it before they are summed; see adder.
    For the other arguments see _quantize_kernel.
    Grid: one program per row of work_ptr.
    Moves per fp32 element of the shard BITS / 8 B of codes for each of the W − 1 others and for the mean, and
    8 B of error.
    """
    ACC: tl.constexpr = error_ptr.dtype.element_ty
    BY: tl.constexpr = DIVISOR * SHRINK
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    at = tl.load(work + 1)
    length = tl.load(work + 2)
    third = tl.load(work + 3)
    # Payloads begin on multiples of 16 bytes; dividing shows the compiler that they do.
    payload_bytes = payload_bytes // 16 * 16
    if tl.load(work) == BLOCKS_WORK:
        code_at = tl.load(work + 5)
        scale_at = tl.load(work + 6)
        mask, offs = tile_of(third, BLOCKS, SIZE)
        first = tl.load(work + 8)
        if FEEDBACK:
            first += rank * shard_blocks
        error = error_ptr + first * SIZE
        if HAS_OWN:
            own = tl.load(error + offs, mask=mask, other=0.0)
        else:
            own = tl.zeros((BLOCKS, triton.next_power_of_2(SIZE)), ACC)
        total, shown = sum_of_ranks(
            own, received_ptr, payload_bytes, code_at, scale_at, third, rank,
            WORLD_SIZE, SHRINK, BITS, LIMIT, SIZE, BLOCKS,
        )  # fmt: skip
        if ONLY_SUMS:
            if not HAS_OWN:
                total = saturated(total, LARGEST * BY)
            store_gradients(out_ptr + at, mean_of(total, BY), length, third, BLOCKS, SIZE)
            lost = tl.zeros((BLOCKS, triton.next_power_of_2(SIZE)), ACC)
        else:
            total = tl.where((shown != 0)[:, None], saturated(total, LARGEST * BY), 0.0)
            codes, scale, lost = encode(mean_of(total, BY), BITS, LIMIT)
            store_codes(codes_at(out_ptr, code_at, SIZE, BITS), codes, third, BLOCKS, SIZE, BITS)
            store_scales(out_ptr, scale_at, scale, third, BLOCKS)
            lost = saturated(lost * DIVISOR, LARGEST)
            mask = mask & (shown == 1)[:, None]
        if FEEDBACK and HAS_OWN:
            tl.store(error + offs, lost, mask=mask)
    else:
        out = out_ptr + at if ONLY_SUMS else (out_ptr + third).to(tl.pointer_type(EXACT))
        average_exact(
            received_ptr, out, payload_bytes, length, third,
            ACC, EXACT, WORLD_SIZE, SHRINK, BY, ONLY_SUMS,
        )  # fmt: skip


@triton.jit
def _dequantize_kernel(
    payload_ptr, grad_ptr, work_ptr,
    ACC: tl.constexpr, EXACT: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr, SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute gradient = round(scale · code), and copy exact elements unchanged.

    ACC: the dtype of the arithmetic.
    For the other arguments and the grid see _quantize_kernel.
    Moves per element BITS / 8 B of codes, and the gradient once.
    """
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    grad = grad_ptr + tl.load(work + 1)
    length = tl.load(work + 2)
    third = tl.load(work + 3)
    if tl.load(work) == BLOCKS_WORK:
        scale = load_scales(payload_ptr, tl.load(work + 6), third, BLOCKS)
        codes = load_codes(codes_at(payload_ptr, tl.load(work + 5), SIZE, BITS), third, BLOCKS, SIZE, BITS)
        store_gradients(grad, decode(codes, scale, ACC, BITS, LIMIT), length, third, BLOCKS, SIZE)
    else:
        copy_tile((payload_ptr + third).to(tl.pointer_type(EXACT)), grad, length, 1.0, COPY_BLOCK)
