"""Scale a buffer and change its dtype in one pass: to 16 bits for the wire, and back."""

import functools

import torch
import triton
import triton.language as tl

from .device import launching_on
from .launch import Launch
from .tile import BLOCK, COPYING, copy_tile


# Nothing is specialized on what differs between buckets: their sizes, and the addresses of parts of buffers.
# copy_tile asks for alignment itself. So a pair of dtypes has one variant, which compile_cast can make early.
@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["src_ptr", "dst_ptr"])
def _cast_kernel(src_ptr, dst_ptr, numel: tl.int64, scale: tl.float64, BLOCK: tl.constexpr):
    """Compute dst[i] = round(scale · src[i]) for 0 <= i < numel.

    src_ptr, dst_ptr: [numel], any two floating-point dtypes.
    Grid: one program per BLOCK elements.
    Moves numel · (src bytes + dst bytes): 6 B per element from fp32 to 16 bits.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    length = tl.minimum(numel - start, BLOCK)
    copy_tile(src_ptr + start, dst_ptr + start, length, scale, BLOCK)


def cast(src: torch.Tensor, *, out: torch.Tensor, scale: float = 1.0) -> None:
    """Write scale · src to out, rounded once to out's dtype, in one launch.

    src: contiguous, any floating-point dtype.
    out: contiguous, as many elements as src, any floating-point dtype, on src's device. It may be src itself;
        otherwise the two must not share memory.
    """
    with launching_on(out.device):
        _launch(src, out, src.numel(), scale)()


@functools.cache
def compile_cast(src_dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device) -> None:
    """Compile what cast launches for tensors of these dtypes on a device with streams."""
    src, out = (torch.empty(1, dtype=dtype, device="meta") for dtype in (src_dtype, out_dtype))
    with launching_on(device):
        _launch(src, out, 1, 1.0).compile()


def _launch(src: torch.Tensor, out: torch.Tensor, numel: int, scale: float) -> Launch:
    return Launch(_cast_kernel, triton.cdiv(numel, BLOCK), src, out, numel, scale, BLOCK=BLOCK, **COPYING)
