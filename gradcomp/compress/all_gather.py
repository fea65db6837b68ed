"""The all-gather of shards in codes: the ranks gather rows of codes, and every rank decodes the same bytes.

    rank r    its shard ──quantize──▶ row r
    all-gather: every rank gets the rows of all ranks, and dequantizes them, its own too

With nodes, a row goes through the network card of its rank's node once to each other node:

    node i, place j    gathers the rows of place j from the other nodes
    within the node    every rank gets the rows of all places
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradcomp import ops
from gradcomp.device import has_streams
from gradcomp.layout.blocks import BlockLayout
from gradcomp.layout.flat import FlatLayout

from ..comm.exchange import all_gather, round_trip_s
from ..comm.nodes import nodes_of
from ..comm.process_group import Explaining


class ShardGather:
    """The all-gather of shards that have tensors of equal shapes on all ranks.

    shapes: of a shard's tensors.
    exact: the positions of tensors that are sent exactly, beside vectors and those smaller than a block.
    world_size, ranks_per_node: of the group.
    bits: 8 or 4.
    block_size: elements that share a scale.

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
        is_shorter = dtype.is_floating_point and 8 * dtype.itemsize > self._bits
        return is_shorter and bool(self.layout.quantized)

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
