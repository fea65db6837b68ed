"""One function per operation: checks its arguments, then chooses who computes.

CUDA tensors go to the Triton kernels; so do CPU tensors under TRITON_INTERPRET=1, where Triton's
interpreter runs the kernels. Everything else goes to plain torch (cpu/).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton

from .cpu import copy as cpu
from .cpu import low_rank as cpu_low_rank
from .kernels import cast as cast_kernel
from .kernels import flatten as flatten_kernel
from .kernels import powersgd_plan

if TYPE_CHECKING:
    from .layout import FlatLayout, LowRankLayout

__all__ = [
    "LowRankPlan",
    "compress_cast",
    "decompress_cast",
    "flatten",
    "gather",
    "low_rank_plan",
    "runs_triton",
    "scatter",
    "unflatten",
]

LowRankPlan = powersgd_plan.LowRankPlan | cpu_low_rank.LowRankPlan

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_HALVES = (torch.float16, torch.bfloat16)

_Tables = dict[tuple[torch.device, bool], flatten_kernel.FlattenTables]
_tables: weakref.WeakKeyDictionary[FlatLayout, _Tables] = weakref.WeakKeyDictionary()


def runs_triton(device: torch.device) -> bool:
    """Whether tensors on this device go to the kernels."""
    return device.type == "cuda" or (_INTERPRETED and device.type == "cpu")


@torch.no_grad()
def compress_cast(buffer: torch.Tensor, *, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """out = scale · buffer, rounded once to 16 bits, in one pass. Returns out.

    buffer: contiguous, floating-point. out: contiguous float16 or bfloat16 of as many elements, on
    the same device. The product is formed in fp32 (fp64 for an fp64 buffer), so a value that fits
    only after scaling does not overflow.

    Raises TypeError for a dtype, ValueError for a size, a device or a layout that doesn't fit.
    """
    if out.dtype not in _HALVES:
        raise TypeError(f"compress_cast writes float16 or bfloat16, but out is {out.dtype}")
    _check_cast("compress_cast", buffer, out)
    if runs_triton(out.device):
        cast_kernel.cast(buffer, out=out, scale=scale)
    else:
        cpu.cast(buffer.view(-1), out=out.view(-1), scale=scale)
    return out


@torch.no_grad()
def decompress_cast(compressed: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """out = compressed in out's dtype, in one pass. Returns out.

    compressed: contiguous, floating-point. out: contiguous, floating-point, as many elements, on the
    same device.

    Raises TypeError for a dtype, ValueError for a size, a device or a layout that doesn't fit.
    """
    _check_cast("decompress_cast", compressed, out)
    if runs_triton(out.device):
        cast_kernel.cast(compressed, out=out)
    else:
        cpu.decompress(compressed.view(-1), out=out.view(-1))
    return out


def _check_cast(name: str, src: torch.Tensor, out: torch.Tensor) -> None:
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


@torch.no_grad()
def flatten(
    tensors: Sequence[torch.Tensor],
    layout: FlatLayout,
    *,
    out: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor:
    """out = scale · the tensors one after another, in row-major order, in one launch. Returns out.

    tensors: of the layout's shapes, one floating-point dtype, on out's device; strided as they like
    (each non-contiguous one costs a copy). out: contiguous [layout.numel], any floating-point dtype;
    a value is rounded to it once.

    Raises TypeError for a dtype, ValueError for a shape or a device that doesn't fit.
    """
    _check_list("flatten", tensors, layout, out)
    if runs_triton(out.device):
        tables = _tables_of(layout, out.device, to_flat=True)
        flatten_kernel.flatten(tensors, tables, out=out, scale=scale)
    else:
        cpu.flatten(tensors, out=out, scale=scale)
    return out


@torch.no_grad()
def unflatten(
    flat: torch.Tensor,
    layout: FlatLayout,
    *,
    out: Sequence[torch.Tensor],
    scale: float = 1.0,
) -> Sequence[torch.Tensor]:
    """The reverse of flatten: each tensor of out = scale · its part of flat. Returns out.

    flat: contiguous [layout.numel], any floating-point dtype. out: tensors of the layout's shapes,
    one floating-point dtype, on flat's device; strided as they like.

    Raises TypeError for a dtype, ValueError for a shape or a device that doesn't fit.
    """
    _check_list("unflatten", out, layout, flat)
    if runs_triton(flat.device):
        tables = _tables_of(layout, flat.device, to_flat=False)
        flatten_kernel.unflatten(flat, tables, out=out, scale=scale)
    else:
        cpu.unflatten(flat, out=out, scale=scale)
    return out


def gather(
    tensors: Sequence[torch.Tensor],
    layout: FlatLayout,
    *,
    out: Sequence[torch.Tensor],
    scale: float = 1.0,
) -> None:
    """Every tensor of out = scale · its tensor, in one launch.

    tensors: of out's shapes, on its device; of one dtype, strided as they like. out: neighbours in one buffer, of one
    dtype, each without gaps, its dimensions in any order (channels-last, say). layout: of out's sizes, as
    FlatLayout((tensor.numel(),) for tensor in out).

    Complex tensors are gathered by plain torch. Call it under torch.no_grad(). Raises as flatten does.
    """
    if runs_triton(out[0].device) and out[0].dtype in _FLOATS:
        ordered = [
            tensor if _lie_alike(tensor, part) else torch.empty_like(part, dtype=tensor.dtype).copy_(tensor)
            for tensor, part in zip(tensors, out, strict=True)
        ]
        flatten(
            [_in_memory_order(tensor) for tensor in ordered], layout, out=_together(out, layout), scale=scale
        )
    else:
        cpu.gather(tensors, out=out, scale=scale)


def scatter(tensors: Sequence[torch.Tensor], layout: FlatLayout, *, out: Sequence[torch.Tensor]) -> None:
    """The reverse of gather: every tensor of out = its tensor, in one launch; tensors are the neighbours.

    One launch where the tensors of out have the strides of tensors, or both are contiguous. Call it under
    torch.no_grad().
    """
    in_one = runs_triton(out[0].device) and out[0].dtype in _FLOATS and all(map(_lie_alike, out, tensors))
    if in_one:
        unflatten(_together(tensors, layout), layout, out=[_in_memory_order(tensor) for tensor in out])
    else:
        torch._foreach_copy_(out, tensors)  # type: ignore[arg-type]


def _lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape, one of them without gaps, have their elements in the same order in memory."""
    return one.stride() == other.stride() or (one.is_contiguous() and other.is_contiguous())


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without gaps as it lies in memory, 1-D."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _together(parts: Sequence[torch.Tensor], layout: FlatLayout) -> torch.Tensor:
    """Neighbours in one buffer as one tensor, 1-D."""
    return parts[0].as_strided((layout.numel,), (1,), parts[0].storage_offset())


def _tables_of(layout: FlatLayout, device: torch.device, *, to_flat: bool) -> flatten_kernel.FlattenTables:
    # One table per direction: a step that gathers from some tensors and scatters to others would
    # otherwise send both lists of addresses every time.
    tables = _tables.setdefault(layout, {})
    if (device, to_flat) not in tables:
        tables[device, to_flat] = flatten_kernel.FlattenTables(
            list(layout.tiles(flatten_kernel.BLOCK)), len(layout), device
        )
    return tables[device, to_flat]


def _check_list(name: str, tensors: Sequence[torch.Tensor], layout: FlatLayout, flat: torch.Tensor) -> None:
    _require_float(name, flat)
    if flat.dim() != 1 or flat.numel() != layout.numel or not flat.is_contiguous():
        raise ValueError(
            f"{name} takes a contiguous buffer of shape ({layout.numel},) for {layout}, "
            f"got shape {tuple(flat.shape)} with strides {flat.stride()}"
        )
    if len(tensors) != len(layout):
        raise ValueError(f"{name}: {layout} got {len(tensors)} tensors")
    for index, (tensor, shape) in enumerate(zip(tensors, layout.shapes, strict=True)):
        if tensor.shape != shape:
            raise ValueError(f"{name}: tensor {index} has shape {tuple(tensor.shape)}, its layout {shape}")
        _require_float(name, tensor)
        if tensor.dtype != tensors[0].dtype:
            raise TypeError(
                f"{name} takes tensors of one dtype: tensor 0 is {tensors[0].dtype}, "
                f"tensor {index} is {tensor.dtype}"
            )
        _require_device(name, tensor, flat.device)


def _require_float(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _FLOATS:
        raise TypeError(f"{name} takes floating-point tensors, got {tensor.dtype}")


def _require_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: tensors lie on {tensor.device} and on {device}")


def low_rank_plan(
    layout: LowRankLayout,
    dtype: torch.dtype,
    device: torch.device,
    *,
    error_feedback: bool,
    warm_start: bool,
    epsilon: float,
    seed: int,
) -> LowRankPlan:
    """PowerSGD's working set for one bucket, built once per layout; every step calls its three stages in turn.

    layout: what is compressed. dtype: the bucket's; accumulation is in fp32 (fp64 for fp64). seed: of the
    random directions of the first step, the same on every rank.

    plan.project(buffer, scale): M = gradient + error; plan.p_wire = scale · (all P = M Q, then what isn't
    compressed). All-reduce p_wire. plan.back_project(buffer, scale): orthonormalise P; plan.q_wire = scale ·
    all Q = Mᵀ P. All-reduce q_wire. plan.reconstruct(buffer, seed): gradient = P Qᵀ and the averages of the
    rest, written to the buffer. With scale = 1 / world size the result is the average.

    plan.error() and plan.directions() give what has to be kept across a restart, plan.load(error, directions)
    takes it back.
    """
    plan = powersgd_plan.LowRankPlan if runs_triton(device) else cpu_low_rank.LowRankPlan
    return plan(
        layout,
        dtype,
        device,
        error_feedback=error_feedback,
        warm_start=warm_start,
        epsilon=epsilon,
        seed=seed,
    )
