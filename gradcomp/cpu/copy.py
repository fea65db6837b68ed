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

# From so many elements on, a call of its own costs a tensor less than the second pass that scaling all of them takes.
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
        pieces = zip(src.reshape(-1).split(CHUNK), out.view(-1).split(CHUNK), strict=True)
        for piece, target in pieces:
            scaled = torch.mul(piece.to(wide), scale, out=scratch[: piece.numel()])
            target.copy_(scaled)


def decompress(src: torch.Tensor, *, out: torch.Tensor) -> None:
    """out = src in out's dtype. Both flat."""
    if threading.current_thread() is threading.main_thread():
        out.copy_(src)
    else:
        # A backend's thread, on which a hook decompresses. OpenMP gives every thread that computes in parallel a team
        # of threads. Once there are more of these than CPUs, libgomp's wait for work without spinning, which forward
        # and backward take longer for. So no parallel work here.
        torch._foreach_copy_(out.split(GRAIN), src.split(GRAIN))


def flatten(tensors: Sequence[torch.Tensor], *, out: torch.Tensor, scale: float = 1.0) -> None:
    """out = scale · concatenation of the tensors in row-major order."""
    parts = out.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        cast(tensor, out=part.view(tensor.shape), scale=scale)


def unflatten(flat: torch.Tensor, *, out: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    """The reverse of flatten: each tensor of out = scale · its part of flat."""
    parts = flat.split([tensor.numel() for tensor in out])
    for tensor, part in zip(out, parts, strict=True):
        cast(part.view(tensor.shape), out=tensor, scale=scale)


def gather(tensors: Sequence[torch.Tensor], *, out: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    """Every tensor of out = scale · its tensor, of one dtype; any strides."""
    if scale == 1.0:
        torch._foreach_copy_(out, tensors)  # type: ignore[arg-type]
        return
    small: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor, part in zip(tensors, out, strict=True):
        if part.numel() < SINGLE_NUMEL:
            small.append((part, tensor))
        else:
            cast(tensor, out=part, scale=scale)
    if small:
        parts, sources = zip(*small, strict=True)
        torch._foreach_copy_(parts, sources)
        torch._foreach_mul_(parts, scale)
