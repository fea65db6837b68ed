"""Models as lists of shapes, in registration order, from a user's module or a checkpoint; DDP's buckets."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradcomp.command_line import in_words, load_callable

Shape = tuple[int, ...]

# DDP's defaults: torch.nn.parallel.DistributedDataParallel(bucket_cap_mb=25), and 1 MiB for the first bucket.
FIRST_BUCKET_BYTES = 2**20
BUCKET_CAP_BYTES = 25 * 2**20
MAX_HEADER_BYTES = 10**8  # of a safetensors file
CHECKPOINTS = (".pt", ".pth", ".bin", ".safetensors")


def num_elements(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


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


def load_shapes(name: str) -> list[Shape]:
    """Return the shapes of a model's parameters with gradients.

    name: a checkpoint's file (see shapes_in), or module:callable. The callable takes no argument and returns
        an nn.Module, a tuple that begins with a module, or a list of shapes.

    The callable runs on the meta device, where parameters need no memory. If that fails, it runs on the CPU.
    Raises ValueError for another name, a file that can't be read, and a callable that fails or returns
    anything else.
    """
    if name.endswith(CHECKPOINTS):
        return shapes_in(Path(name))
    if ":" not in name:
        raise ValueError(f"model {name!r} is neither module:callable nor a file of {', '.join(CHECKPOINTS)}")
    function = load_callable(name)
    try:
        with torch.device("meta"):
            made = function()
    except ValueError:
        made = function()
    return _shapes_of(made, name)


def _shapes_of(made: Any, name: str) -> list[Shape]:
    """Return the shapes of the parameters with gradients. made: the result of load_shapes' callable."""
    module = made[0] if isinstance(made, tuple) and made else made
    try:
        if isinstance(module, nn.Module):
            shapes = [tuple(each.shape) for each in module.parameters() if each.requires_grad]
        else:
            shapes = [tuple(torch.Size(shape)) for shape in made]
    except TypeError as error:
        raise ValueError(
            f"model {name!r} returned {type(made).__name__}; it must return an nn.Module, a tuple that "
            "begins with one, or a list of shapes"
        ) from error
    if not shapes:
        raise ValueError(f"model {name!r} has no parameter with a gradient")
    return shapes


def shapes_in(path: Path) -> list[Shape]:
    """Return the shapes of the floating-point tensors in a checkpoint; tensors that share memory count once.

    path: a safetensors file, or what torch.save wrote of a state_dict, or of a dict with one as its "model",
        "state_dict" or "model_state_dict". Buffers, such as running means, can't be told from parameters.

    Only shapes are read. Raises ValueError for another file.
    """
    try:
        if path.suffix == ".safetensors":
            return _safetensors_shapes(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, pickle.UnpicklingError) as error:
        raise ValueError(f"checkpoint {str(path)!r} can't be read: {in_words(error)}") from error
    if isinstance(loaded, Mapping):
        names = ("model", "state_dict", "model_state_dict")
        loaded = next((loaded[name] for name in names if name in loaded), loaded)
    found = loaded.values() if isinstance(loaded, Mapping) else ()
    tensors = [each for each in found if isinstance(each, torch.Tensor) and each.is_floating_point()]
    shapes = {(each.data_ptr(), each.shape): tuple(each.shape) for each in tensors}
    if not shapes:
        raise ValueError(f"checkpoint {str(path)!r} has no floating-point tensor")
    return list(shapes.values())


def _safetensors_shapes(path: Path) -> list[Shape]:
    """Return the shapes in a safetensors file: 8 bytes, its header's length; then the header, JSON."""
    with path.open("rb") as file:
        length = min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES)
        header = json.loads(file.read(length))
    tensors = [header[name] for name in header if name != "__metadata__"]
    tensors.sort(key=lambda each: each["data_offsets"])
    return [tuple(each["shape"]) for each in tensors if each["dtype"].startswith(("F", "BF"))]
