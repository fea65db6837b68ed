"""The operations in plain torch: what runs on CPU tensors, and on devices that Triton doesn't serve.

The copying operations give the kernels' results bit for bit: multiply in fp32 (in fp64 when either
side is fp64), round once. One exception: torch converts fp64 to 16 bits by way of fp32, rounding twice.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

# Elements that torch copies without starting threads.
GRAIN = 1 << 15

# Elements scaled at a time when the dtype changes. Their fp32 form takes 4 MiB, which fits a last-level
# cache; smaller chunks lose more to torch's overhead per call than they gain.
CHUNK = 1 << 20

# From so many elements on, a call of its own costs a tensor less than the second pass that scaling all of
# them takes.
SINGLE_NUMEL = 1 << 13


def cast(src: torch.Tensor, *, out: torch.Tensor, scale: float = 1.0) -> None:
    """out = scale · src, rounded once to out's dtype. Same shape, any strides."""
    if scale == 1.0:
        out.copy_(src)
    elif src.dtype == out.dtype:
        torch.mul(src, scale, out=out)
    elif not out.is_contiguous():
        contiguous = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        cast(src, out=contiguous, scale=scale)
        out.copy_(contiguous)
    else:
        # torch.mul into an out of another dtype goes through a temporary of the whole size.
        wide = torch.promote_types(torch.promote_types(src.dtype, out.dtype), torch.float32)
        scratch = torch.empty(min(CHUNK, src.numel()), dtype=wide, device=src.device)
        chunks = zip(src.reshape(-1).split(CHUNK), out.view(-1).split(CHUNK), strict=True)
        for chunk, target in chunks:
            scaled = torch.mul(chunk.to(wide), scale, out=scratch[: chunk.numel()])
            target.copy_(scaled)


def decompress(src: torch.Tensor, *, out: torch.Tensor) -> None:
    """out = src in out's dtype. Both flat."""
    if threading.current_thread() is threading.main_thread():
        out.copy_(src)
    else:
        # A backend's thread, on which a hook decompresses. OpenMP gives every thread that computes in
        # parallel a team of threads. Once there are more of these than CPUs, libgomp's wait for work without
        # spinning, which forward and backward take longer for. So no parallel work here.
        torch._foreach_copy_(out.split(GRAIN), src.split(GRAIN))


def copy(tensors: Sequence[torch.Tensor], *, out: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    """Every tensor of out = scale · its tensor. Shapes alike, any strides; either side may be parts of one
    buffer."""
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
