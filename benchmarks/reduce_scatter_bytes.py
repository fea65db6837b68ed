"""Count the bytes that leave a node with compress_reduce_scatter: python -m benchmarks.reduce_scatter_bytes.

Arithmetic on a model's shapes; nothing runs. Without compression it is a ring, which leaves each node once:
for W ranks, (W − 1) / W of the gradients in a reduce-scatter, and twice that in an all-reduce. Codes go
straight to their owners. The model counts as one bucket, where FSDP2 has one per module: only the padding
differs. The all-gathers of parameters are not counted: nothing compresses them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from benchmarks.fsdp_bytes import shard_shapes
from benchmarks.models import LLAMA, MODELS, Shape, shapes_of
from gradcomp.compress import BucketSpec
from gradcomp.compress.named import NamedHook
from gradcomp.compress.quantized import QuantizedCompressor, QuantizedOptions
from gradcomp.plan import Network, traffic

HOOKS = ("none", "bf16", "int8", "int4")
BITS = {"int8": 8, "int4": 4}


class Cluster(NamedTuple):
    """Replicas of nodes. Each replica is one shard mesh over all of its ranks.

    A replica of one node reduce-scatters without compression. compress_replicas averages several replicas.

    by_nodes: whether codes are exchanged between nodes after an exact sum within each.
    """

    replicas: int
    nodes_per_replica: int
    ranks_per_node: int
    by_nodes: bool

    @property
    def num_shards(self) -> int:
        return self.nodes_per_replica * self.ranks_per_node

    def __str__(self) -> str:
        name = "FSDP2" if self.replicas == 1 else f"HSDP, {self.replicas} replicas"
        name += f", {self.nodes_per_replica} node{'s'[: self.nodes_per_replica > 1]} of {self.ranks_per_node}"
        return name + (", by nodes" if self.by_nodes else "")


CLUSTERS = (
    Cluster(1, 8, 1, by_nodes=False),
    Cluster(1, 8, 8, by_nodes=True),
    Cluster(1, 8, 8, by_nodes=False),
    Cluster(2, 4, 8, by_nodes=True),
    Cluster(8, 1, 8, by_nodes=False),
)


def compressor(hook: str, shapes: Sequence[Shape], cluster: Cluster) -> QuantizedCompressor:
    """Return the reduce-scatter of the whole model on the meta device."""
    ranks_per_node = cluster.ranks_per_node if cluster.by_nodes else 1
    of_model = (tuple(map(tuple, shapes)), torch.float32, torch.device("meta"), cluster.num_shards, 0)
    spec = BucketSpec(*of_model, ranks_per_node, is_shard=True)
    return QuantizedCompressor(spec, QuantizedOptions(BITS[hook]))


def reduce_scatter_bytes(hook: str, shapes: Sequence[Shape], cluster: Cluster) -> float:
    """Return the bytes that a node sends to other nodes of its replica in a step, for fp32 gradients."""
    nodes, ranks = cluster.nodes_per_replica, cluster.num_shards
    if nodes == 1:
        return 0.0
    if hook not in BITS:
        numel = ranks * sum(map(math.prod, shard_shapes(shapes, ranks)))
        return (2 if hook == "bf16" else 4) * numel * (ranks - 1) / ranks
    payload = 4 * compressor(hook, shapes, cluster).sent_numel
    # Without nodes, each rank of a node sends codes of its own.
    return payload * (nodes - 1) / nodes * (1 if cluster.by_nodes else cluster.ranks_per_node)


def all_reduce_bytes(hook: str, shapes: Sequence[Shape], cluster: Cluster) -> float:
    """Return the bytes that a node sends to other replicas, whose shards it averages with the same hook."""
    shards = shard_shapes(shapes, cluster.num_shards)
    found = traffic([shards], NamedHook.named(hook), Network(cluster.replicas))
    share = 2 * (cluster.replicas - 1) / cluster.replicas
    return cluster.ranks_per_node * found.collective_bytes * share


def error_bytes(shapes: Sequence[Shape], cluster: Cluster) -> int:
    """Return the bytes of a rank's errors with int4, in fp32."""
    shard = 4 * sum(map(math.prod, shard_shapes(shapes, cluster.num_shards)))
    of_replicas = shard if cluster.replicas > 1 else 0
    if cluster.nodes_per_replica == 1:  # only compress_replicas compresses
        return of_replicas
    error = compressor("int4", shapes, cluster)._sum.error
    assert error is not None
    return error.nbytes + of_replicas


def table(model: str) -> list[list[str]]:
    """Return the table's rows: a cluster, its bytes with each hook and the factor saved, and its errors."""
    shapes = shapes_of(model)
    rows = [["", *HOOKS, "errors"]]
    for cluster in CLUSTERS:
        sent = [
            reduce_scatter_bytes(hook, shapes, cluster) + all_reduce_bytes(hook, shapes, cluster)
            for hook in HOOKS
        ]
        cells = [f"{each / 1e6:,.0f} MB ({sent[0] / each:.1f}×)" for each in sent]
        rows.append([str(cluster), *cells, f"{error_bytes(shapes, cluster) / 1e9:.1f} GB"])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS | LLAMA, default="llama-7b")
    model = parser.parse_args(arguments).model
    print(f"{model}, reduced in fp32: sent by a node per step; and a rank's errors with int8 and int4\n")
    for name, *cells, errors in table(model):
        print(f"{name:<44}" + "".join(f"{cell:>20}" for cell in cells) + f"{errors:>10}")


if __name__ == "__main__":
    main()
