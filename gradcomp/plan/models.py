"""Models as lists of shapes, in registration order, from a user's module or a checkpoint; DDP's buckets."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gradcomp.comm.bucket import real_shape
from gradcomp.command_line import find_callable, in_words

Shape = tuple[int, ...]
Parameter = tuple[Shape, torch.dtype]

# DDP's defaults: torch.nn.parallel.DistributedDataParallel(bucket_cap_mb=25), and 1 MiB for the first bucket.
FIRST_BUCKET_BYTES, BUCKET_CAP_BYTES = 2**20, 25 * 2**20
MAX_HEADER_BYTES = 10**8  # of a safetensors file
CHECKPOINTS = (".pt", ".pth", ".bin", ".safetensors")
DTYPES = {each: getattr(torch, each) for each in ("float32", "bfloat16", "float16", "float64")}
NAMES = {"BF16": "bfloat16", "C64": "complex64", **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)}}


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

    name: a checkpoint's file (see shapes_in), or module:callable. The callable takes no argument and returns
        an nn.Module, a tuple that begins with a module, or a list of shapes, whose dtype is fp32.

    The callable runs on the meta device, where parameters need no memory. If that fails, it runs on the CPU.
    Raises ValueError for anything else, and a lazy module that has had no input.
    """
    if name.endswith(CHECKPOINTS):
        return shapes_in(Path(name))
    if ":" not in name:
        raise ValueError(f"model {name!r} is neither module:callable nor a file of {', '.join(CHECKPOINTS)}")
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
    return list(map(_in_hooks, found))


def _in_hooks(tensor: torch.Tensor) -> Parameter:
    """Return a gradient's shape and dtype in hooks: a complex one is real, with a last dimension of 2."""
    return real_shape(tensor), tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def shapes_in(path: Path) -> list[Parameter]:
    """Return the shape and dtype of each floating-point tensor in a checkpoint; shared memory counts once.

    path: a safetensors file, or what torch.save wrote of a state_dict, or of a dict with one as its "model",
        "state_dict" or "model_state_dict". Buffers, such as running means, can't be told from parameters.

    Raises ValueError for another file. No values are read.
    """
    try:
        if path.suffix == ".safetensors":
            return _in_safetensors(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if isinstance(loaded, Mapping):
            names = ("model", "state_dict", "model_state_dict")
            loaded = next((loaded[name] for name in names if name in loaded), loaded)
        values = loaded.values() if isinstance(loaded, Mapping) else ()
        tensors = [each for each in values if isinstance(each, torch.Tensor)]
        tensors = [each for each in tensors if each.is_floating_point() or each.is_complex()]
        found = {(each.data_ptr(), each.shape): _in_hooks(each) for each in tensors}
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, pickle.UnpicklingError) as error:
        raise ValueError(f"checkpoint {str(path)!r} can't be read: {in_words(error)}") from error
    if not found:
        raise ValueError(f"checkpoint {str(path)!r} has no floating-point tensor")
    return list(found.values())


def _in_safetensors(path: Path) -> list[Parameter]:
    """Return the tensors in a safetensors file: 8 bytes, its header's length; then the header, JSON."""
    with path.open("rb") as file:
        length = min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES)
        header = json.loads(file.read(length))
    tensors = [header[name] for name in header if name != "__metadata__"]
    tensors.sort(key=lambda each: each["data_offsets"])
    floats = [each for each in tensors if each["dtype"].startswith(("F", "BF", "C"))]
    dtypes = [getattr(torch, NAMES.get(each["dtype"], "float8_e4m3fn")) for each in floats]
    given = zip(floats, dtypes, strict=True)
    return [_in_hooks(torch.empty(each["shape"], dtype=dtype, device="meta")) for each, dtype in given]
