"""The hooks to compare: the bytes that each sends for a bucket, and the bytes that its kernels move on a GPU.

Hooks are named as in docs/accuracy.md: int4, powersgd:8 (rank 8), powersgd:8:int8 (rank 8, int8 factors).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from gradcomp.compress.powersgd import PowerSGDOptions
from gradcomp.compress.quantized import QuantizedOptions
from gradcomp.layout import BlockLayout
from gradcomp.layout.blocks import SCALE_BYTES

from .models import Shape

CollectiveKind = Literal["all-reduce", "all-to-all", "all-gather"]

RANKS = (1, 4, 8, 16)
FACTOR_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8}
WIDE_BYTES = 4  # an element of errors, factors and sums
# Every element of P and Q is written as a partial sum and read, goes to the wire and back, through
# Gram–Schmidt, and into two matrix products.
FACTOR_ACCESSES = 8


@dataclass(frozen=True)
class Collective:
    """One collective of a hook.

    num_bytes: the size of the buffer that every rank has in the end.
    """

    kind: CollectiveKind
    num_bytes: int


@dataclass(frozen=True)
class Payload:
    """The work of a hook on one bucket.

    moved_bytes: bytes of device memory that the hook's kernels read and write.
    num_launches: launches of the hook's kernels.
    """

    collectives: tuple[Collective, ...]
    moved_bytes: float = 0.0
    num_launches: int = 0

    @property
    def collective_bytes(self) -> float:
        """The bytes handed to collectives. An all-to-all or all-gather counts half: it sends half of an
        all-reduce's bytes.
        """
        return sum(each.num_bytes / (1 if each.kind == "all-reduce" else 2) for each in self.collectives)


@dataclass(frozen=True)
class Candidate:
    """A hook with its options.

    bits: the bits of a quantized all-reduce; None for other hooks.
    rank: PowerSGD's rank; None for other hooks.
    wire_dtype: dtype of a 16-bit all-reduce, or of PowerSGD's factors; None for the gradients' dtype.
    """

    name: str
    bits: int | None = None
    rank: int | None = None
    wire_dtype: torch.dtype | None = None

    @property
    def is_compressing(self) -> bool:
        return (self.bits, self.rank, self.wire_dtype) != (None, None, None)

    @property
    def powersgd_options(self) -> PowerSGDOptions:
        """PowerSGDState's defaults, with this rank and dtype of factors."""
        assert self.rank is not None
        return PowerSGDOptions(
            self.rank,
            factor_dtype=self.wire_dtype,
            uncompressed_dtype=torch.bfloat16 if self.wire_dtype == torch.int8 else None,
        )

    def payload(self, shapes: Sequence[Shape], dtype: torch.dtype, world_size: int) -> Payload:
        """Return the hook's work on a bucket with these shapes, in a step that compresses."""
        # Other layouts don't depend on the world size: one cached payload serves all world sizes.
        depends = self.bits is not None or self.wire_dtype == torch.int8
        return _payload(self, tuple(shapes), dtype, world_size if depends else 1)


@cache
def _payload(hook: Candidate, shapes: tuple[Shape, ...], dtype: torch.dtype, world_size: int) -> Payload:
    if hook.rank is not None:
        return _powersgd(hook.powersgd_options, shapes, dtype, world_size)
    if hook.bits is not None:
        layout = BlockLayout(shapes, QuantizedOptions(hook.bits).block_size, world_size)
        return _quantized(layout, hook.bits, dtype.itemsize, dtype.itemsize, error_feedback=True)
    numel = BlockLayout(shapes, 2, 1).numel
    if hook.wire_dtype is None:
        return Payload((Collective("all-reduce", numel * dtype.itemsize),))
    # Read gradients and write the wire, then read the wire and write gradients.
    moved = 2 * numel * (dtype.itemsize + hook.wire_dtype.itemsize)
    return Payload((Collective("all-reduce", numel * hook.wire_dtype.itemsize),), moved, num_launches=2)


def _quantized(
    layout: BlockLayout, bits: int, itemsize: int, exact_itemsize: int, *, error_feedback: bool
) -> Payload:
    """Return a quantized all-reduce's payload.

    Accesses per quantized element, with error feedback:

    quantize     reads gradient and error, writes error and code; in this rank's shard, reads its shard error
    average      in this rank's shard: reads every rank's code, reads and writes both errors, writes the code
    dequantize   reads the code, writes the gradient
    """
    _, shard_bytes = layout.sections(bits, exact_itemsize)
    num_bytes = layout.world_size * shard_bytes
    quantized = sum(part.stored.stop - part.stored.start for part in layout.quantized)
    exact = layout.numel - quantized
    code = bits / 8 + SCALE_BYTES / layout.block_size
    per_code = 2 * itemsize + 3 * code + code / layout.world_size
    if error_feedback:
        per_code += 2 * WIDE_BYTES + 5 * WIDE_BYTES / layout.world_size
    per_exact = 2 * itemsize + (3 + 1 / layout.world_size) * exact_itemsize
    collectives = (Collective("all-to-all", num_bytes), Collective("all-gather", num_bytes))
    return Payload(
        collectives if num_bytes else (), quantized * per_code + exact * per_exact, 3 * bool(num_bytes)
    )


def _powersgd(
    options: PowerSGDOptions, shapes: tuple[Shape, ...], dtype: torch.dtype, world_size: int
) -> Payload:
    """Return PowerSGD's payload: P with the uncompressed tensors, then Q.

    A compressed element has five accesses: project reads gradient and M and writes M, back_project reads M,
    reconstruct writes the gradient. An uncompressed element has four: to the wire and back.
    """
    layout = options.layout(shapes, dtype)
    compressed = sum(matrix.numel for matrix in layout.matrices)
    uncompressed = layout.numel - compressed
    moved = (5 * compressed + 4 * uncompressed) * dtype.itemsize
    moved += FACTOR_ACCESSES * WIDE_BYTES * (layout.p_numel + layout.q_numel)
    launches = 7 if layout.matrices else 2
    if not options.is_quantized:
        itemsize = (options.factor_dtype or dtype).itemsize
        sizes = (layout.wire_numel * itemsize, layout.q_numel * itemsize)
        return Payload(
            tuple(Collective("all-reduce", size) for size in sizes if size), float(moved), launches
        )
    exact_itemsize = (options.uncompressed_dtype or dtype).itemsize
    wires = [
        _quantized(
            BlockLayout(parts, options.BLOCK_SIZE, world_size),
            8,
            WIDE_BYTES,
            exact_itemsize,
            error_feedback=False,
        )
        for parts in ([(1, layout.p_numel), (uncompressed,)], [(1, layout.q_numel)])
    ]
    if min(layout.p_numel, layout.q_numel) >= options.BLOCK_SIZE:
        # The launches that write the wires quantize too: two launches and the fp32 wires fall away.
        launches -= 2
        moved -= 2 * WIDE_BYTES * (layout.p_numel + layout.q_numel)
        moved -= (dtype.itemsize + WIDE_BYTES) * uncompressed
    return Payload(
        tuple(collective for wire in wires for collective in wire.collectives),
        moved + sum(wire.moved_bytes for wire in wires),
        launches + sum(wire.num_launches for wire in wires),
    )


def _all() -> Iterable[Candidate]:
    yield Candidate("none")
    yield Candidate("bf16", wire_dtype=torch.bfloat16)
    yield Candidate("fp16", wire_dtype=torch.float16)
    yield Candidate("int8", bits=8)
    yield Candidate("int4", bits=4)
    for rank in reversed(RANKS):
        yield Candidate(f"powersgd:{rank}", rank=rank)
        for name, dtype in FACTOR_DTYPES.items():
            yield Candidate(f"powersgd:{rank}:{name}", rank=rank, wire_dtype=dtype)


CANDIDATES = {candidate.name: candidate for candidate in _all()}


def candidate_named(name: str) -> Candidate:
    """Return the hook of this name: one of CANDIDATES, or PowerSGD of any rank.

    Raises ValueError for an unknown name.
    """
    if name in CANDIDATES:
        return CANDIDATES[name]
    family, _, rest = name.partition(":")
    rank, _, factors = rest.partition(":")
    if family == "powersgd" and rank.isdecimal() and int(rank) > 0 and factors in ("", *FACTOR_DTYPES):
        return Candidate(name, rank=int(rank), wire_dtype=FACTOR_DTYPES.get(factors))
    known = "none, bf16, fp16, int8, int4, and powersgd:RANK, powersgd:RANK:bf16, powersgd:RANK:int8"
    raise ValueError(f"there is no hook {name!r}; known are {known}")
