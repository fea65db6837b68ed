"""Compression of a model that is sharded with torch's FSDP2: see docs/fsdp.md."""

import logging
from collections.abc import Iterable

from torch import nn

from gradcomp.comm.announcement import say
from gradcomp.compress import CompressorState
from gradcomp.rules import WEIGHT_BITS

from .all_gather import CompressedAllGather, all_gathers, compress_all_gather
from .reduce_scatter import check_reduce_scatter, compress_reduce_scatter
from .replicas import check_replicas, compress_replicas

__all__ = ["compress_all_gather", "compress_fsdp", "compress_reduce_scatter", "compress_replicas"]
_WHOSE = "compress_fsdp"


def compress_fsdp(
    model: nn.Module,
    state: CompressorState,
    weight_bits: int = 8,
    *,
    replica_state: CompressorState | None = None,
    ignored: Iterable[nn.Module | nn.Parameter] = (),
) -> None:
    """Compress the weights and gradients of a model that FSDP2 shards.

    Calls compress_all_gather, compress_reduce_scatter and, with replica_state, compress_replicas. Logs a line
    for each parameter group: how many of its elements are compressed.

    model: after fully_shard, called for the model itself, too.
    state: a QuantizationState for the gradients between shards. Its block_size and ranks_per_node are the
        weights', too.
    weight_bits: 8; see compress_all_gather.
    replica_state: for a 1-D shard mesh, the state whose process group averages between replicas; see
        compress_replicas. None: there are none, or they are of a 2-D mesh, and torch averages exactly.
    ignored: modules and parameters that are gathered exactly.

    Call it on every rank, before training. Raises the errors of these functions. Logs a warning for
    parameters that require gradients but aren't sharded, such as adapters attached after fully_shard.

    Example::

        fully_shard(model)
        compress_fsdp(model, QuantizationState(bits=4))
    """
    weight_bits = WEIGHT_BITS("weight_bits", weight_bits)
    if replica_state is not None:
        if not isinstance(replica_state, CompressorState) or replica_state.process_group is None:
            raise TypeError(
                f"{_WHOSE} takes a state with the replicas' process group as its replica_state, such as "
                f"QuantizationState(replicate_group), got {replica_state!r}"
            )
        check_replicas(model, replica_state.process_group, replica_state)
    check_reduce_scatter(model, state, _WHOSE)
    gathers = all_gathers(model, weight_bits, state.options.block_size, ignored, state.ranks_per_node)
    sharded = {name for gather in gathers for name in gather.param_group.names(model)}
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    if left_out := [name for name in trained if name not in sharded]:
        logging.getLogger(__name__).warning(
            f"{_WHOSE}: {len(left_out)} parameters that require gradients aren't sharded, such as "
            f"{left_out[0]}: nobody averages their gradients. Likely cause: adapters (LoRA) that were "
            "attached after fully_shard"
        )
    # Nothing is refused below unless ranks differ: an error above leaves the model as it was.
    if replica_state is not None:
        compress_replicas(model, replica_state.process_group, replica_state)
    compress_reduce_scatter(model, state)
    for gather in gathers:
        gather.param_group.module.set_custom_all_gather(gather)
        say(f"{_WHOSE}: {_described(gather, weight_bits, state, replica_state)}", state.process_group)


def _described(
    gather: CompressedAllGather,
    weight_bits: int,
    state: CompressorState,
    replica_state: CompressorState | None,
) -> str:
    """Return a parameter group's line."""
    group, bits = gather.param_group, state.options.bits
    shapes = [each.shape for each in group.placeholders]
    numel = sum(each.numel() for each in group.placeholders)
    layout, weights, gradients = gather.gather.layout, 0, 0
    if layout.world_size > 1:  # over one rank, FSDP2 sends nothing
        if gather.compresses(group.gathered_dtypes):
            weights = layout.quantized_numel // layout.world_size
        gradients = numel if bits == 16 else state.options.layout(shapes, 1).quantized_numel
    replicas = "no replicas" if group.replicate_group is None else "torch averages replicas"
    if replica_state is not None:
        replicas = f"{replica_state.algorithm} averages replicas"
    return (
        f"{group.name}: weights in {weight_bits} bits: {weights:,} of {numel:,} elements of a shard; "
        f"gradients in {bits} bits: {gradients:,}; {replicas}"
    )
