"""Copy a tile of elements, scaled and in another dtype: shared by the kernels that copy."""

from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# Elements per program of a kernel that copies: each of 128 threads has 8 loads of 16 bytes (fp32) in flight.
BLOCK = 4096
# Its launches' options. At 168 registers per thread, 12 warps fit a multiprocessor. Without this limit
# ptxas spills to fit more (fp16 to fp32, sm_120).
COPYING = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": False}


def element_type(dtype: torch.dtype) -> Any:
    """Return Triton's dtype for a torch dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


@triton.jit
def on_16_bytes(ptr):
    """Return ptr, a multiple of 16 bytes, in a form in which the compiler sees that it is one.

    A hint on ptr itself would also hold in branches where it is false.
    """
    return tl.multiple_of((ptr.to(tl.uint64) // 16 * 16).to(ptr.dtype), 16)


@triton.jit
def round_to_bf16(x):
    """Return x (fp32 or fp64) rounded to bf16, to nearest even, as fp32; NaN stays NaN."""
    x = x.to(tl.float32)
    bits = x.to(tl.uint32, bitcast=True)
    rounded = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)
    return (rounded & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def round_to(x, TYPE: tl.constexpr):
    """Return x (fp32 or fp64) in the dtype TYPE, rounded to nearest even; NaN stays NaN."""
    if TYPE == tl.bfloat16:
        x = x.to(tl.float32)
        if INTERPRETED:
            x = round_to_bf16(x)  # the interpreter truncates where hardware rounds
    return x.to(TYPE)


@triton.jit
def copy_tile(src_ptr, dst_ptr, length, scale: tl.float64, BLOCK: tl.constexpr):
    """Compute dst[i] = round(scale · src[i]) for 0 <= i < length <= BLOCK.

    src_ptr, dst_ptr: pointers to the tile's first element, in any two floating-point dtypes.

    The product is in fp64 if either dtype is fp64, else in fp32. It is rounded once, to nearest even.
    Moves length · (src bytes + dst bytes). Accesses are 128 bits wide if the tile has BLOCK elements and both
    addresses are multiples of 16 bytes.
    """
    src_type: tl.constexpr = src_ptr.dtype.element_ty
    dst_type: tl.constexpr = dst_ptr.dtype.element_ty
    wide: tl.constexpr = src_type == tl.float64 or dst_type == tl.float64
    ACC: tl.constexpr = tl.float64 if wide else tl.float32
    factor = (tl.full((), 1.0, tl.float64) * scale).to(ACC)
    offs = tl.arange(0, BLOCK)
    if (length == BLOCK) & ((src_ptr.to(tl.uint64) | dst_ptr.to(tl.uint64)) % 16 == 0):
        src, dst = on_16_bytes(src_ptr) + offs, on_16_bytes(dst_ptr) + offs
        tl.store(dst, round_to(tl.load(src).to(ACC) * factor, dst_type))
    else:
        mask = offs < length
        values = tl.load(src_ptr + offs, mask=mask, other=0.0).to(ACC)
        tl.store(dst_ptr + offs, round_to(values * factor, dst_type), mask=mask)
