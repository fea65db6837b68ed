"""One function per operation: it checks its arguments and chooses between kernel and plain torch.

The Triton kernels compute on CUDA tensors; those on AMD's GPUs are CUDA tensors, too. With TRITON_INTERPRET=1
they also compute on CPU tensors, in Triton's interpreter. Plain torch (cpu/) computes on all other tensors.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton

from .cpu import copy as cpu
from .cpu import powersgd as cpu_powersgd
from .cpu import quantize as cpu_quantize
from .cpu.copy import scale_ as scale_
from .device import current_stream, has_streams
from .kernels import flatten as flatten_kernel
from .kernels.powersgd import plan as powersgd_kernels
from .kernels.quantize import kernels as quantize_kernels

if TYPE_CHECKING:
    from .layout import BlockLayout, FlatLayout, PowerSGDLayout

PowerSGDPlan = powersgd_kernels.PowerSGDPlan | cpu_powersgd.PowerSGDPlan
# A launch on the kernels, which has a compile(device); or the same in plain torch.
Operation = Any

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_tables: weakref.WeakKeyDictionary[FlatLayout, dict[Any, flatten_kernel.FlattenTables]]
_tables = weakref.WeakKeyDictionary()


def runs_triton(device: torch.device) -> bool:
    """Return whether the Triton kernels compute on tensors on this device."""
    return has_streams(device) or (_INTERPRETED and device.type == "cpu")


def cast(
    src: torch.Tensor, *, out: torch.Tensor, scale: float = 1.0, overwrite: bool = False
) -> torch.Tensor:
    """Compute out = scale · src, rounded once, in one pass. Returns out.

    src: contiguous, floating-point.
    out: contiguous, floating-point, with as many elements, on the same device.
    scale: multiplied in fp32 (fp64 if a side is fp64), so a value that fits only after scaling doesn't
        overflow.
    overwrite: True if src's values are not needed afterwards. Plain torch then scales in place: faster.

    Raises TypeError for a wrong dtype; ValueError for a size, a device or a layout that doesn't fit.
    """
    for tensor in (src, out):
        if tensor.dtype not in _FLOATS:
            raise TypeError(f"cast takes floating-point tensors, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"cast takes contiguous tensors, got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}"
            )
    if src.numel() != out.numel():
        raise ValueError(f"cast: {src.numel()} elements do not fit an out of {out.numel()}")
    if src.device != out.device:
        raise ValueError(f"cast: tensors are on {src.device} and on {out.device}")
    if runs_triton(out.device):
        flatten_kernel.cast(src, out=out, scale=scale)
        if has_streams(out.device):
            # The way back is compiled now, not in backward when the average is there.
            flatten_kernel.cast_of(out.dtype, src.dtype, out.device)
    else:
        cpu.cast(src.view(-1), out=out.view(-1), scale=scale, overwrite=overwrite)
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
    """Write scale · tensors to a flat buffer, one after another, in one launch. Returns out.

    tensors: tensors with the layout's shapes, in one dtype, on out's device. Any strides; a tensor with other
        strides than the layout's costs a copy, in unflatten two.
    layout: the tensors' positions in the buffer, and the order of each tensor's elements.
    out: contiguous [layout.numel], any floating-point dtype; each value is rounded once. For complex tensors,
        out must have the tensors' dtype; plain torch copies them.
    parts: the tensors' views of out, from a caller that keeps them and has checked the tensors. None: plain
        torch makes and checks them.

    Raises TypeError for a wrong dtype; ValueError for a shape or a device that doesn't fit.
    """
    if parts is None or runs_triton(out.device):
        _check_list("flatten", tensors, layout, out)
    if runs_triton(out.device) and not out.is_complex():
        ordered = _in_order(tensors, layout)
        flatten_kernel.copy(ordered, _tables_of(layout, out.device), out, scale=scale)
    else:
        cpu.copy(tensors, out=parts or layout.parts(out), scale=scale)
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
    """Write scale · each part of a flat buffer to its tensor, the reverse of flatten. Returns out.

    flat: contiguous [layout.numel].
    out: tensors with the layout's shapes, in one dtype, on flat's device. Any strides.
    parts: the tensors' views of flat; see flatten, also for dtypes and errors.
    """
    if parts is None or runs_triton(flat.device):
        _check_list("unflatten", out, layout, flat)
    if runs_triton(flat.device) and not flat.is_complex():
        ordered = _in_order(out, layout)
        flatten_kernel.copy(ordered, _tables_of(layout, flat.device), flat, scale=scale, to_flat=False)
        for tensor, source in zip(out, ordered, strict=True):
            if source is not tensor:
                tensor.copy_(source)
    else:
        cpu.copy(parts or layout.parts(flat), out=out, scale=scale)
    return out


def compile_flatten(dtype: torch.dtype, flat_dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels that flatten and unflatten launch; see compile_powersgd."""
    if has_streams(device) and dtype in _FLOATS:
        for to_flat in (True, False):
            flatten_kernel.copy_of(dtype, flat_dtype, device, to_flat=to_flat)


class PartsCopy:
    """Copies parts of one flat buffer to places in another one, in one launch.

    parts: (a slice of the source, the slice of the target that it goes to) pairs.
    device: the buffers' device.
    """

    def __init__(self, parts: Sequence[tuple[slice, slice]], device: torch.device):
        self._parts, self._tables = parts, None
        if runs_triton(device):
            copied = [(0, own.start, place.start, own.stop - own.start) for own, place in parts]
            self._tables = flatten_kernel.FlattenTables(copied, 1, device)

    def __call__(self, source: torch.Tensor, target: torch.Tensor, scale: float) -> None:
        """Write scale · each part to its place, rounded once to the target's dtype. Both are 1-D."""
        if self._tables is not None:
            flatten_kernel.copy([source], self._tables, target, scale=scale)
        else:
            pairs = [(source[own], target[place]) for own, place in self._parts]
            cpu.copy([own for own, _ in pairs], out=[place for _, place in pairs], scale=scale)


def _in_order(tensors: Sequence[torch.Tensor], layout: FlatLayout) -> Sequence[torch.Tensor]:
    """Return tensors in the layout's order: the tensors themselves, or copies of those with other strides."""
    if tuple([tensor.stride() for tensor in tensors]) == layout.strides:
        return tensors
    ordered = []
    for tensor, strides in zip(tensors, layout.strides, strict=True):
        # Strides of dimensions of length 1 don't matter.
        if any(n != 1 and a != b for n, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True)):
            other = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
            tensor = other.copy_(tensor)
        ordered.append(tensor)
    return ordered


def _tables_of(layout: FlatLayout, device: torch.device) -> flatten_kernel.FlattenTables:
    # One for both directions: a step unflattens to the tensors that it has flattened. And one per thread and
    # stream: calls at once, of average_ for example, share the layout.
    stream = current_stream() if has_streams(device) else 0
    tables, key = _tables.setdefault(layout, {}), (device, threading.get_ident(), stream)
    if key not in tables:
        positions = zip(layout.offsets, layout.numels, strict=True)
        parts = [(index, 0, *position) for index, position in enumerate(positions)]
        tables[key] = flatten_kernel.FlattenTables(parts, len(layout.shapes), device)
    return tables[key]


def powersgd_plan(
    layout: PowerSGDLayout, dtype: torch.dtype, device: torch.device, **options: Any
) -> PowerSGDPlan:
    """Return PowerSGD's plan for one bucket: its buffers and the three local stages of a step.

    layout: the compressed matrices and uncompressed tensors.
    dtype: the bucket's dtype. Sums are in fp32 (fp64 for fp64).
    device: the bucket's device. Plans on the kernels take buffers for partial sums and wires in turns, from
        project to reconstruct: as many buffers as plans under way. Before and after, p_wire and q_wire are
        undefined. All stages of all plans must be on one stream per device.

    Options:

    error_feedback: keep an error, and add it to the next step's gradients.
    warm_start: project on the last step's Q rather than on random directions.
    epsilon: added to a column's length before dividing by it.
    seed: the seed of the first step's random directions, the same on every rank.
    wire_dtype: of p_wire and q_wire; None for the bucket's. If given, factors are stored column by column.

    A step:

    1. plan.project(buffer, scale, left_out): M = gradient + error; plan.p_wire = scale · (all P = M Q, then
       the uncompressed tensors). left_out: indices of matrices to send zeros for, instead of P.
    2. All-reduce plan.p_wire.
    3. plan.back_project(buffer, scale): orthonormalize P; plan.q_wire = scale · all Q = Mᵀ P.
    4. All-reduce plan.q_wire.
    5. plan.reconstruct(buffer, seed): write P Qᵀ and the averages of uncompressed tensors to the buffer.

    With scale = 1 / world size the result is the average.

    plan.wire_numels: the number of elements of each P, of the uncompressed tensors, and of each Q.
    plan.error(): this rank's error [numel] in the bucket's dtype, zero where nothing is compressed.
    plan.directions(): copies of what the next step projects on: Q [cols, rank] of every matrix, in the
        layout's order.
    plan.load(error, directions): continue from another plan's. Directions may be any basis.
    plan.add_to_error(offset, values): add to the error, if one is kept, from an offset in the bucket on.
    plan.kept(): the tensors that make the next step, besides gradients; no copies.
    """
    if runs_triton(device):
        return powersgd_kernels.PowerSGDPlan(layout, dtype, device, **options)
    return cpu_powersgd.PowerSGDPlan(layout, dtype, device, **options)


def compile_powersgd(
    layout: PowerSGDLayout, dtype: torch.dtype, device: torch.device, **arithmetic: Any
) -> None:
    """Compile the kernels that a powersgd_plan with these arguments launches. On a CPU it does nothing.

    arithmetic: powersgd_plan's keyword arguments error_feedback, warm_start, epsilon and wire_dtype.

    A kernel takes seconds to compile, or milliseconds if Triton has it in its cache. Nothing except the
    kernels is allocated on the device.
    """
    if has_streams(device):
        meta = torch.device("meta")
        powersgd_kernels.PowerSGDPlan(layout, dtype, meta, seed=0, **arithmetic).compile(device)


def encoder(layout: BlockLayout, dtype: torch.dtype, device: torch.device, **options: Any) -> Operation:
    """Return encode(buffer, payload, kept, rank), which quantizes a bucket.

    layout: the quantized and the exact tensors, and the shards.
    dtype: the bucket's dtype. Sums and errors are in fp32 (fp64 for fp64).
    device: the bucket's device; "meta" for an operation that is only compiled.

    Options, of all three operations:

    bits: 4 or 8 bits per element.
    uncompressed_dtype: the dtype in which exact tensors are sent; None for dtype.
    averages_dtype: the dtype that averages must fit when they are dequantized; None for dtype.

    Of encoder and adder:

    error_feedback: kept is this rank's error, [world size · shard_numel], in the order of the padded blocks.
        Otherwise it is [shard_numel], for this rank's own values from encode to add; or empty without them.

    All buffers are the caller's, and arguments are by keyword. encode: M = buffer + error;
    payload [world size, bytes] = M's codes and scales and the exact elements, one row per shard;
    error = M − quantized M. A block that isn't finite keeps its error, in plain torch up to rounding, and not
    in elements that aren't finite. The shard `rank` (−1: none) isn't quantized: kept = M there until the sum,
    and of its row only the scales count, which show whether blocks are zero or not finite.
    """
    if runs_triton(device) or device.type == "meta":
        return quantize_kernels.encoder(layout, dtype, device, **options)
    return cpu_quantize.Encoder(layout, dtype, **options)


def adder(layout: BlockLayout, dtype: torch.dtype, device: torch.device, **options: Any) -> Operation:
    """Return add(received, out, kept, rank), which sums the ranks' payloads of one shard.

    layout: the shard's tensors; in codes a BlockLayout.piece of one shard.

    Further options:

    num_payloads: the number of rows in received.
    has_own: whether this rank's own values are in kept, rather than in the row with the number `rank`.
    divisor: the number that the sum is divided by; None for num_payloads. Between nodes it is the number of
        all ranks, times the factor that gradients were multiplied by before.
    in_codes: whether out [bytes] is a payload. Otherwise it has the shard's tensors, in averages_dtype.

    In codes, error = divisor · (mean − quantized mean) in the shard. A block keeps its error if no rank has
    sent it, or if this rank's own values in it aren't finite. Otherwise than in codes the error in the shard
    becomes zero. For the rest see encoder.
    """
    if runs_triton(device) or device.type == "meta":
        return quantize_kernels.adder(layout, dtype, device, **options)
    in_codes = options.pop("in_codes")
    return (cpu_quantize.AdderInCodes if in_codes else cpu_quantize.Adder)(layout, dtype, **options)


def decoder(layout: BlockLayout, dtype: torch.dtype, device: torch.device, **options: Any) -> Operation:
    """Return decode(payload, buffer), which writes one payload per shard to the bucket; see encoder."""
    if runs_triton(device) or device.type == "meta":
        return quantize_kernels.decoder(layout, dtype, device, **options)
    return cpu_quantize.Decoder(layout, dtype, **options)


def _check_list(name: str, tensors: Sequence[torch.Tensor], layout: FlatLayout, flat: torch.Tensor) -> None:
    if flat.dim() != 1 or flat.numel() != layout.numel or not flat.is_contiguous():
        raise ValueError(
            f"{name} takes a contiguous buffer of shape ({layout.numel},) for {len(layout.shapes)} tensors, "
            f"got shape {tuple(flat.shape)} with strides {flat.stride()}"
        )
    if len(tensors) != len(layout.shapes):
        raise ValueError(f"{name}: a layout of {len(layout.shapes)} tensors got {len(tensors)}")
    shapes = tuple([tensor.shape for tensor in tensors])
    if shapes != layout.shapes:
        pairs = zip(shapes, layout.shapes, strict=True)
        index = next(i for i, (shape, expected) in enumerate(pairs) if shape != expected)
        raise ValueError(
            f"{name}: tensor {index} has shape {tuple(shapes[index])}, its layout {layout.shapes[index]}"
        )
    dtypes, devices = {tensor.dtype for tensor in tensors}, {tensor.device for tensor in tensors}
    are_floats = flat.dtype in _FLOATS and dtypes <= set(_FLOATS) and len(dtypes) <= 1
    if not are_floats and not (flat.is_complex() and dtypes <= {flat.dtype}):
        raise TypeError(
            f"{name} takes floating-point tensors of one dtype, or complex ones of the buffer's dtype, "
            f"got {dtypes} and a buffer of {flat.dtype}"
        )
    if not devices <= {flat.device}:
        raise ValueError(f"{name}: tensors are on {devices}, the buffer on {flat.device}")
