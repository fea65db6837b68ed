"""Count the bytes between FSDP2 replicas with compress_replicas: python -m benchmarks.fsdp_bytes.

Arithmetic on a model's shapes; nothing runs. A collective over R replicas sends 2 (R − 1) / R times its
buffer. The model counts as one bucket, where FSDP2 has one per module: only the padding differs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.models import LLAMA, MODELS, Shape, shapes_of
from gradcomp.compress.named import NamedHook
from gradcomp.plan import Network, traffic

HOOKS = ("none", "bf16", "int8", "int4", "powersgd:16", "powersgd:16:int8", "powersgd:4", "powersgd:4:int8")


def shard_shapes(shapes: Sequence[Shape], num_shards: int) -> list[Shape]:
    """Return the shape of each parameter's shard, padded to as many rows on every rank."""
    return [(-(-shape[0] // num_shards), *shape[1:]) for shape in shapes]


def bytes_sent(hook: str, shapes: Sequence[Shape], num_shards: int, num_replicas: int) -> float:
    """Return the bytes that all ranks of a replica send to other replicas in a step, for fp32 gradients."""
    found = traffic([shard_shapes(shapes, num_shards)], NamedHook.named(hook), Network(num_replicas))
    return num_shards * found.collective_bytes * 2 * (num_replicas - 1) / num_replicas


def table(model: str, shards: Sequence[int], num_replicas: int) -> list[list[str]]:
    """Return the table's rows: a hook, then for each number of shards its bytes and the factor saved."""
    shapes = shapes_of(model)
    rows = [["", *(f"{each} shards" if each > 1 else "1 shard" for each in shards)]]
    for hook in HOOKS:
        row = [hook]
        for num_shards in shards:
            none, sent = (bytes_sent(each, shapes, num_shards, num_replicas) for each in ("none", hook))
            row.append(f"{sent / 1e6:,.0f} MB ({none / sent:.1f}×)")
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS | LLAMA, default="llama-7b")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 8, 64], help="ranks of a replica")
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args(arguments)
    if min(options.shards) < 1 or options.replicas < 2:
        parser.error(f"needs shards and at least 2 replicas, got {options.shards} and {options.replicas}")
    print(f"{options.model}, {options.replicas} replicas, reduced in fp32: sent by a replica per step\n")
    for row in table(options.model, options.shards, options.replicas):
        print(f"{row[0]:<18}" + "".join(f"{cell:>22}" for cell in row[1:]))


if __name__ == "__main__":
    main()
