"""One function per operation, which checks its arguments and chooses between kernel and plain torch.

CUDA tensors go to the Triton kernels; so do CPU tensors under TRITON_INTERPRET=1, where Triton's
interpreter runs the kernels. Everything else goes to plain torch (cpu/).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton

from .cpu import copy as cpu
from .cpu import powersgd_plan as cpu_powersgd
from .cpu import quantize as cpu_quantize
from .cpu import quantize_plan as cpu_quantized_plan
from .kernels import cast as cast_kernel
from .kernels import flatten as flatten_kernel
from .kernels.device import has_streams, processor, send
from .kernels.powersgd import plan as powersgd_kernels
from .kernels.quantize import plan as quantize_kernels

if TYPE_CHECKING:
    from .layout import BlockLayout, FlatLayout, PowerSGDLayout

__all__ = [
    "PowerSGDPlan",
    "QuantizedPlan",
    "compile_powersgd",
    "compile_quantized",
    "compress_cast",
    "decompress_cast",
    "flatten",
    "has_streams",
    "powersgd_plan",
    "processor",
    "quantized_plan",
    "runs_triton",
    "scale_",
    "send",
    "unflatten",
]

PowerSGDPlan = powersgd_kernels.PowerSGDPlan | cpu_powersgd.PowerSGDPlan
QuantizedPlan = quantize_kernels.QuantizedPlan | cpu_quantized_plan.QuantizedPlan

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_HALVES = (torch.float16, torch.bfloat16)

_Tables = dict[tuple[torch.device, bool], flatten_kernel.FlattenTables]
_tables: weakref.WeakKeyDictionary[FlatLayout, _Tables] = weakref.WeakKeyDictionary()


def runs_triton(device: torch.device) -> bool:
    """Return whether tensors on this device go to the kernels."""
    return has_streams(device) or (_INTERPRETED and device.type == "cpu")


@torch.no_grad()
def compress_cast(
    buffer: torch.Tensor, *, out: torch.Tensor, scale: float = 1.0, overwrite: bool = False
) -> torch.Tensor:
    """out = scale · buffer, rounded once to 16 bits, in one pass. Returns out.

    buffer: contiguous, floating-point. out: contiguous float16 or bfloat16 of as many elements, on
    the same device. The product is formed in fp32 (fp64 for an fp64 buffer), so a value that fits
    only after scaling does not overflow. overwrite: buffer is not needed afterwards, and may hold anything;
    plain torch then scales it in place, in less time.

    Raises TypeError for a dtype, ValueError for a size, a device or a layout that doesn't fit.
    """
    if out.dtype not in _HALVES:
        raise TypeError(f"compress_cast writes float16 or bfloat16, but out is {out.dtype}")
    _check_cast("compress_cast", buffer, out)
    if runs_triton(out.device):
        cast_kernel.cast(buffer, out=out, scale=scale)
    else:
        cpu.cast(buffer.view(-1), out=out.view(-1), scale=scale, overwrite=overwrite)
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


@torch.no_grad()
def flatten(
    tensors: Sequence[torch.Tensor],
    layout: FlatLayout,
    *,
    out: torch.Tensor,
    scale: float = 1.0,
    parts: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """out = scale · the tensors one after another, each in its layout's order, in one launch. Returns out.

    tensors: of the layout's shapes, one dtype, on out's device; strided as they like (each that has other
    strides than its layout costs a copy). out: contiguous [layout.numel], any floating-point dtype; a value
    is rounded to it once. Complex tensors, whose out has their dtype, are copied by plain torch. parts: the
    tensors' views of out, for a caller that keeps them and has checked the tensors; plain torch makes and
    checks them otherwise.

    Raises TypeError for a dtype, ValueError for a shape or a device that doesn't fit.
    """
    if parts is None or runs_triton(out.device):
        _check_list("flatten", tensors, layout, out)
    if runs_triton(out.device) and not out.is_complex():
        ordered = [_in_order(i, tensor, layout) for i, tensor in enumerate(tensors)]
        flatten_kernel.flatten(ordered, _tables_of(layout, out.device, to_flat=True), out=out, scale=scale)
    else:
        cpu.copy(tensors, out=parts or _parts(out, layout), scale=scale)
    return out


@torch.no_grad()
def unflatten(
    flat: torch.Tensor,
    layout: FlatLayout,
    *,
    out: Sequence[torch.Tensor],
    scale: float = 1.0,
    parts: Sequence[torch.Tensor] | None = None,
) -> Sequence[torch.Tensor]:
    """The reverse of flatten: each tensor of out = scale · its part of flat. Returns out.

    flat: contiguous [layout.numel]. out: tensors of the layout's shapes, one dtype, on flat's device; strided
    as they like. parts: the tensors' views of flat, as in flatten. Dtypes and errors as in flatten.
    """
    if parts is None or runs_triton(flat.device):
        _check_list("unflatten", out, layout, flat)
    if runs_triton(flat.device) and not flat.is_complex():
        ordered = [_in_order(i, tensor, layout, copy=False) for i, tensor in enumerate(out)]
        flatten_kernel.unflatten(
            flat, _tables_of(layout, flat.device, to_flat=False), out=ordered, scale=scale
        )
        for tensor, source in zip(out, ordered, strict=True):
            if source is not tensor:
                tensor.copy_(source)
    else:
        cpu.copy(parts or _parts(flat, layout), out=out, scale=scale)
    return out


def scale_(tensors: Sequence[torch.Tensor], scale: float) -> None:
    """Multiply tensors of one dtype in place, each rounded once. Call it under torch.no_grad()."""
    cpu.scale_(tensors, scale)


def _in_order(index: int, tensor: torch.Tensor, layout: FlatLayout, copy: bool = True) -> torch.Tensor:
    """Return the tensor if it is stored in its layout's order, else a copy that is (empty without `copy`)."""
    strides = layout.strides[index]
    if tensor.stride() == strides or (layout.are_row_major[index] and tensor.is_contiguous()):
        return tensor
    ordered = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return ordered.copy_(tensor) if copy else ordered


def _parts(flat: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
    """Return the tensors of a layout as views of their flat buffer."""
    start = flat.storage_offset()
    described = zip(layout.shapes, layout.strides, layout.offsets, strict=True)
    return [flat.as_strided(shape, strides, start + offset) for shape, strides, offset in described]


def _tables_of(layout: FlatLayout, device: torch.device, *, to_flat: bool) -> flatten_kernel.FlattenTables:
    # One table per direction: a step that flattens some tensors and unflattens to others would otherwise send
    # both lists of addresses every time.
    tables = _tables.setdefault(layout, {})
    if (device, to_flat) not in tables:
        tables[device, to_flat] = flatten_kernel.FlattenTables(
            list(layout.tiles(flatten_kernel.BLOCK)), len(layout), device
        )
    return tables[device, to_flat]


def powersgd_plan(
    layout: PowerSGDLayout,
    dtype: torch.dtype,
    device: torch.device,
    *,
    error_feedback: bool,
    warm_start: bool,
    epsilon: float,
    seed: int,
    wire_dtype: torch.dtype | None = None,
    shares_scratch: bool = False,
) -> PowerSGDPlan:
    """Return PowerSGD's working set for one bucket, built once per layout; every step calls its three stages.

    layout: what is compressed. dtype: the bucket's; accumulation is in fp32 (fp64 for fp64). seed: the seed
    of the first step's random directions, the same on every rank. wire_dtype: that of p_wire and q_wire, the
    bucket's by default; with another one, their factors are stored column after column.

    plan.project(buffer, scale): M = gradient + error; plan.p_wire = scale · (all P = M Q, then what isn't
    compressed). All-reduce p_wire. plan.back_project(buffer, scale): orthonormalize P; plan.q_wire = scale ·
    all Q = Mᵀ P. All-reduce q_wire. plan.reconstruct(buffer, seed): gradient = P Qᵀ and the averages of what
    isn't compressed, written to the buffer. With scale = 1 / world size the result is the average.
    plan.project takes the indices of matrices whose P is sent as zeros, too: left_out.
    plan.wire_numels: the elements of p_wire's factors, of what isn't compressed, and of q_wire.

    plan.send_in_codes(p, q): instead, project and back_project leave what they would write to the wires in
    the payloads of two quantized plans: those of the shapes (1, p_wire's factors), (what isn't compressed,)
    and (1, q_wire's), of the wires' dtype, in 8 bits without error feedback. Average them, and dequantize to
    p_wire and q_wire.

    shares_scratch: plans on the kernels use one memory for partial sums and wires, so p_wire and q_wire hold
    nothing before project and after reconstruct. This thread has to call all three stages of one such plan
    before those of another one, on one stream per device.

    plan.error() and plan.directions() return what has to be kept across a restart; plan.load(error,
    directions) restores it.
    """
    on_kernels = partial(powersgd_kernels.PowerSGDPlan, shares_scratch=shares_scratch)
    plan = on_kernels if runs_triton(device) else cpu_powersgd.PowerSGDPlan
    return plan(
        layout,
        dtype,
        device,
        error_feedback=error_feedback,
        warm_start=warm_start,
        epsilon=epsilon,
        seed=seed,
        wire_dtype=wire_dtype,
    )


def compile_powersgd(
    layout: PowerSGDLayout, dtype: torch.dtype, device: torch.device, **arithmetic: Any
) -> None:
    """Compile the kernels that a powersgd_plan with these arguments launches, if it launches any.

    arithmetic: powersgd_plan's options that follow the device, but the seed; and codes, (dtype of what is
    sent exactly, elements with one scale), for a plan that sends codes. Needs seconds per kernel, or
    milliseconds for what Triton finds in its cache. Allocates nothing on the device but the kernels.
    """
    if has_streams(device):
        if "codes" in arithmetic:
            cap = cpu_quantize.largest_scale(8, torch.promote_types(dtype, torch.float32))
            arithmetic["codes"] = (*arithmetic["codes"], cap)
        powersgd_kernels.compile_kernels(layout, dtype, device, **arithmetic)


def quantized_plan(
    layout: BlockLayout,
    dtype: torch.dtype,
    device: torch.device,
    *,
    bits: int,
    error_feedback: bool,
    exact_dtype: torch.dtype | None = None,
) -> QuantizedPlan:
    """Return the working set of one bucket's quantized all-reduce, built once per layout.

    layout: what is quantized, and its shards. dtype: the bucket's; sums and errors are in fp32 (fp64 for
    fp64). bits: 4 or 8. exact_dtype: what is sent exactly is rounded to it; the bucket's by default.

    plan.quantize(flat, rank, unused): M = gradient + error; plan.payload [world size, bytes] = M's codes and
    scales and the exact elements, a row per shard; error = what is lost. unused: the layout's parts of which
    nothing is sent, so that their errors stay; the bucket has zeros there. All-to-all from plan.payload to
    plan.received. plan.average(rank): plan.mean [bytes] = the mean of received, plus what was lost there last
    time, quantized. All-gather from plan.mean to plan.payload. plan.dequantize(flat): the means, to the
    bucket.

    plan.error: [world size · shard_numel], what the mean lacks of this rank's gradients, by element of the
    padded blocks: the sender's error, plus the owner's in its shard. plan.shard_error: [shard_numel], the
    latter alone. Both None without error_feedback. Padding is zero in both.
    """
    options: dict[str, Any] = {"bits": bits, "error_feedback": error_feedback, "exact_dtype": exact_dtype}
    if runs_triton(device):
        quantizer = cpu_quantize.quantizer(bits, dtype)
        return quantize_kernels.QuantizedPlan(layout, dtype, device, **options, **quantizer)
    return cpu_quantized_plan.QuantizedPlan(layout, dtype, **options)


def compile_quantized(layout: BlockLayout, dtype: torch.dtype, device: torch.device, **options: Any) -> None:
    """Compile the kernels that a quantized_plan with these arguments launches: see compile_powersgd."""
    if has_streams(device):
        quantizer = cpu_quantize.quantizer(options["bits"], dtype)
        quantize_kernels.compile_kernels(layout, dtype, device, **options, **quantizer)


# --- checks of arguments, with messages that show the bad value ---

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


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


def _check_list(name: str, tensors: Sequence[torch.Tensor], layout: FlatLayout, flat: torch.Tensor) -> None:
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
    if tensor.dtype not in _FLOATS:
        raise TypeError(f"{name} takes floating-point tensors, got {tensor.dtype}")


def _require_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: tensors are on {tensor.device} and on {device}")
