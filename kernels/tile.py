"""Copy a tile of elements, scaled and in another dtype: shared by the kernels that copy."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# Registers per thread of a kernel that copies: 12 warps fit a multiprocessor. Without this limit ptxas
# spills to fit more (fp16 to fp32, sm_120).
COPY_REGISTERS = 168


@triton.jit
def round_to(x, TYPE: tl.constexpr):
    """Return x (fp32 or fp64) in the dtype TYPE, rounded to nearest even; NaN stays NaN."""
    if TYPE == tl.bfloat16:
        x = x.to(tl.float32)
        if INTERPRETED:
            # The interpreter truncates where hardware rounds, so round to 16 bits here.
            bits = x.to(tl.uint32, bitcast=True)
            rounded = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)
            x = (rounded & 0xFFFF0000).to(tl.float32, bitcast=True)
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
    src_address = src_ptr.to(tl.uint64)
    dst_address = dst_ptr.to(tl.uint64)
    if (length == BLOCK) & ((src_address | dst_address) % 16 == 0):
        # Both addresses are multiples of 16 here. The hint is on rounded copies of the addresses: on src_ptr
        # and dst_ptr it would also hold in the other branch, where it is false.
        src = tl.multiple_of((src_address // 16 * 16).to(tl.pointer_type(src_type)), 16)
        dst = tl.multiple_of((dst_address // 16 * 16).to(tl.pointer_type(dst_type)), 16)
        tl.store(dst + offs, round_to(tl.load(src + offs).to(ACC) * factor, dst_type))
    else:
        mask = offs < length
        values = tl.load(src_ptr + offs, mask=mask, other=0.0).to(ACC)
        tl.store(dst_ptr + offs, round_to(values * factor, dst_type), mask=mask)
