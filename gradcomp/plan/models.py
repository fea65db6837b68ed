"""Models as lists of shapes, in registration order, from a user's callable; DDP's buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gradcomp.comm.bucket import real_shape
from gradcomp.command_line import find_callable, in_words

Shape = tuple[int, ...]
Parameter = tuple[Shape, torch.dtype]

# DDP's defaults: torch.nn.parallel.DistributedDataParallel(bucket_cap_mb=25), and 1 MiB for the first bucket.
FIRST_BUCKET_BYTES, BUCKET_CAP_BYTES = 2**20, 25 * 2**20
DTYPES = {each: getattr(torch, each) for each in ("float32", "bfloat16", "float16", "float64")}


def buckets_of(
    shapes: Sequence[Shape], itemsize: int = 4, cap_bytes: float = BUCKET_CAP_BYTES
) -> list[list[Shape]]:
    """Return the shapes of each bucket of a model of one dtype, as DDP has them from its second iteration on.

    DDP rebuilds its buckets in the order in which gradients become ready: the reversed order is assumed. A
    bucket closes once it reaches its cap, so one large tensor makes a large bucket.
    """
    buckets: list[list[Shape]] = []
    filled, cap = math.inf, min(float(FIRST_BUCKET_BYTES), cap_bytes)
    for shape in reversed(shapes):
        if filled >= cap:
            cap = cap_bytes if buckets else cap
            buckets.append([])
            filled = 0
        buckets[-1].append(tuple(shape))
        filled += math.prod(shape) * itemsize
    return buckets


def load_shapes(name: str) -> list[Parameter]:
    """Return the shape and dtype of each of a model's parameters with gradients.

    name: module:callable. The callable takes no argument and returns an nn.Module, a tuple that begins with a
        module, or a list of shapes, whose dtype is fp32.

    The callable runs on the meta device, where parameters need no memory. If that fails, it runs on the CPU.
    Raises ValueError for anything else, and a lazy module that has had no input.
    """
    if ":" not in name:
        raise ValueError(f"model {name!r} is not module:callable")
    function = find_callable(name, "model")
    try:
        try:
            with torch.device("meta"):
                made = function()
        except Exception:
            made = function()
    except (Exception, SystemExit) as error:
        raise ValueError(f"model {name!r}: calling it without arguments fails: {in_words(error)}") from error
    module = made[0] if isinstance(made, tuple) and made else made
    if isinstance(module, nn.Module):
        found: list[torch.Tensor] = [each for each in module.parameters() if each.requires_grad]
        if lazy := [key for key, each in module.named_parameters() if is_lazy(each)]:
            raise ValueError(f"model {name!r}: lazy parameter {lazy[0]!r} has no shape: run a forward first")
    else:
        try:
            found = [torch.empty(torch.Size(shape), dtype=torch.float32, device="meta") for shape in made]
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"model {name!r} returned {type(made).__name__}; it must return an nn.Module, a tuple that "
                "begins with one, or a list of shapes"
            ) from error
    if not found:
        raise ValueError(f"model {name!r} has no parameter with a gradient")
    # In hooks a complex gradient is real, with a last dimension of 2.
    return [(real_shape(each), each.dtype.to_real() if each.is_complex() else each.dtype) for each in found]
