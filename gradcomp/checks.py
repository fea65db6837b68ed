"""Check the arguments of ops: dtypes, sizes, devices and layouts, with messages that show the bad value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .layout import FlatLayout

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_cast(name: str, src: torch.Tensor, out: torch.Tensor) -> None:
    for tensor in (src, out):
        _require_float(name, tensor)
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} takes contiguous tensors, got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}"
            )
    if src.numel() != out.numel():
        raise ValueError(f"{name}: {src.numel()} elements do not fit an out of {out.numel()}")
    _require_device(name, src, out.device)


def check_list(name: str, tensors: Sequence[torch.Tensor], layout: FlatLayout, flat: torch.Tensor) -> None:
    if not flat.is_complex():
        _require_float(name, flat)
    if flat.dim() != 1 or flat.numel() != layout.numel or not flat.is_contiguous():
        raise ValueError(
            f"{name} takes a contiguous buffer of shape ({layout.numel},) for {layout}, "
            f"got shape {tuple(flat.shape)} with strides {flat.stride()}"
        )
    if len(tensors) != len(layout):
        raise ValueError(f"{name}: {layout} got {len(tensors)} tensors")
    are_alike = (
        tuple([tensor.shape for tensor in tensors]) == layout.shapes
        and len({tensor.dtype for tensor in tensors}) <= 1
        and {tensor.device for tensor in tensors} <= {flat.device}
    )
    if not are_alike:
        _explain_difference(name, tensors, layout, flat.device)
    if tensors and flat.is_complex() and tensors[0].dtype != flat.dtype:
        raise TypeError(
            f"{name} converts no complex numbers: tensors are {tensors[0].dtype}, flat is {flat.dtype}"
        )
    if tensors and not flat.is_complex():
        _require_float(name, tensors[0])


def _explain_difference(
    name: str, tensors: Sequence[torch.Tensor], layout: FlatLayout, device: torch.device
) -> None:
    """Raise the error of the first tensor that differs from its layout, the first tensor or the device."""
    for index, (tensor, shape) in enumerate(zip(tensors, layout.shapes, strict=True)):
        if tensor.shape != shape:
            raise ValueError(f"{name}: tensor {index} has shape {tuple(tensor.shape)}, its layout {shape}")
        if tensor.dtype != tensors[0].dtype:
            raise TypeError(
                f"{name} takes tensors of one dtype: tensor 0 is {tensors[0].dtype}, "
                f"tensor {index} is {tensor.dtype}"
            )
        _require_device(name, tensor, device)


def _require_float(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name} takes floating-point tensors, got {tensor.dtype}")


def _require_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: tensors are on {tensor.device} and on {device}")
