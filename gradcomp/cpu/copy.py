"""The copying operations in plain torch, for CPU tensors and for devices without Triton.

Results are bit-identical to the kernels': multiply in fp32 (in fp64 if either side is fp64), round once. One
exception: torch converts fp64 to 16 bits by way of fp32, so it rounds twice.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

# The number of elements that torch copies without starting threads.
GRAIN = 1 << 15

# The number of elements to scale at a time when the dtype changes. In fp32 they take 4 MiB, which fits a
# last-level cache. Smaller chunks are slower, because torch's overhead per call outweighs their gain.
CHUNK = 1 << 20

# From this size on, scaling a tensor in a separate call is faster than a second pass over all tensors.
SINGLE_NUMEL = 1 << 13


@torch.no_grad()
def cast(src: torch.Tensor, *, out: torch.Tensor, scale: float = 1.0, overwrite: bool = False) -> None:
    """Write scale · src to out, rounded once to out's dtype.

    src, out: tensors of the same shape, with any strides.
    overwrite: True if src may be scaled in place. It is scaled only if the rounding stays the same.
    """
    if scale == 1.0:
        if torch.get_num_threads() == 1 or threading.current_thread() is threading.main_thread():
            out.copy_(src)
        else:
            # A hook decompresses on a backend's thread. OpenMP gives every thread that computes in parallel
            # its own team of threads. With more threads than CPUs, libgomp's threads wait for work without
            # spinning, which slows down forward and backward. So this copy must not run in parallel.
            torch._foreach_copy_(out.split(GRAIN), src.split(GRAIN))
    elif src.dtype == out.dtype:
        torch.mul(src, scale, out=out)
    elif not out.is_contiguous():
        contiguous = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        cast(src, out=contiguous, scale=scale, overwrite=overwrite)
        out.copy_(contiguous)
    else:
        # torch.mul with an out of another dtype would allocate a temporary as large as src.
        wide = torch.promote_types(torch.promote_types(src.dtype, out.dtype), torch.float32)
        in_place = overwrite and src.dtype == wide
        # One small scratch tensor: new memory costs a page fault per 4 KiB, and space in the cache.
        scratch = torch.empty(0 if in_place else min(CHUNK, src.numel()), dtype=wide, device=src.device)
        for chunk, target in zip(src.reshape(-1).split(CHUNK), out.view(-1).split(CHUNK), strict=True):
            scaled = chunk if in_place else scratch[: chunk.numel()]
            target.copy_(torch.mul(chunk.to(wide), scale, out=scaled))


def copy(tensors: Sequence[torch.Tensor], *, out: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    """Write scale · each tensor to the corresponding tensor of out.

    tensors, out: with any strides. Either may be views of one buffer.
    """
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
    """Multiply tensors of one dtype in place. Each element is rounded once. Call it under torch.no_grad()."""
    if tensors[0].dtype.itemsize > 2 or not tensors[0].is_cpu:
        torch._foreach_mul_(tensors, scale)  # type: ignore[call-overload]
    else:
        # On CPU, _foreach_mul_ rounds the factor to the tensors' 16 bits first.
        for tensor in tensors:
            tensor.mul_(scale)
