"""Copies in one launch, scaled and in another dtype: a buffer, or tensors to a flat buffer, and back."""

import functools
from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl

from ..device import pinned, send
from .launch import Launch, Slot, Stage
from .tile import BLOCK, COPYING, copy_tile, element_type


# Nothing is specialized on what differs between buckets: their sizes, and the addresses of parts of buffers.
# copy_tile asks for alignment itself. So a pair of dtypes has one variant, which compile_cast can make early.
@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["src_ptr", "dst_ptr"])
def _cast_kernel(src_ptr, dst_ptr, numel: tl.int64, scale: tl.float64, BLOCK: tl.constexpr):
    """Compute dst[i] = round(scale · src[i]) for 0 <= i < numel.

    src_ptr, dst_ptr: [numel], any two floating-point dtypes.
    Grid: one program per BLOCK elements.
    Moves numel · (src bytes + dst bytes): 6 B per element from fp32 to 16 bits.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    copy_tile(src_ptr + start, dst_ptr + start, tl.minimum(numel - start, BLOCK), scale, BLOCK)


def cast(src: torch.Tensor, *, out: torch.Tensor, scale: float = 1.0) -> None:
    """Write scale · src to out in one launch, see ops.cast. The two are one tensor, or share no memory."""
    numel = src.numel()
    launch = cast_of(src.dtype, out.dtype, out.device)
    launch(num_programs=triton.cdiv(numel, BLOCK), src=src, out=out, numel=numel, scale=scale)


@functools.cache
def cast_of(src_dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device) -> Stage:
    """Return what cast launches for tensors of these dtypes, compiled if the device has streams."""
    src, out = Slot("src", src_dtype, alignment=1), Slot("out", out_dtype, alignment=1)
    numbers = Slot("numel", 1), Slot("scale", 1.0)
    return Stage([Launch(_cast_kernel, None, src, out, *numbers, BLOCK=BLOCK, **COPYING)], device)


class FlattenTables:
    """The kernel's tables for one list of tensors, kept on the device.

    parts: (a tensor's index, the part's first element in the tensor, its first element in the flat buffer,
        its number of elements) of each part that is copied.
    num_tensors: the length of the list.
    device: the tensors' device.

    tiles: int64 [num_tiles, 4], sent once: parts of at most BLOCK elements.

    Use one object from one CUDA stream at a time.
    """

    def __init__(self, parts: Iterable[tuple[int, int, int, int]], num_tensors: int, device: torch.device):
        tiles = [
            (index, first + done, in_flat + done, min(BLOCK, numel - done))
            for index, first, in_flat, numel in parts
            for done in range(0, numel, BLOCK)
        ]
        self.tiles = send(torch.tensor(tiles, dtype=torch.int64, device="cpu").reshape(-1, 4), device)
        self._pointers = torch.empty(num_tensors, dtype=torch.int64, device=device)
        self._addresses: list[int] = []

    def pointers(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensors' addresses, int64 [num_tensors], on the device.

        They are sent only if one has changed: one asynchronous copy from pinned memory.
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._addresses:
            host = torch.tensor(addresses, dtype=torch.int64, device="cpu")
            self._pointers.copy_(pinned(host, self._pointers.device), non_blocking=True)
            self._addresses = addresses
        return self._pointers


# The flat buffer may be a part of a bucket. See _cast_kernel.
@triton.jit(do_not_specialize_on_alignment=["flat_ptr"])
def _flatten_kernel(
    pointers_ptr, tiles_ptr, flat_ptr, scale: tl.float64,
    TENSOR_TYPE: tl.constexpr, TO_FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute flat[flat_start + i] = round(scale · tensor[tensor_start + i]) for one tile, or the reverse.

    pointers_ptr: [num_tensors], addresses of tensors of TENSOR_TYPE without gaps.
    tiles_ptr: [num_tiles, 4], see FlattenTables.
    flat_ptr: the flat buffer.
    TO_FLAT: copy the tensors to the flat buffer; otherwise copy the flat buffer to the tensors.
    Grid: one program per tile.
    Moves numel · (tensor bytes + flat bytes), plus 40 B of tables per tile.
    """
    tile_ptr = tiles_ptr + tl.program_id(0).to(tl.int64) * 4
    tensor_index = tl.load(tile_ptr)
    tensor_start = tl.load(tile_ptr + 1)
    flat_start = tl.load(tile_ptr + 2)
    length = tl.load(tile_ptr + 3)
    tensor_ptr = tl.load(pointers_ptr + tensor_index).to(tl.pointer_type(TENSOR_TYPE))
    if TO_FLAT:
        copy_tile(tensor_ptr + tensor_start, flat_ptr + flat_start, length, scale, BLOCK)
    else:
        copy_tile(flat_ptr + flat_start, tensor_ptr + tensor_start, length, scale, BLOCK)


@functools.cache
def copy_of(dtype: torch.dtype, flat_dtype: torch.dtype, device: torch.device, *, to_flat: bool) -> Stage:
    """Return what copy launches for tensors and a flat buffer of these dtypes, as cast_of does."""
    tables = Slot("pointers", torch.int64), Slot("tiles", torch.int64)
    launch = Launch(
        _flatten_kernel, None, *tables, Slot("flat", flat_dtype, alignment=1), Slot("scale", 1.0),
        TENSOR_TYPE=element_type(dtype), TO_FLAT=to_flat, BLOCK=BLOCK, **COPYING,
    )  # fmt: skip
    return Stage([launch], device)


def copy(
    tensors: Sequence[torch.Tensor],
    tables: FlattenTables,
    flat: torch.Tensor,
    *,
    scale: float = 1.0,
    to_flat: bool = True,
) -> None:
    """Write scale · the tensors' elements to flat, one tensor after another, or the reverse, in one launch.

    tensors: one floating-point dtype, on flat's device, without gaps, each in the order of its memory.
    flat: contiguous, 1-D, any floating-point dtype. Each element is rounded once.
    """
    if tensors:
        launch = copy_of(tensors[0].dtype, flat.dtype, flat.device, to_flat=to_flat)
        pointers, tiles = tables.pointers(tensors), tables.tiles
        launch(num_programs=len(tiles), pointers=pointers, tiles=tiles, flat=flat, scale=scale)
