"""Compression of FSDP2's all-gather, the weights that every rank computes with: rows of codes are gathered.

    rank r    its shard ──quantize──▶ row r
    all-gather: every rank gets the rows of all ranks, and dequantizes them, its own too

With nodes, a row goes through the network card of its rank's node once to each other node:

    node i, place j    gathers the rows of place j from the other nodes
    within the node    every rank gets the rows of all places
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gradcomp import ops
from gradcomp.comm.exchange import all_gather, round_trip_s
from gradcomp.comm.nodes import AUTO, RANKS_PER_NODE, nodes_in, nodes_of
from gradcomp.comm.process_group import Explaining
from gradcomp.comm.torch_private import require_names
from gradcomp.device import has_streams
from gradcomp.layout import BlockLayout, FlatLayout
from gradcomp.rules import BLOCK_SIZE, WEIGHT_BITS, described

from .checks import checked_groups, require_agreement, require_default
from .param_groups import Collective, ParamGroup

_WHOSE = "compress_all_gather"


class ShardGather:
    """The all-gather of shards that have tensors of equal shapes on all ranks.

    shapes: of a shard's tensors.
    exact: the positions of tensors that are sent exactly, beside vectors and those smaller than a block.

    layout: the blocks of all ranks' shards, a row of the payload each. With nodes the rows are sorted by
        place: first place 0 of every node, then place 1 of every node.

    Several gathers may be under way at a time.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        exact: Collection[int],
        world_size: int,
        ranks_per_node: int,
        bits: int,
        block_size: int,
    ):
        shapes = [(math.prod(shape),) if index in exact else shape for index, shape in enumerate(shapes)]
        row = FlatLayout(shapes)
        places = [range(place, world_size, ranks_per_node) for place in range(ranks_per_node)]
        offsets = [rank * row.numel + offset for ranks in places for rank in ranks for offset in row.offsets]
        self.layout = BlockLayout(shapes * world_size, block_size, world_size, offsets)
        self._row = BlockLayout(shapes, block_size, 1)
        self.ranks_per_node, self._bits = ranks_per_node, bits
        self._operations: dict[torch.dtype, tuple[Any, Any]] = {}

    def compresses(self, dtype: torch.dtype) -> bool:
        """Return whether shards in this dtype are sent in fewer bytes."""
        return dtype.is_floating_point and 8 * dtype.itemsize > self._bits and bool(self.layout.quantized)

    def operations(self, dtype: torch.dtype, device: torch.device) -> tuple[ops.Operation, ops.Operation]:
        """Return (encode, which quantizes a shard into a row; decode of all rows)."""
        if dtype not in self._operations:
            arguments = dtype, device
            encode = ops.encoder(self._row, *arguments, bits=self._bits)
            self._operations[dtype] = encode, ops.decoder(self.layout, *arguments, bits=self._bits)
            if has_streams(device):  # the next gather may be on another stream
                torch.cuda.current_stream(device).synchronize()
        return self._operations[dtype]

    def payload_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a row."""
        return self.layout.sections(self._bits, dtype.itemsize)[1]


class GatherWork(dist.Work):
    """An all-gather of this rank's shard, [n], under way. wait() writes all shards to out, [world size · n].

    name: the tensors' name in messages.

    wait() decodes the rows on the current stream. Has a payload of its own until then.
    """

    def __init__(self, gather: ShardGather, shard: Tensor, out: Tensor, group: dist.ProcessGroup, name: str):
        super().__init__()
        encode, self._decode = gather.operations(out.dtype, out.device)
        self._out, self._explaining = out, Explaining.of(f"gather {name}", group)
        rows, within, between = group.size(), None, group
        if gather.ranks_per_node > 1:
            nodes = nodes_of(group, gather.ranks_per_node)
            within, between = nodes.within, nodes.between
        payload = torch.empty(rows, gather.payload_bytes(out.dtype), dtype=torch.uint8, device=out.device)
        self._payload: Tensor | None = payload
        places = payload.view(gather.ranks_per_node, between.size(), -1)
        own = places[within.rank() if within else 0]
        row = own[between.rank()]
        nothing = shard.new_empty(0, dtype=torch.promote_types(out.dtype, torch.float32))
        encode(buffer=shard, payload=row[None], kept=nothing, rank=-1)
        with self._explaining:
            round_trip_s(row, between)  # from then on receives are posted ahead
            self._work = all_gather(own, row, between)
            if within is not None:
                # Not in wait(): the ranks of a node start gathers in one order, but may wait in another.
                self._work.wait()
                self._work = all_gather(places.flatten(1), own.flatten(), within)

    @torch.inference_mode(False)
    @torch.no_grad()
    def wait(self, timeout: Any = None) -> bool:
        """Gather, and decode. Raises RuntimeError if a rank has ended or doesn't answer in time."""
        payload = self._payload
        if payload is None:
            return True
        with self._explaining:
            self._work.wait()
        self._decode(payload=payload, buffer=self._out)
        if has_streams(payload.device):
            payload.record_stream(torch.cuda.current_stream(payload.device))
        self._payload = None
        return True


class CompressedAllGather(Collective):
    """The all-gather of one parameter group, with the methods of torch's AllGather.

    gather: of the group's shards.

    Torch's all-gather gathers two sorts of tensors exactly: those that aren't shards in one floating-point
    dtype (with fsdp_pre_all_gather, or of several dtypes), and weights that forward has dequantized and
    sharded over fewer ranks (reshard_after_forward=2), so that backward computes with the same ones.
    """

    def __init__(self, param_group: ParamGroup, gather: ShardGather):
        self.param_group, self.gather, self._gather_exactly = param_group, gather, param_group.all_gather

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Write the dequantized shards of all ranks to output_tensor.

        input_tensor: [n], this rank's padded parameters, one after another; a view of output_tensor.
        output_tensor: [ranks · n], in the same dtype.
        async_op: return a Work. Its wait() dequantizes. Otherwise the current stream dequantizes.
        """
        group_of_params, numel = self.param_group, self.gather.layout.numel
        if (
            not self.compresses({input_tensor.dtype})
            or output_tensor.numel() != numel
            or group_of_params.is_resharded
        ):
            exact: dist.Work | None = self._gather_exactly(output_tensor, input_tensor, group, async_op)
            return exact
        name = f"the weights of {group_of_params.name}"
        work = GatherWork(self.gather, input_tensor, output_tensor, group, name)
        if async_op:
            return work
        work.wait()
        return None

    def compresses(self, dtypes: set[torch.dtype]) -> bool:
        """Return whether parameters in these dtypes are sent in fewer bytes."""
        is_one = len(dtypes) == 1 and not self.param_group.has_extensions
        return is_one and all(map(self.gather.compresses, dtypes))


def compress_all_gather(
    model: nn.Module,
    bits: int = 8,
    block_size: int = 128,
    *,
    ignored: Iterable[nn.Module | nn.Parameter] = (),
    ranks_per_node: int | str = AUTO,
) -> None:
    """Send the weights of a model that FSDP2 shards in 8 bits when they are all-gathered.

    Each rank quantizes its shard, with one scale for each block. All ranks, the owner too, compute with the
    dequantized weights. The optimizer's shards stay exact, so no errors are kept. Vectors, and tensors with
    shards smaller than a block, are gathered exactly in the same message.

    model: after fully_shard, called for the model itself, too.
    bits: 8. For bfloat16 use torch's MixedPrecisionPolicy(param_dtype=torch.bfloat16).
    block_size: elements that share a scale; even, at most 4096.
    ignored: modules and parameters that are gathered exactly, such as embeddings.
    ranks_per_node: the number of ranks that share a network card; see QuantizationState.

    Call it on every rank, before training.

    Raises TypeError or ValueError for arguments that don't fit, for a model that is not sharded and for a
    second call; RuntimeError, on every rank, if the ranks differ.
    """
    for each in all_gathers(model, WEIGHT_BITS("bits", bits), block_size, ignored, ranks_per_node):
        each.param_group.module.set_custom_all_gather(each)


def all_gathers(
    model: nn.Module,
    bits: int,
    block_size: int,
    ignored: Iterable[nn.Module | nn.Parameter],
    ranks_per_node: int | str,
) -> list[CompressedAllGather]:
    """Return each parameter group's all-gather, also with 4 bits. Raises compress_all_gather's errors."""
    block_size = BLOCK_SIZE("block_size", block_size)
    per_node = RANKS_PER_NODE("ranks_per_node", ranks_per_node)
    groups = checked_groups(_WHOSE, model)
    require_names(FSDPModule, "set_custom_all_gather")
    require_default(_WHOSE, groups, "all_gather")
    exact = sorted(_names_of(model, ignored))
    options = {"bits": bits, "block_size": block_size, "ranks_per_node": per_node, "ignored": exact}
    require_agreement(_WHOSE, groups, groups[0].replicate_group, options)
    nodes: dict[dist.ProcessGroup, int] = {}
    gathers: dict[Any, ShardGather] = {}  # groups of equal shapes share one
    found = []
    for group in groups:
        shards = group.shard_group
        if shards not in nodes:
            of_group = nodes_in(_WHOSE, per_node, shards, group.device)
            nodes[shards] = of_group.within.size() if of_group else 1
        shapes = tuple(tuple(each.shape) for each in group.placeholders)
        positions = tuple(index for index, name in enumerate(group.names(model)) if name in exact)
        key = shapes, positions, shards.size(), nodes[shards]
        if key not in gathers:
            gathers[key] = ShardGather(*key, bits, block_size)
        found.append(CompressedAllGather(group, gathers[key]))
    return found


def _names_of(model: nn.Module, ignored: Iterable[Any]) -> set[str]:
    """Return the names of parameters. Raises TypeError, or ValueError for parameters of another model."""
    if isinstance(ignored, nn.Module | torch.Tensor | str) or not isinstance(ignored, Iterable):
        raise TypeError(f"ignored takes a list of modules and parameters, got {described(ignored)}")
    ids = set()
    for each in ignored:
        if not isinstance(each, nn.Module | nn.Parameter):
            raise TypeError(f"ignored has {described(each)}, but takes modules and parameters")
        ids |= {id(parameter) for parameter in (each.parameters() if isinstance(each, nn.Module) else [each])}
    named = list(model.named_parameters(remove_duplicate=False))
    if unknown := ids - {id(parameter) for _, parameter in named}:
        raise ValueError(
            f"{len(unknown)} parameters in ignored aren't the model's. Likely cause: they were "
            "taken before fully_shard, which makes new ones"
        )
    return {name for name, parameter in named if id(parameter) in ids}
