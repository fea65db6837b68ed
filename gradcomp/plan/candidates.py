"""The hooks to compare: the bytes that each sends for a bucket, and those that its kernels move on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal, NamedTuple

import torch

from gradcomp.comm.exchange import takes_one_exchange
from gradcomp.compress.compressor import BucketSpec
from gradcomp.compress.named import NAMES, NamedHook
from gradcomp.compress.powersgd import LEAST_BYTES_BY_NODES, PowerSGDOptions
from gradcomp.compress.quantized import QuantizedOptions
from gradcomp.compress.quantized_all_reduce import Form, LayoutFor
from gradcomp.layout import BlockLayout
from gradcomp.layout.blocks import SCALE_BYTES

from .models import Shape, num_elements

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
    is_posted: whether ranks post its receives long before: a message needs no answer then (exchange.Gather).
    """

    kind: CollectiveKind
    num_bytes: int
    group: Group = "all"
    is_posted: bool = False


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
        self,
        shapes: Sequence[Shape],
        dtype: torch.dtype,
        world_size: int,
        ranks_per_node: int = 1,
        *,
        by_messages: bool = False,
        has_delay: bool = False,
    ) -> Payload:
        """Return the hook's work on a bucket with these shapes, in a step that compresses.

        ranks_per_node: only matters by nodes; must divide world_size.
        by_messages, has_delay: of the link. They decide between one exchange, two, and an all-reduce.
        """
        per_node = ranks_per_node if self.is_by_nodes else 1
        # Other layouts don't depend on the world size: one cached payload serves all world sizes.
        size = world_size if self.is_quantized or by_messages else 1
        return _payload(self, tuple(shapes), dtype, _Ranks(size, per_node, by_messages, has_delay))


class _Ranks(NamedTuple):
    """The ranks that average a bucket. For the fields see Candidate.payload."""

    world_size: int
    per_node: int
    by_messages: bool
    has_delay: bool


@cache
def _payload(hook: Candidate, shapes: tuple[Shape, ...], dtype: torch.dtype, ranks: _Ranks) -> Payload:
    if hook.rank is not None:
        found = _powersgd(hook.powersgd_options, shapes, dtype, ranks)
    elif hook.bits is not None:
        layout_for = partial(BlockLayout, shapes, QuantizedOptions(hook.bits).block_size)
        found = _quantized(layout_for, hook.bits, dtype, None, ranks, error_feedback=True)
    else:
        return _sent_exactly(hook, num_elements(shapes), dtype, ranks)
    if ranks.per_node == 1:
        return found
    flat = _payload(hook, shapes, dtype, ranks._replace(per_node=1))
    found = replace(found, relative_work=found.moved_bytes / flat.moved_bytes if flat.moved_bytes else 1.0)
    if hook.rank is None and found.collectives:
        # One launch more reads the gradients and writes the fp32 wire of the sum within the node. It doesn't
        # count in relative_work: on a CPU it takes far less time per byte than quantizing.
        copied = num_elements(shapes) * (dtype.itemsize + WIDE_BYTES)
        return replace(found, moved_bytes=found.moved_bytes + copied, num_launches=found.num_launches + 1)
    return found


def _sent_exactly(hook: Candidate, numel: int, dtype: torch.dtype, ranks: _Ranks) -> Payload:
    """Return the payload of hook "none", or of 16 bits.

    DDP without a hook all-reduces by the back end, whatever the delay.
    """
    if hook.wire_dtype is None:
        return Payload((Collective("all-reduce", numel * dtype.itemsize),))
    # Read gradients and write the wire, then read the wire and write gradients.
    moved = 2 * numel * (dtype.itemsize + hook.wire_dtype.itemsize)
    sums = _sum(numel * hook.wire_dtype.itemsize, "all", ranks.world_size, ranks.has_delay)
    return Payload(tuple(sums), moved, num_launches=2)


def _quantized(
    layout_for: LayoutFor,
    bits: int,
    dtype: torch.dtype,
    exact_dtype: torch.dtype | None,
    ranks: _Ranks,
    *,
    error_feedback: bool,
) -> Payload:
    """Return a quantized all-reduce's payload: flat if ranks.per_node is 1, else by nodes.

    Accesses per quantized element in two exchanges, with error feedback:

    quantize     reads gradient and error, writes error and code
    average      in this rank's shard: reads the others' codes, reads and writes the error, writes the code
    dequantize   reads the code, writes the gradient

    In one exchange, sum reads every rank's (node's) code and writes the gradient, in place of the last two.
    Without error feedback quantize writes, and average reads, this rank's shard in place of an error.
    By nodes the stages before the last read the fp32 sum of a node's ranks, and this rank's part of it only:
    one part per rank of a node.
    """
    per_node = ranks.per_node
    exact = exact_dtype or (dtype if per_node == 1 else torch.promote_types(dtype, torch.float32))
    bucket = BucketSpec((), dtype, torch.device("cpu"), ranks.world_size, 0, per_node, ranks.has_delay)
    form = Form.of(layout_for, bucket, bits, exact.itemsize)
    layout, senders = form.layout, form.num_senders
    _, shard_bytes = layout.sections(bits, exact.itemsize)
    num_bytes = layout.world_size * shard_bytes * (senders or 1)
    num_quantized = sum(part.stored.stop - part.stored.start for part in layout.quantized)
    code = bits / 8 + SCALE_BYTES / layout.block_size
    # Of a code, and of an exact element on the wire; errors, and this rank's own values in place of them.
    exact_accesses = code_accesses = 1 / per_node + senders if senders else 1 + 2 / per_node
    errors = 2 * WIDE_BYTES / per_node if error_feedback else 0.0
    if not senders:
        exact_accesses += 1 / layout.world_size
        errors += 2 * WIDE_BYTES / layout.world_size
    copied = dtype.itemsize + (dtype.itemsize if per_node == 1 else WIDE_BYTES / per_node)
    if senders and per_node > 1:
        copied += 2 * dtype.itemsize  # sums are written by piece, then copied to the bucket
    moved = num_quantized * (copied + code_accesses * code + errors)
    moved += (layout.numel - num_quantized) * (copied + exact_accesses * exact.itemsize)
    if not num_bytes:
        return Payload((), moved)
    place: Group = "all" if per_node == 1 else "between"
    if senders:
        collectives = [Collective("all-gather", num_bytes, place)]
        launches = 2 if per_node == 1 else per_node + 2  # a sum per piece, then the copy
    else:
        collectives, launches = _two_exchanges(num_bytes, place), 3
    if per_node > 1:
        numel = layout.world_size * (layout.shard_numel + layout.exact_numel)
        summed = Collective("reduce-scatter", numel * WIDE_BYTES, "within")
        collectives = [summed, *collectives, Collective("all-gather", num_bytes, "within")]
    return Payload(tuple(collectives), moved, launches)


def _powersgd(
    options: PowerSGDOptions, shapes: tuple[Shape, ...], dtype: torch.dtype, ranks: _Ranks
) -> Payload:
    """Return PowerSGD's payload: P with the uncompressed tensors, then Q.

    A compressed element has five accesses: project reads gradient and M and writes M, back_project reads M,
    reconstruct writes the gradient. An uncompressed element has four: to the wire and back.
    """
    layout = options.layout(shapes, dtype)
    compressed = sum(matrix.numel for matrix in layout.matrices)
    uncompressed = layout.numel - compressed
    moved = float(5 * compressed + 4 * uncompressed) * dtype.itemsize
    moved += FACTOR_ACCESSES * WIDE_BYTES * (layout.p_numel + layout.q_numel)
    launches = 5 if layout.matrices else 2
    if options.is_quantized:
        wide = torch.promote_types(dtype, torch.float32)
        exact = options.uncompressed_dtype or dtype
        wires = [
            _quantized(layout_for, 8, wide, exact, ranks, error_feedback=False)
            for layout_for in options.wire_layouts((layout.p_numel, uncompressed, layout.q_numel))
        ]
    else:
        itemsize = (options.factor_dtype or dtype).itemsize
        sizes = (layout.wire_numel * itemsize, layout.q_numel * itemsize)
        wires = [Payload(tuple(_factors(size, ranks))) for size in sizes if size]
    first, *later = (wire.collectives for wire in wires) if wires else ((),)
    # Both wires' receives are posted with the first. Only a wire in one flat exchange begins with a gather.
    for each in later:
        is_gather = [collective.kind for collective in each] == ["all-gather"]
        first += (replace(each[0], is_posted=True),) if is_gather else each
    return Payload(
        first,
        moved + sum(wire.moved_bytes for wire in wires),
        launches + sum(wire.num_launches for wire in wires),
    )


def _factors(num_bytes: int, ranks: _Ranks) -> list[Collective]:
    """Return the collectives that sum one of PowerSGD's wires; see PowerSGDCompressor._sum."""
    is_small = num_bytes < LEAST_BYTES_BY_NODES
    if ranks.per_node == 1 or is_small:
        is_pair = ranks.by_messages and ranks.world_size == 2 and is_small
        return _sum(num_bytes, "all", ranks.world_size, ranks.has_delay or is_pair)
    num_nodes = ranks.world_size // ranks.per_node
    return [
        Collective("reduce-scatter", num_bytes, "within"),
        *_sum(num_bytes, "between", num_nodes, ranks.has_delay, ranks.per_node),
        Collective("all-gather", num_bytes, "within"),
    ]


def _sum(
    num_bytes: int, group: Group, size: int, has_delay: bool, ranks_per_node: int = 1
) -> list[Collective]:
    """Return the collectives of exchange.all_reduce, for Collective's num_bytes and group.

    size: the number of ranks that sum.
    """
    if not has_delay or size == 1:
        return [Collective("all-reduce", num_bytes, group)]
    if takes_one_exchange(-(-num_bytes // ranks_per_node), size, has_delay=True):
        return [Collective("all-gather", size * num_bytes, group)]
    return _two_exchanges(num_bytes, group)


def _two_exchanges(num_bytes: int, group: Group) -> list[Collective]:
    return [
        Collective("all-to-all", num_bytes, group),
        Collective("all-gather", num_bytes, group, is_posted=True),
    ]


CANDIDATES = {name: Candidate.named(name) for name in NAMES}
candidate_named = Candidate.named
form_named = Candidate.form_named
