"""The copying operations in plain torch: what runs on CPU tensors, and on devices that Triton doesn't serve.

Their results are the kernels' bit for bit: multiply in fp32 (in fp64 when either side is fp64), round once.
One exception: torch converts fp64 to 16 bits by way of fp32, rounding twice.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

# The number of elements that torch copies without starting threads.
GRAIN = 1 << 15

# The number of elements scaled at a time when the dtype changes. In fp32 they take 4 MiB, which fits a
# last-level cache; smaller chunks lose more to torch's overhead per call than they gain.
CHUNK = 1 << 20

# From this size on, scaling a tensor in a call of its own costs less than a second pass over all tensors.
SINGLE_NUMEL = 1 << 13


def cast(src: torch.Tensor, *, out: torch.Tensor, scale: float = 1.0, overwrite: bool = False) -> None:
    """Write scale · src to out, rounded once to out's dtype. Both have the same shape and any strides.

    overwrite: src may be scaled in place, where that rounds alike.
    """
    if scale == 1.0:
        out.copy_(src)
    elif src.dtype == out.dtype:
        torch.mul(src, scale, out=out)
    elif not out.is_contiguous():
        contiguous = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        cast(src, out=contiguous, scale=scale, overwrite=overwrite)
        out.copy_(contiguous)
    else:
        # torch.mul into an out of another dtype goes through a temporary of the whole size.
        wide = torch.promote_types(torch.promote_types(src.dtype, out.dtype), torch.float32)
        in_place = overwrite and src.dtype == wide
        # New memory costs a page fault per 4 KiB, and its place in the cache.
        scratch = torch.empty(0 if in_place else min(CHUNK, src.numel()), dtype=wide, device=src.device)
        for chunk, target in zip(src.reshape(-1).split(CHUNK), out.view(-1).split(CHUNK), strict=True):
            scaled = chunk if in_place else scratch[: chunk.numel()]
            target.copy_(torch.mul(chunk.to(wide), scale, out=scaled))


def decompress(src: torch.Tensor, *, out: torch.Tensor) -> None:
    """Copy src to out, in out's dtype. Both are flat."""
    if torch.get_num_threads() == 1 or threading.current_thread() is threading.main_thread():
        out.copy_(src)
    else:
        # This is a backend's thread, on which a hook decompresses. OpenMP gives every thread that computes in
        # parallel a team of threads. Once there are more of these than CPUs, libgomp's wait for work without
        # spinning, which slows down forward and backward. So nothing here runs in parallel.
        torch._foreach_copy_(out.split(GRAIN), src.split(GRAIN))


def copy(tensors: Sequence[torch.Tensor], *, out: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    """Write scale · each tensor to its tensor of out. Any strides; either side may be parts of one buffer."""
    if not out:
        return
    if scale == 1.0:
        torch._foreach_copy_(out, tensors)  # type: ignore[arg-type]
        return
    small: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor, part in zip(tensors, out, strict=True):
        if part.numel() < SINGLE_NUMEL and part.dtype == tensor.dtype:
            small.append((part, tensor))
        else:
            cast(tensor, out=part, scale=scale)
    if small:
        parts, sources = zip(*small, strict=True)
        torch._foreach_copy_(parts, sources)
        scale_(parts, scale)


def scale_(tensors: Sequence[torch.Tensor], scale: float) -> None:
    """Multiply tensors of one dtype, each rounded once."""
    if tensors[0].dtype.itemsize > 2 or not tensors[0].is_cpu:
        torch._foreach_mul_(tensors, scale)  # type: ignore[call-overload]
    else:
        # On CPU, _foreach_mul_ rounds the factor to the tensors' 16 bits first.
        for tensor in tensors:
            tensor.mul_(scale)
