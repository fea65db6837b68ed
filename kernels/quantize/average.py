"""Average a shard over the payloads of all ranks, and quantize the mean; or only sum it, and divide."""

from typing import Any

import torch
import triton
import triton.language as tl

from ..launch import Launch, Slot, registers
from ..tile import element_type, on_16_bytes, round_to
from .bucket import RANK, QuantizedBucket
from .tile import (
    BLOCKS_WORK,
    COPY_BLOCK,
    WORK_FIELDS,
    codes_at,
    decode,
    encode,
    gradients_of,
    load_codes,
    load_scales,
    saturated,
    store_codes,
    store_scales,
    tile_of,
)
from .work import resident_programs


@triton.jit
def mean_of(total, DIVISOR: tl.constexpr, SHRINK: tl.constexpr):
    """Return total / (DIVISOR · SHRINK), rounded once.

    total: the ranks' sum, times SHRINK.
    """
    BY: tl.constexpr = DIVISOR * SHRINK
    if BY == 1:
        mean = total
    elif total.dtype == tl.float64:
        mean = total / BY
    else:
        mean = tl.div_rn(total, tl.full((1,) * len(total.shape), BY, tl.float32))
    return mean


@triton.jit
def sum_of_ranks(
    received_ptr, payload_bytes, code_at, scale_at, num_blocks, quantizer_ptr,
    ACC: tl.constexpr, WORLD_SIZE: tl.constexpr, SHRINK: tl.constexpr, BITS: tl.constexpr,
    SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return (SHRINK · Σ dequantized tiles in the order of the ranks, whether any rank's scale isn't zero).

    The second result is per block. The tiles of AHEAD ranks are loaded at a time.

    code_at, scale_at: the bytes of the tile's first code and first scale in a payload.
    """
    AHEAD: tl.constexpr = 4 if WORLD_SIZE > 2 else WORLD_SIZE
    total = tl.zeros((BLOCKS, triton.next_power_of_2(SIZE)), ACC)
    is_sent = tl.zeros((BLOCKS,), tl.int32)
    for start in range(0, WORLD_SIZE, AHEAD):
        packed = ()
        scales = ()
        for i in tl.static_range(AHEAD):
            sent_blocks = tl.where(start + i < WORLD_SIZE, num_blocks, 0)
            payload = received_ptr + (start + i) * payload_bytes
            codes_ptr = codes_at(payload, code_at, SIZE, BITS)
            packed = packed + (load_codes(codes_ptr, sent_blocks, BLOCKS, SIZE, BITS),)
            scales = scales + (load_scales(payload, scale_at, sent_blocks, BLOCKS),)
        for i in tl.static_range(AHEAD):
            total += decode(packed[i], scales[i].to(ACC) * SHRINK, quantizer_ptr, ACC, BITS)
            is_sent |= (scales[i] != 0.0).to(tl.int32)
    return total, is_sent != 0


@triton.jit
def sum_of_exact(
    received_ptr, payload_bytes, at, mask, ACC: tl.constexpr, WORLD_SIZE: tl.constexpr, SHRINK: tl.constexpr
):
    """Return SHRINK · Σ exact elements, [COPY_BLOCK], in the order of the ranks.

    at: the byte of the first one in a payload.
    mask: which elements there are.
    """
    TYPE: tl.constexpr = received_ptr.dtype.element_ty
    offs = tl.arange(0, COPY_BLOCK)
    received = received_ptr.to(tl.pointer_type(tl.uint8)) + at
    total = tl.zeros((COPY_BLOCK,), ACC)
    for index in range(WORLD_SIZE):
        sent = (received + index * payload_bytes).to(tl.pointer_type(TYPE))
        total += tl.load(sent + offs, mask=mask, other=0.0).to(ACC) * SHRINK
    return total


@triton.jit
def average_exact(
    received_ptr, out_ptr, payload_bytes, length, at,
    ACC: tl.constexpr, WORLD_SIZE: tl.constexpr, DIVISOR: tl.constexpr, SHRINK: tl.constexpr,
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
        total = sum_of_exact(received_ptr, payload_bytes, at // 16 * 16, whole, ACC, WORLD_SIZE, SHRINK)
        tl.store(on_16_bytes(out_ptr) + offs, round_to(mean_of(total, DIVISOR, SHRINK), TYPE))
    else:
        mask = offs < length
        total = sum_of_exact(received_ptr, payload_bytes, at, mask, ACC, WORLD_SIZE, SHRINK)
        tl.store(out_ptr + offs, round_to(mean_of(total, DIVISOR, SHRINK), TYPE), mask=mask)


@triton.jit(do_not_specialize=["rank"])
def _average_kernel(
    received_ptr,
    mean_ptr,
    error_ptr,
    shard_error_ptr,
    quantizer_ptr,
    work_ptr,
    rank: tl.int64,
    WORLD_SIZE: tl.constexpr,
    DIVISOR: tl.constexpr,
    SHRINK: tl.constexpr,
    FEEDBACK: tl.constexpr,
    BITS: tl.constexpr,
    CAP: tl.constexpr,
    LARGEST: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Compute mean = quantized((Σ dequantized + E) / DIVISOR), E = DIVISOR · (the mean's error), error += E.

    E is shard_error. In a block for which every rank sent the scale 0, E doesn't change and the mean is zero.
    The mean is limited to LARGEST, the largest finite number of error's dtype, and E to half of LARGEST.

    received_ptr: the payloads of all ranks, one after another, as elements of the dtype of exact elements.
    mean_ptr: one payload, in received_ptr's dtype.
    error_ptr, shard_error_ptr: see _quantize_kernel. Of error, only this rank's shard is changed.
    quantizer_ptr: see tile.py.
    work_ptr: QuantizedWork's shard_work.
    WORLD_SIZE: the number of payloads.
    DIVISOR: WORLD_SIZE, unless payloads hold sums over the ranks of a node.
    SHRINK: see options_of.
    CAP: the largest scale.
    Grid: one program per row of work_ptr.
    Moves per fp32 element of the shard BITS / 8 B of codes for each of W + 1 payloads, 8 B of error, and 8 B
    of shard_error.
    """
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    # Payloads begin on multiples of 16 bytes; dividing shows the compiler that they do.
    payload_bytes = tl.load(work + 1) // 16 * 16
    second = tl.load(work + 2)
    third = tl.load(work + 3)
    ACC: tl.constexpr = error_ptr.dtype.element_ty
    if tl.load(work) == BLOCKS_WORK:
        first = tl.load(work + 4)
        code_at = tl.load(work + 5)
        scale_at = tl.load(work + 6)
        mask, offs = tile_of(third, BLOCKS, SIZE)
        own = shard_error_ptr + first * SIZE
        block = rank * second + first
        error = error_ptr + block * SIZE
        LATE: tl.constexpr = BITS == 4 and WORLD_SIZE > 2  # the loop over ranks leaves no registers for kept
        if FEEDBACK and not LATE:
            kept = tl.load(own + offs, mask=mask, other=0.0)
        total, is_sent = sum_of_ranks(
            received_ptr.to(tl.pointer_type(tl.uint8)), payload_bytes, code_at, scale_at, third,
            quantizer_ptr, ACC, WORLD_SIZE, SHRINK, BITS, SIZE, BLOCKS,
        )  # fmt: skip
        if FEEDBACK:
            if LATE:
                kept = tl.load(own + offs, mask=mask, other=0.0)
            total = tl.where(is_sent[:, None], total + kept * SHRINK, 0.0)
            total = saturated(total, LARGEST * (DIVISOR * SHRINK))
            if ACC != tl.float64:
                senders = tl.load(error + offs, mask=mask, other=0.0)
        mean = mean_of(total, DIVISOR, SHRINK)
        codes, scale, lost = encode(mean, quantizer_ptr, SIZE, BITS, CAP)
        payload = mean_ptr.to(tl.pointer_type(tl.uint8))
        store_codes(codes_at(payload, code_at, SIZE, BITS), codes, third, BLOCKS, SIZE, BITS)
        store_scales(payload, scale_at, scale, third, BLOCKS)
        if FEEDBACK:
            kept = tl.where(is_sent[:, None], saturated(lost * DIVISOR, LARGEST / 2), kept)
            tl.store(own + offs, kept, mask=mask)
            if ACC == tl.float64:
                # Loaded only now: the 16 warps of a block of 4096 have no registers for it earlier.
                senders = tl.load(error + offs, mask=mask, other=0.0)
            tl.store(error + offs, senders + kept, mask=mask)
    else:
        exact = (mean_ptr.to(tl.pointer_type(tl.uint8)) + third).to(mean_ptr.dtype)
        average_exact(
            received_ptr, exact, payload_bytes, second, third, ACC, WORLD_SIZE, DIVISOR, SHRINK, False
        )


def average(bucket: QuantizedBucket) -> Launch:
    """Return the launch of _average_kernel: it averages received, and keeps the mean's error. Slot: rank."""
    return Launch(
        _average_kernel,
        len(bucket.shard_work),
        bucket.received.view(-1).view(bucket.exact_dtype),
        bucket.mean.view(bucket.exact_dtype),
        bucket.error,
        bucket.shard_error,
        bucket.quantizer,
        bucket.shard_work,
        RANK,
        FEEDBACK=bucket.feedback,
        CAP=bucket.largest_scale,
        LARGEST=torch.finfo(bucket.error.dtype).max,
        **options_of(bucket),
    )


def options_of(bucket: QuantizedBucket) -> dict[str, Any]:
    """Return the constants and options that average and sum_shard share."""
    size, world_size, num_warps = bucket.layout.block_size, bucket.layout.world_size, bucket.work.num_warps
    return bucket.constants | {
        "WORLD_SIZE": world_size,
        "DIVISOR": bucket.divisor,
        # A power of two changes no bits. It is at most 1 / world size, so no sum overflows.
        "SHRINK": 0.5 ** (world_size - 1).bit_length(),
        "num_warps": num_warps,
        "maxnreg": registers(num_warps, resident_programs(size, num_warps)),
        # Codes of opposite signs must cancel: a fused product would leave its rounding error.
        "enable_fp_fusion": False,
    }


@triton.jit
def _sum_kernel(
    received_ptr,
    out_ptr,
    quantizer_ptr,
    work_ptr,
    ACC: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    DIVISOR: tl.constexpr,
    SHRINK: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Compute out = round((Σ dequantized) / DIVISOR), and likewise with exact elements.

    out_ptr: the shard's tensors, one after another.
    work_ptr: QuantizedWork's sum_work.
    ACC: the dtype of the arithmetic.
    For the other arguments see _average_kernel.
    Grid: one program per row of work_ptr: a tile of at most BLOCKS blocks, or some exact elements.
    Moves per element of the shard BITS / 8 B of codes for each of WORLD_SIZE payloads, and the sum once.
    """
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    out = out_ptr + tl.load(work + 1)
    length = tl.load(work + 2)
    third = tl.load(work + 3)
    # Payloads begin on multiples of 16 bytes; dividing shows the compiler that they do.
    payload_bytes = tl.load(work + 4) // 16 * 16
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    if tl.load(work) == BLOCKS_WORK:
        mask, offs = tile_of(third, BLOCKS, SIZE)
        total, _ = sum_of_ranks(
            received_ptr.to(tl.pointer_type(tl.uint8)), payload_bytes, tl.load(work + 5), tl.load(work + 6),
            third, quantizer_ptr, ACC, WORLD_SIZE, SHRINK, BITS, SIZE, BLOCKS,
        )  # fmt: skip
        values = round_to(mean_of(total, DIVISOR, SHRINK), TYPE)
        is_whole, aligned, exists = gradients_of(out, length, third, mask, offs, SIZE)
        if is_whole:
            tl.store(aligned + offs, values, mask=mask)
        else:
            tl.store(out + offs, values, mask=exists)
    else:
        average_exact(received_ptr, out, payload_bytes, length, third, ACC, WORLD_SIZE, DIVISOR, SHRINK, True)


def sum_shard(bucket: QuantizedBucket) -> Launch:
    """Return the launch of _sum_kernel: it sums received. Slot: buffer, the shard's tensors.

    It is the end of a quantized reduce-scatter.
    """
    return Launch(
        _sum_kernel,
        len(bucket.shard_work),
        bucket.received.view(-1).view(bucket.exact_dtype),
        Slot.buffer(bucket.averages_dtype),
        bucket.quantizer,
        bucket.shard_work,
        ACC=element_type(bucket.error.dtype),
        **options_of(bucket),
    )
