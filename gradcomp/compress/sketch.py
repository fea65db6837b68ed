"""A short summary of a long vector, from which the norm of a mean over ranks can be estimated.

Norms don't add up over ranks: that of the mean of their errors can't be told from the norms of the errors.
But a sketch is linear: the mean of the ranks' sketches is the sketch of the mean. Elements get signs that are
random but the same on every rank, and are summed in LENGTH places (Charikar, Chen and Farach-Colton, "Finding
frequent items in data streams", ICALP 2002). The norm of a sketch is that of the vector up to a relative
standard deviation of about 1 / sqrt(2 · LENGTH), 4.5 %, where the vector's energy is spread over many
elements.
"""

from functools import cache

import torch

from gradcomp import ops

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.

# A prime, so that neither the rows nor the columns of a matrix all fall into a few of the places.
LENGTH = 251
_NUM_SHIFTS = 1 << 16


def chunk_numel(device: torch.device) -> int:
    """Return how many elements are summed at a time: 1 MB in fp32, which a processor's cache holds.

    On CUDA 16 MB: few launches matter more there.
    """
    return LENGTH << (14 if ops.has_streams(device) else 10)


@cache
def _signs(device: torch.device) -> torch.Tensor:
    """Return random signs, fp32 [chunk_numel + _NUM_SHIFTS], the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    numel = chunk_numel(device) + _NUM_SHIFTS
    signs = torch.randint(0, 2, (numel,), generator=generator, dtype=torch.float32, device="cpu")
    return ops.send(signs * 2 - 1, device)


@torch.no_grad()
def measure(values: torch.Tensor, shift: int, *, out: torch.Tensor) -> None:
    """Write a vector's Euclidean norm and its sketch to out, without a wait for the host.

    values: [numel], floating-point. shift: chooses the signs; the same for all vectors that are added. out:
    fp32 [1 + LENGTH] on the same device; inf or NaN where the values are, or where their squares don't fit.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    square = torch.zeros((), dtype=torch.float64, device=values.device)
    sketch = torch.zeros(LENGTH, dtype=wide, device=values.device)
    signs, size = _signs(values.device), chunk_numel(values.device)
    scratch = torch.empty(min(size, values.numel()), dtype=wide, device=values.device)
    for index, chunk in enumerate(values.split(size) if values.numel() else ()):
        chunk = chunk.to(wide)
        square += torch.linalg.vector_norm(chunk).double().square()
        start = (shift + 7919 * index) % _NUM_SHIFTS
        signed = torch.mul(chunk, signs[start : start + len(chunk)], out=scratch[: len(chunk)])
        num_whole = len(chunk) // LENGTH * LENGTH
        sketch += signed[:num_whole].view(-1, LENGTH).sum(0)
        rest = signed[num_whole:]
        sketch[: len(rest)] += rest
    out[0] = square.sqrt()
    out[1:] = sketch
