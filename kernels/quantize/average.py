"""Average a shard over all ranks, and quantize the mean; or only sum it, and divide."""

import torch
import triton
import triton.language as tl

from ..launch import Launch, Slot
from ..tile import on_16_bytes, round_to
from .bucket import RANK, QuantizedBucket
from .tile import (
    BLOCKS_WORK,
    COPY_BLOCK,
    WORK_FIELDS,
    codes_at,
    decode,
    encode,
    load_codes,
    load_scales,
    saturated,
    store_codes,
    store_gradients,
    store_scales,
    tile_of,
)


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
    own, received_ptr, payload_bytes, code_at, scale_at, num_blocks, rank,
    WORLD_SIZE: tl.constexpr, SHRINK: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr,
    SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return (SHRINK · (own + Σ of the others' decoded tiles, in their order), whether any scale isn't zero).

    The second result is per block. The tiles of AHEAD ranks are loaded at a time.

    own: this rank's tile. Where its scale is NaN, the sum is NaN.
    code_at, scale_at: the bytes of the tile's first code and first scale in a payload.
    """
    ACC: tl.constexpr = own.dtype
    AHEAD: tl.constexpr = 4 if WORLD_SIZE > 2 else WORLD_SIZE
    total = own * SHRINK
    is_sent = tl.zeros((BLOCKS,), tl.int32)
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


@triton.jit(do_not_specialize=["rank", "payload_bytes", "shard_blocks"])
def _average_kernel(
    received_ptr,
    out_ptr,
    error_ptr,
    work_ptr,
    rank: tl.int64,
    payload_bytes: tl.int64,
    shard_blocks: tl.int64,
    WORLD_SIZE: tl.constexpr,
    DIVISOR: tl.constexpr,
    SHRINK: tl.constexpr,
    FEEDBACK: tl.constexpr,
    ONLY_SUMS: tl.constexpr,
    LARGEST: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Compute mean = (this rank's own values + Σ the others' decoded values) / DIVISOR, and quantize it.

    The own values are in error. Afterwards error = DIVISOR · (mean − decoded mean). In a block for which
    every rank sent the scale 0, the mean is zero, and error doesn't change. Means and errors are limited to
    ±LARGEST, the largest finite number of error's dtype.

    With ONLY_SUMS the mean isn't quantized: out = round(mean), and error = 0.

    received_ptr: the payloads of all ranks, one after another, as elements of the dtype of exact elements.
    out_ptr: one payload, in received_ptr's dtype. With ONLY_SUMS the shard's tensors, one after another.
    error_ptr: see _quantize_kernel.
    work_ptr: QuantizedWork's shard_work; with ONLY_SUMS its sum_work.
    payload_bytes, shard_blocks: of one payload, and of one shard.
    WORLD_SIZE: the number of payloads.
    DIVISOR: WORLD_SIZE, unless payloads hold sums over the ranks of a node.
    SHRINK: see average.
    For the other arguments see _quantize_kernel.
    Grid: one program per row of work_ptr.
    Moves per fp32 element of the shard BITS / 8 B of codes for each of the W − 1 others and for the mean, and
    8 B of error.
    """
    work = work_ptr + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    at = tl.load(work + 1)
    length = tl.load(work + 2)
    third = tl.load(work + 3)
    # Payloads begin on multiples of 16 bytes; dividing shows the compiler that they do.
    payload_bytes = payload_bytes // 16 * 16
    ACC: tl.constexpr = error_ptr.dtype.element_ty
    if tl.load(work) == BLOCKS_WORK:
        code_at = tl.load(work + 5)
        scale_at = tl.load(work + 6)
        mask, offs = tile_of(third, BLOCKS, SIZE)
        first = tl.load(work + 8)
        if FEEDBACK:
            first += rank * shard_blocks
        error = error_ptr + first * SIZE
        own = tl.load(error + offs, mask=mask, other=0.0)
        total, is_sent = sum_of_ranks(
            own, received_ptr.to(tl.pointer_type(tl.uint8)), payload_bytes, code_at, scale_at, third, rank,
            WORLD_SIZE, SHRINK, BITS, LIMIT, SIZE, BLOCKS,
        )  # fmt: skip
        if ONLY_SUMS:
            store_gradients(out_ptr + at, mean_of(total, DIVISOR, SHRINK), length, third, BLOCKS, SIZE)
            lost = tl.zeros((BLOCKS, triton.next_power_of_2(SIZE)), ACC)
        else:
            total = tl.where(is_sent[:, None], saturated(total, LARGEST * (DIVISOR * SHRINK)), 0.0)
            codes, scale, lost = encode(mean_of(total, DIVISOR, SHRINK), BITS, LIMIT)
            payload = out_ptr.to(tl.pointer_type(tl.uint8))
            store_codes(codes_at(payload, code_at, SIZE, BITS), codes, third, BLOCKS, SIZE, BITS)
            store_scales(payload, scale_at, scale, third, BLOCKS)
            lost = saturated(lost * DIVISOR, LARGEST)
            mask = mask & is_sent[:, None]
        if FEEDBACK:
            tl.store(error + offs, lost, mask=mask)
    else:
        if ONLY_SUMS:
            out = out_ptr + at
        else:
            out = (out_ptr.to(tl.pointer_type(tl.uint8)) + third).to(out_ptr.dtype)
        average_exact(
            received_ptr, out, payload_bytes, length, third, ACC, WORLD_SIZE, DIVISOR, SHRINK, ONLY_SUMS
        )


def average(bucket: QuantizedBucket) -> Launch:
    """Return the launch of _average_kernel: it averages received.

    Slots: kept and rank; buffer with only_sums.
    """
    world_size = bucket.layout.world_size
    return Launch(
        _average_kernel,
        len(bucket.shard_work),
        bucket.received.view(-1).view(bucket.exact_dtype),
        Slot.buffer(bucket.averages_dtype) if bucket.only_sums else bucket.mean.view(bucket.exact_dtype),
        bucket.kept_slot,
        bucket.shard_work,
        RANK,
        bucket.work.payload_bytes,
        bucket.layout.num_blocks,
        WORLD_SIZE=world_size,
        DIVISOR=bucket.divisor,
        # A power of two changes no bits. It is at most 1 / world size, so no sum overflows.
        SHRINK=0.5 ** (world_size - 1).bit_length(),
        FEEDBACK=bucket.feedback,
        ONLY_SUMS=bucket.only_sums,
        LARGEST=torch.finfo(bucket.kept.dtype).max,
        **bucket.constants,
    )
