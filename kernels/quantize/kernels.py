"""The kernels of the quantized all-reduce: quantize a bucket, average a shard, dequantize the means."""

import triton
import triton.language as tl

from ..tile import copy_tile, on_16_bytes, round_to
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
    work_ptr: QuantizedWork's bucket_work.
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
        exact = (payload_ptr + third).to(tl.pointer_type(EXACT))
        copy_tile(grad, exact, length, 1.0, COPY_BLOCK)


@triton.jit
def mean_of(total, BY: tl.constexpr, INVERSE: tl.constexpr):
    """Return total / BY, rounded once. INVERSE: 1 / BY if it is exact, else 0."""
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
    ACC: tl.constexpr, WORLD_SIZE: tl.constexpr, SHRINK: tl.constexpr, BY: tl.constexpr,
    INVERSE: tl.constexpr, WIDE: tl.constexpr,
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
        tl.store(on_16_bytes(out_ptr) + offs, round_to(mean_of(total, BY, INVERSE), TYPE))
    else:
        mask = offs < length
        total = sum_of_exact(received_ptr, payload_bytes, at, mask, ACC, WORLD_SIZE, SHRINK)
        tl.store(out_ptr + offs, round_to(mean_of(total, BY, INVERSE), TYPE), mask=mask)


@triton.jit
def average_blocks(
    received_ptr, out_ptr, error_ptr, work, at, length, num_blocks, rank, payload_bytes, shard_blocks,
    WORLD_SIZE: tl.constexpr, DIVISOR: tl.constexpr, SHRINK: tl.constexpr, BY: tl.constexpr,
    INVERSE: tl.constexpr, FEEDBACK: tl.constexpr, HAS_OWN: tl.constexpr, ONLY_SUMS: tl.constexpr,
    LARGEST: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Average a tile of blocks; see _average_kernel.

    work: pointer to the program's row of work.
    at, length, num_blocks: the row's first element in out with ONLY_SUMS, number of elements, and of blocks.
    """
    ACC: tl.constexpr = error_ptr.dtype.element_ty
    code_at = tl.load(work + 5)
    scale_at = tl.load(work + 6)
    mask, offs = tile_of(num_blocks, BLOCKS, SIZE)
    first = tl.load(work + 8)
    if FEEDBACK:
        first += rank * shard_blocks
    error = error_ptr + first * SIZE
    if HAS_OWN:
        own = tl.load(error + offs, mask=mask, other=0.0)
    else:
        own = tl.zeros((BLOCKS, triton.next_power_of_2(SIZE)), ACC)
    total, shown = sum_of_ranks(
        own, received_ptr.to(tl.pointer_type(tl.uint8)), payload_bytes, code_at, scale_at, num_blocks, rank,
        WORLD_SIZE, SHRINK, BITS, LIMIT, SIZE, BLOCKS,
    )  # fmt: skip
    if ONLY_SUMS:
        if not HAS_OWN:
            total = saturated(total, LARGEST * BY)
        store_gradients(out_ptr + at, mean_of(total, BY, INVERSE), length, num_blocks, BLOCKS, SIZE)
        lost = tl.zeros((BLOCKS, triton.next_power_of_2(SIZE)), ACC)
    else:
        total = tl.where((shown != 0)[:, None], saturated(total, LARGEST * BY), 0.0)
        codes, scale, lost = encode(mean_of(total, BY, INVERSE), BITS, LIMIT)
        payload = out_ptr.to(tl.pointer_type(tl.uint8))
        store_codes(codes_at(payload, code_at, SIZE, BITS), codes, num_blocks, BLOCKS, SIZE, BITS)
        store_scales(payload, scale_at, scale, num_blocks, BLOCKS)
        lost = saturated(lost * DIVISOR, LARGEST)
        mask = mask & (shown == 1)[:, None]
    if FEEDBACK and HAS_OWN:
        tl.store(error + offs, lost, mask=mask)


@triton.jit(do_not_specialize=["rank", "payload_bytes", "shard_blocks"])
def _average_kernel(
    received_ptr, out_ptr, error_ptr, work_ptr,
    rank: tl.int64, payload_bytes: tl.int64, shard_blocks: tl.int64,
    WORLD_SIZE: tl.constexpr, DIVISOR: tl.constexpr, SHRINK: tl.constexpr, BY: tl.constexpr,
    INVERSE: tl.constexpr, FEEDBACK: tl.constexpr, HAS_OWN: tl.constexpr, ONLY_SUMS: tl.constexpr,
    LARGEST: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute mean = (this rank's own values + Σ the others' decoded values) / DIVISOR, and quantize it.

    The own values are in error. Afterwards error = DIVISOR · (mean − decoded mean). In a block for which
    every rank sent the scale 0, the mean is zero, and error doesn't change; nor where the own scale is NaN.
    Means and errors are limited to ±LARGEST, the largest finite number of error's dtype.

    With ONLY_SUMS the mean isn't quantized: out = round(mean), and error = 0. Without HAS_OWN this rank's own
    values are in its payload like the others', and error isn't used.

    received_ptr: the payloads of all ranks, one after another, as elements of the dtype of exact elements.
    out_ptr: one payload, in received_ptr's dtype. With ONLY_SUMS the shard's tensors, one after another.
    error_ptr: see _quantize_kernel.
    work_ptr: QuantizedWork's shard_work; with ONLY_SUMS its sum_work.
    payload_bytes, shard_blocks: of one payload, and of one shard.
    WORLD_SIZE: the number of payloads.
    DIVISOR: WORLD_SIZE, unless payloads hold sums over the ranks of a node.
    SHRINK: values are multiplied by it before they are summed; see QuantizedPlan.
    BY, INVERSE: DIVISOR · SHRINK, see mean_of.
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
    if tl.load(work) == BLOCKS_WORK:
        average_blocks(
            received_ptr, out_ptr, error_ptr, work, at, length, third, rank, payload_bytes, shard_blocks,
            WORLD_SIZE, DIVISOR, SHRINK, BY, INVERSE, FEEDBACK, HAS_OWN, ONLY_SUMS, LARGEST,
            BITS, LIMIT, SIZE, BLOCKS,
        )  # fmt: skip
    else:
        in_payload = (out_ptr.to(tl.pointer_type(tl.uint8)) + third).to(out_ptr.dtype)
        out = out_ptr + at if ONLY_SUMS else in_payload
        average_exact(
            received_ptr, out, payload_bytes, length, third, error_ptr.dtype.element_ty,
            WORLD_SIZE, SHRINK, BY, INVERSE, ONLY_SUMS,
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
        exact = (payload_ptr + third).to(tl.pointer_type(EXACT))
        copy_tile(exact, grad, length, 1.0, COPY_BLOCK)
