"""The hooks to compare: the bytes that each sends for a bucket, and those that its kernels move on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

from gradcomp.compress.named import NAMES, NamedHook
from gradcomp.compress.powersgd import LEAST_BYTES_BY_NODES, PowerSGDOptions
from gradcomp.compress.quantized import QuantizedOptions
from gradcomp.layout import BlockLayout
from gradcomp.layout.blocks import SCALE_BYTES

from .models import Shape

CollectiveKind = Literal["all-reduce", "reduce-scatter", "all-to-all", "all-gather"]
Group = Literal["all", "within", "between"]

WIDE_BYTES = 4  # an element of errors, factors and sums
# Every element of P and Q is written as a partial sum and read, goes to the wire and back, through
# Gram–Schmidt, and into two matrix products.
FACTOR_ACCESSES = 8


@dataclass(frozen=True)
class Collective:
    """One collective of a hook.

    num_bytes: the size of the whole buffer, all ranks' parts together. If group is "between": the sum over a
        node's ranks.
    group: the ranks that take part: "all"; "within", the ranks of a node; "between", one rank of every node.
        Every rank of a node is in a "between" of its own.
    """

    kind: CollectiveKind
    num_bytes: int
    group: Group = "all"


@dataclass(frozen=True)
class Payload:
    """The work of a hook on one bucket.

    moved_bytes: bytes of device memory that the hook's kernels read and write.
    num_launches: launches of the hook's kernels.
    relative_work: the work as a part of the same hook's flat work, for devices with a measured flat time.
    """

    collectives: tuple[Collective, ...]
    moved_bytes: float = 0.0
    num_launches: int = 0
    relative_work: float = 1.0

    @property
    def collective_bytes(self) -> float:
        """The bytes handed to collectives. An all-to-all or all-gather counts half: it sends half of an
        all-reduce's bytes. Collectives within a node don't count, so flat and by nodes have equal bytes.
        """
        counted = (each for each in self.collectives if each.group != "within")
        return sum(each.num_bytes / (1 if each.kind == "all-reduce" else 2) for each in counted)


class Candidate(NamedHook):
    """A hook to compare."""

    def state(self, ranks_per_node: int) -> str:
        """Return the Python expression of the hook's state, for nodes of ranks_per_node ranks."""
        nodes = f"ranks_per_node={ranks_per_node if self.is_by_nodes else 1}"
        if self.rank is None:
            return f"QuantizationState(bits={self.bits}, {nodes})"
        arguments = ["None", f"matrix_approximation_rank={self.rank}"]
        if self.wire_dtype is not None:
            arguments.append(f"factor_dtype={self.wire_dtype}")
        if self.is_quantized:
            arguments.append("uncompressed_dtype=torch.bfloat16")
        return f"PowerSGDState({', '.join([*arguments, nodes])})"

    def payload(
        self, shapes: Sequence[Shape], dtype: torch.dtype, world_size: int, ranks_per_node: int = 1
    ) -> Payload:
        """Return the hook's work on a bucket with these shapes, in a step that compresses.

        ranks_per_node: only matters by nodes; must divide world_size.
        """
        # Other layouts don't depend on the world size: one cached payload serves all world sizes.
        per_node = ranks_per_node if self.is_by_nodes else 1
        return _payload(self, tuple(shapes), dtype, world_size if self.is_quantized else 1, per_node)


@cache
def _payload(
    hook: Candidate, shapes: tuple[Shape, ...], dtype: torch.dtype, world_size: int, ranks_per_node: int
) -> Payload:
    if ranks_per_node > 1:
        return _by_nodes(hook, shapes, dtype, world_size, ranks_per_node)
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


def _by_nodes(
    hook: Candidate, shapes: tuple[Shape, ...], dtype: torch.dtype, world_size: int, ranks_per_node: int
) -> Payload:
    """Return a payload by nodes.

    relative_work is the ratio of the bytes moved, without the copy to the fp32 wire: on a CPU that copy takes
    far less time per byte than quantizing.
    """
    flat = _payload(hook, shapes, dtype, world_size, 1)
    if hook.rank is not None:
        found = _powersgd(hook.powersgd_options, shapes, dtype, world_size, ranks_per_node)
        return replace(found, relative_work=_ratio(found, flat))
    assert hook.bits is not None
    layout = BlockLayout(shapes, QuantizedOptions(hook.bits).block_size, world_size)
    found = _quantized(
        layout,
        hook.bits,
        dtype.itemsize,
        dtype.itemsize,
        error_feedback=True,
        ranks_per_node=ranks_per_node,
    )
    if not found.collectives:
        return found
    # One launch more reads the gradients and writes the fp32 wire of the sum within the node.
    return replace(
        found,
        moved_bytes=found.moved_bytes + layout.numel * (dtype.itemsize + WIDE_BYTES),
        num_launches=found.num_launches + 1,
        relative_work=_ratio(found, flat),
    )


def _ratio(found: Payload, flat: Payload) -> float:
    return found.moved_bytes / flat.moved_bytes if flat.moved_bytes else 1.0


def _quantized(
    layout: BlockLayout,
    bits: int,
    itemsize: int,
    exact_itemsize: int,
    *,
    error_feedback: bool,
    ranks_per_node: int = 1,
) -> Payload:
    """Return a quantized all-reduce's payload: flat if ranks_per_node is 1, else by nodes.

    Accesses per quantized element, with error feedback:

    quantize     reads gradient and error, writes error and code
    average      in this rank's shard: reads the others' codes, reads and writes the error, writes the code
    dequantize   reads the code, writes the gradient

    Without error feedback quantize writes, and average reads, this rank's shard in place of an error.
    By nodes the first two read the fp32 sum of a node's ranks, and this rank's part of it only: one part per
    rank of a node.
    """
    _, shard_bytes = layout.sections(bits, exact_itemsize)
    num_bytes = layout.world_size * shard_bytes
    quantized = sum(part.stored.stop - part.stored.start for part in layout.quantized)
    exact = layout.numel - quantized
    code = bits / 8 + SCALE_BYTES / layout.block_size
    source_bytes = itemsize if ranks_per_node == 1 else WIDE_BYTES / ranks_per_node
    accesses = 1 + 2 / ranks_per_node  # of a code, or of an exact element on the wire
    per_code = itemsize + source_bytes + accesses * code + 2 * WIDE_BYTES / layout.world_size
    if error_feedback:
        per_code += 2 * WIDE_BYTES / ranks_per_node
    per_exact = itemsize + source_bytes + (accesses + 1 / layout.world_size) * exact_itemsize
    moved = quantized * per_code + exact * per_exact
    if not num_bytes:
        return Payload((), moved)
    if ranks_per_node == 1:
        return Payload((Collective("all-to-all", num_bytes), Collective("all-gather", num_bytes)), moved, 3)
    return Payload(
        (
            Collective("reduce-scatter", layout.numel * WIDE_BYTES, "within"),
            Collective("all-to-all", num_bytes, "between"),
            Collective("all-gather", num_bytes, "between"),
            Collective("all-gather", num_bytes, "within"),
        ),
        moved,
        3,
    )


def _powersgd(
    options: PowerSGDOptions,
    shapes: tuple[Shape, ...],
    dtype: torch.dtype,
    world_size: int,
    ranks_per_node: int = 1,
) -> Payload:
    """Return PowerSGD's payload: P with the uncompressed tensors, then Q.

    ranks_per_node: more than 1 by nodes.

    A compressed element has five accesses: project reads gradient and M and writes M, back_project reads M,
    reconstruct writes the gradient. An uncompressed element has four: to the wire and back.
    """
    layout = options.layout(shapes, dtype)
    compressed = sum(matrix.numel for matrix in layout.matrices)
    uncompressed = layout.numel - compressed
    moved = (5 * compressed + 4 * uncompressed) * dtype.itemsize
    moved += FACTOR_ACCESSES * WIDE_BYTES * (layout.p_numel + layout.q_numel)
    launches = 5 if layout.matrices else 2
    if not options.is_quantized:
        itemsize = (options.factor_dtype or dtype).itemsize
        sizes = [size for size in (layout.wire_numel * itemsize, layout.q_numel * itemsize) if size]
        collectives = [each for size in sizes for each in _all_reduce(size, ranks_per_node)]
        return Payload(tuple(collectives), float(moved), launches)
    exact_itemsize = (options.uncompressed_dtype or dtype).itemsize
    wires = [
        _quantized(
            BlockLayout(parts, options.BLOCK_SIZE, world_size),
            8,
            WIDE_BYTES,
            exact_itemsize,
            error_feedback=False,
            ranks_per_node=ranks_per_node,
        )
        for parts in ([(1, layout.p_numel), (uncompressed,)], [(1, layout.q_numel)])
    ]
    return Payload(
        tuple(collective for wire in wires for collective in wire.collectives),
        moved + sum(wire.moved_bytes for wire in wires),
        launches + sum(wire.num_launches for wire in wires),
    )


def _all_reduce(num_bytes: int, ranks_per_node: int) -> list[Collective]:
    """Return the collectives of PowerSGD's all-reduce: one if ranks_per_node is 1, else by nodes."""
    if ranks_per_node == 1 or num_bytes < LEAST_BYTES_BY_NODES:
        return [Collective("all-reduce", num_bytes)]
    return [
        Collective("reduce-scatter", num_bytes, "within"),
        Collective("all-reduce", num_bytes, "between"),
        Collective("all-gather", num_bytes, "within"),
    ]


CANDIDATES = {name: Candidate.named(name) for name in NAMES}
candidate_named = Candidate.named
form_named = Candidate.form_named
