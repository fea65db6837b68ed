"""Arithmetic about bytes and wires: what each hook sends in a step, and how long a network takes for it.

From the library's own layouts. The command is `python -m gradcomp plan`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gradcomp import command_line
from gradcomp.comm.announcement import shown_bytes
from gradcomp.comm.bucket import real_shape
from gradcomp.comm.exchange import MIN_DELAY_S, channel_for
from gradcomp.command_line import (
    OneLineParser,
    find_callable,
    in_words,
    not_negative,
    positive,
    positive_int,
    shown_seconds,
)
from gradcomp.compress.compressor import BucketSpec, Collective
from gradcomp.hooks.named_hooks import NAMES, NamedHook, forms_of
from gradcomp.reducer.bucket import assign_buckets

__all__ = ["Collective", "Network", "Traffic", "buckets_of", "collectives_of", "load_shapes", "traffic"]

Shape = tuple[int, ...]

# DDP's defaults: torch.nn.parallel.DistributedDataParallel(bucket_cap_mb=25), and 1 MiB for the first bucket.
FIRST_BUCKET_BYTES, BUCKET_CAP_BYTES = 2**20, 25 * 2**20
GLOO_THREADS = 2  # gloo's own collectives that run at the same time

Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True)
class Network:
    """Ranks on nodes, and the network between the nodes. Links within a node count as infinitely fast.

    world_size: the number of ranks.
    bytes_per_s: of a node in one direction, all its network cards together.
    round_trip_s: the time from a message to its answer between two nodes.
    ranks_per_node: the ranks of a node, which follow one another. With 1, every rank has a network card.
    backend: "nccl", or "gloo" with CPU tensors.

    Raises ValueError for ranks that aren't whole nodes, and a bandwidth that isn't positive.
    """

    world_size: int
    bytes_per_s: float = math.inf
    round_trip_s: float = 0.0
    ranks_per_node: int = 1
    backend: Backend = "nccl"

    def __post_init__(self) -> None:
        if min(self.world_size, self.ranks_per_node) < 1 or self.world_size % self.ranks_per_node:
            raise ValueError(
                f"{self.world_size} ranks are not whole nodes of {self.ranks_per_node} ranks; give a multiple"
            )
        if not self.bytes_per_s > 0:
            raise ValueError(f"the bandwidth is {self.bytes_per_s!r} bytes/s; it must be positive")

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @property
    def by_messages(self) -> bool:
        """Whether hooks send messages to all other ranks at once. NCCL gathers along a ring."""
        return self.backend == "gloo"

    @property
    def has_delay(self) -> bool:
        """Whether hooks find that a round trip takes long; see comm/exchange.py."""
        return self.by_messages and self.round_trip_s >= MIN_DELAY_S

    def sent_bytes(self, collective: Collective) -> float:
        """Return the bytes that leave a node.

        A ring leaves each node once. Messages leave it from each of its ranks to every rank of other nodes.
        """
        kind, others = collective.kind, 1 - 1 / self.num_nodes
        num_passes = 2 if kind == "all-reduce" else 1
        if collective.group == "within" or self.num_nodes == 1:
            return 0.0
        if collective.group == "between":
            return num_passes * others * collective.num_bytes
        if kind == "all-to-all" or (kind == "all-gather" and self.by_messages):
            return self.ranks_per_node * others * collective.num_bytes
        return num_passes * (1 - 1 / self.world_size) * collective.num_bytes

    def num_round_trips(self, collective: Collective) -> float:
        """Return the round trips that a collective of no bytes waits for.

        On gloo every step of an all-reduce's ring is one, and so is an exchange with all other ranks; half of
        one if its receives are posted ahead. On NCCL every message is half of one: an all-reduce has the
        messages of a tree between nodes, an all-gather a ring's, and an all-to-all sends all at once.
        """
        if collective.group == "within" or self.num_nodes == 1:
            return 0.0
        size = self.num_nodes if collective.group == "between" else self.world_size
        if self.by_messages:
            row_bytes = -(-collective.num_bytes // self.world_size)
            of_exchange = 0.5 if channel_for(row_bytes, size) is not None else 1.0
            return 2 * (size - 1) if collective.kind == "all-reduce" else of_exchange
        if collective.kind == "all-reduce":
            return math.ceil(math.log2(self.num_nodes))
        return 0.5 * (size - 1) if collective.kind == "all-gather" else 0.5


@dataclass(frozen=True)
class Traffic:
    """What a hook sends in a step that compresses, and the network's time for it.

    sent_bytes: what leaves a node.
    transfer_s: sent_bytes over the node's bandwidth.
    wait_s: the round trips that follow one another.

    Backward hides a part of both times, and compressing takes time of its own.
    """

    sent_bytes: float
    transfer_s: float
    wait_s: float


def buckets_of(
    shapes: Sequence[Shape], itemsize: int = 4, cap_bytes: float = BUCKET_CAP_BYTES
) -> list[list[Shape]]:
    """Return the shapes of each bucket of a model of one dtype, as DDP has them from its second iteration on.

    DDP rebuilds its buckets in the order in which gradients become ready: the reversed order is assumed. A
    bucket closes once it reaches its cap, so one large tensor makes a large bucket.
    """
    backwards = [tuple(shape) for shape in reversed(shapes)]
    sizes = [math.prod(shape) * itemsize for shape in backwards]
    buckets = assign_buckets(sizes, [None] * len(sizes), (min(FIRST_BUCKET_BYTES, cap_bytes), cap_bytes))
    return [[backwards[index] for index in bucket] for bucket in buckets]


def traffic(
    buckets: Sequence[Sequence[Shape]],
    hook: NamedHook,
    network: Network,
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
) -> Traffic:
    """Return a hook's traffic in a step of DDP.

    buckets: the shapes of each bucket's gradients; see buckets_of.
    dtype: the gradients', or each bucket's.
    """
    dtypes = [dtype] * len(buckets) if isinstance(dtype, torch.dtype) else dtype
    given = zip(buckets, dtypes, strict=True)
    by_bucket = [collectives_of(hook, tuple(shapes), each, network) for shapes, each in given]
    collectives = [each for bucket in by_bucket for each in bucket]
    sent_bytes = sum(map(network.sent_bytes, collectives))
    transfer_s = sent_bytes / network.bytes_per_s
    trips = [sum(map(network.num_round_trips, bucket)) for bucket in by_bucket]
    num_trips = sum(trips)  # on NCCL one bucket follows another
    if network.by_messages:
        # All buckets' exchanges are under way together, but of gloo's own all-reduces only GLOO_THREADS are.
        has_all_reduces = any(each.kind == "all-reduce" for each in collectives)
        num_trips = max([num_trips / (GLOO_THREADS if has_all_reduces else len(trips)), *trips])
    return Traffic(sent_bytes, transfer_s, num_trips * network.round_trip_s)


@cache
def collectives_of(
    hook: NamedHook, shapes: tuple[Shape, ...], dtype: torch.dtype, network: Network
) -> tuple[Collective, ...]:
    """Return a hook's collectives on a bucket of gradients with these shapes, in a step that compresses."""
    if hook.name == "none":  # DDP's own all-reduce, whatever the delay
        return (Collective("all-reduce", sum(map(math.prod, shapes)) * dtype.itemsize),)
    per_node = network.ranks_per_node if hook.is_hierarchical else 1
    device = torch.device("cpu" if network.by_messages else "cuda")
    bucket = BucketSpec(shapes, dtype, device, network.world_size, 0, per_node, network.has_delay)
    return tuple(hook.compressor.collectives(bucket, hook.options))


# --- the command ---

DTYPES = {each: getattr(torch, each) for each in ("float32", "bfloat16", "float16", "float64")}

EXPLANATION = """
node sends: the bytes that leave a node in a step; a rank, if it is a node of its own. transfer: their time.
waits: the round trips that follow one another. Arithmetic: nothing was run. Computing, compressing and links
within a node take no time here, and backward hides a part of both times. torchrun -m gradcomp bench measures.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = plan_parser()
    options = parser.parse_args(arguments)
    per_node = options.ranks_per_node
    world_size = options.ranks or 16 * per_node
    try:
        network = Network(world_size, options.bandwidth, options.delay_ms / 1e3, per_node, options.backend)
        parameters = load_shapes(options.model)
    except ValueError as error:
        parser.error(str(error))
    shapes: dict[torch.dtype, list[Shape]] = {}  # DDP has buckets of one dtype each
    for shape, dtype in parameters:
        shapes.setdefault(DTYPES.get(options.dtype, dtype), []).append(shape)
    if wrong := next((dtype for dtype in shapes if dtype not in DTYPES.values()), None):
        parser.error(f"model {options.model!r} is in {wrong}, in which nothing is averaged: give --dtype")
    cap = options.bucket_cap_mb * 2**20
    buckets = [(each, dtype) for dtype in shapes for each in buckets_of(shapes[dtype], dtype.itemsize, cap)]
    ranks = f"{world_size} ranks, {per_node} per node, {options.backend}"
    rate = f"{8 * network.bytes_per_s / 1e9:g} Gbit/s per node, round trips of {options.delay_ms:g} ms"
    dtypes = " and ".join(str(dtype).removeprefix("torch.") for dtype in shapes)
    numel = sum(math.prod(shape) for shape, _ in parameters)
    print(f"model    {numel:,} parameters, gradients in {dtypes}, {len(buckets)} buckets")
    print(f"network  {ranks}; {rate}\n")
    has_nodes = network.num_nodes > 1 and per_node > 1
    forms = forms_of(options.hook, has_nodes=has_nodes, is_gloo=network.by_messages)
    print(*_table(buckets, forms, network), sep="\n")
    print(EXPLANATION.rstrip())


def _table(
    buckets: Sequence[tuple[list[Shape], torch.dtype]], hooks: Iterable[NamedHook], network: Network
) -> list[str]:
    """Return a line per hook."""
    shapes, dtypes = zip(*buckets, strict=True)
    none, bf16 = (traffic(shapes, NamedHook.named(name), network, dtypes) for name in ("none", "bf16"))
    rows = [["hook", "node sends", "fewer", "than bf16", "transfer", "waits"]]
    for hook in hooks:
        found = traffic(shapes, hook, network, dtypes)
        fewer = [each.sent_bytes / max(found.sent_bytes, 1) for each in (none, bf16)]
        times = map(shown_seconds, (found.transfer_s, found.wait_s))
        rows.append([hook.name, shown_bytes(found.sent_bytes), *(f"{each:.1f}×" for each in fewer), *times])
    return command_line.aligned(rows)


def plan_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="python -m gradcomp plan",
        description="Print what every hook sends in a step, and a network's time for it, by arithmetic.",
    )
    text = "module:callable, which returns an nn.Module or a list of shapes."
    parser.add_argument("--model", required=True, help=text)
    parser.add_argument("--dtype", choices=DTYPES, help="The gradients' dtype. Default: the model's.")
    text = "DDP's option of this name. Default: 25."
    parser.add_argument("--bucket-cap-mb", type=positive, default=25.0, metavar="MB", help=text)
    text = "The number of ranks. Default: 16 nodes."
    parser.add_argument("--ranks", type=positive_int, metavar="N", help=text)
    text = "The ranks of a node, which share its bandwidth. Default: 1."
    parser.add_argument("--ranks-per-node", type=positive_int, default=1, metavar="N", help=text)
    text = "The rate of a node's network cards together, such as 200Mbit or 1GB/s. Default: 10Gbit."
    rate = command_line.bytes_per_s
    parser.add_argument("--bandwidth", type=rate, default="10Gbit", metavar="RATE", help=text)
    text = "The time from a message to its answer between nodes. Default: 0."
    parser.add_argument("--delay-ms", type=not_negative, default=0.0, metavar="MS", help=text)
    text = "The process group's back end, gloo with CPU tensors. Default: %(default)s."
    parser.add_argument("--backend", choices=get_args(Backend), default="nccl", help=text)
    text = "The hooks, separated by commas. Default: all that docs/accuracy.md names."
    names = command_line.hooks_named
    parser.add_argument("--hook", type=names, default=",".join(NAMES), metavar="NAMES", help=text)
    return parser


def load_shapes(name: str) -> list[tuple[Shape, torch.dtype]]:
    """Return the shape and dtype of each of a model's parameters with gradients.

    name: module:callable. The callable takes no argument and returns an nn.Module, a tuple that begins with a
        module, or a list of shapes, whose dtype is fp32.

    The callable runs on the meta device, where parameters need no memory. If that fails, it runs on the CPU.
    Raises ValueError for anything else, and a lazy module that has had no input.
    """
    if ":" not in name:
        raise ValueError(f"model {name!r} is not module:callable")
    function = find_callable(name, "model")
    try:
        try:
            with torch.device("meta"):
                made = function()
        except Exception:
            made = function()
    except (Exception, SystemExit) as error:
        raise ValueError(f"model {name!r}: calling it without arguments fails: {in_words(error)}") from error
    module = made[0] if isinstance(made, tuple) and made else made
    if isinstance(module, nn.Module):
        found: list[torch.Tensor] = [each for each in module.parameters() if each.requires_grad]
        if lazy := [key for key, each in module.named_parameters() if is_lazy(each)]:
            raise ValueError(f"model {name!r}: lazy parameter {lazy[0]!r} has no shape: run a forward first")
    else:
        try:
            found = [torch.empty(torch.Size(shape), dtype=torch.float32, device="meta") for shape in made]
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"model {name!r} returned {type(made).__name__}; it must return an nn.Module, a tuple that "
                "begins with one, or a list of shapes"
            ) from error
    if not found:
        raise ValueError(f"model {name!r} has no parameter with a gradient")
    # In hooks a complex gradient is real, with a last dimension of 2.
    return [(real_shape(each), each.dtype.to_real() if each.is_complex() else each.dtype) for each in found]
