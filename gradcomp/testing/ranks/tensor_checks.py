"""Check the tensors of a simulated collective, which refuses those that gloo refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradcomp.testing.ranks.transfer import REDUCTIONS

_REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGRAL = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
_COMPLEX = (torch.complex64, torch.complex128)


def traits(name: str, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return the dtype and shapes of a call's tensors.

    Raises RuntimeError or ValueError for tensors that gloo or NCCL refuses.
    """
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise RuntimeError(f"{name}: simulated ranks take dense tensors, got {tensor.layout}")
        channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        if not (tensor.is_contiguous() or channels_last):
            raise ValueError(
                f"{name}: tensors must be contiguous, got strides {tensor.stride()} of {list(tensor.shape)}"
            )
        accepted = _REAL + _INTEGRAL + (() if name == "gather" else _COMPLEX)
        if tensor.dtype not in accepted:
            raise RuntimeError(f"{name}: invalid scalar type {tensor.dtype}")
    shapes = [list(tensor.shape) for tensor in tensors]
    return {"dtype": tensors[0].dtype, "shape": shapes[0] if len(shapes) == 1 else shapes}


def reduction_name(name: str, opts: Any, tensors: Sequence[Tensor]) -> str:
    """Return the name of the reduction in opts. Raises RuntimeError if gloo refuses it on these tensors."""
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    op_name = str(getattr(op, "op", op)).rpartition(".")[2]
    integral = tensors[0].dtype in _INTEGRAL
    if (
        op_name not in REDUCTIONS
        or (op_name == "AVG" and integral)
        or (op_name in ("BAND", "BOR", "BXOR") and not integral)
    ):
        raise RuntimeError(f"{name}: cannot use ReduceOp.{op_name} with {tensors[0].dtype}")
    return op_name


def check_alike(name: str, tensors: Sequence[Tensor], like: Tensor, world_size: int) -> None:
    """Raise RuntimeError unless there is a tensor for every rank, each of the shape and dtype of `like`."""
    if len(tensors) != world_size:
        raise RuntimeError(f"{name}: {len(tensors)} tensors in a group of {world_size}")
    for index, tensor in enumerate(tensors):
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise RuntimeError(
                f"{name}: tensor {index} is {tensor.dtype} {list(tensor.shape)}, expected {like.dtype} "
                f"{list(like.shape)}"
            )


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two contiguous tensors share memory."""
    first, second = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in (one, other))
    return first[0] + first[1] > second[0] and second[1] > 0
