"""The command `python -m gradcomp plan`: the bytes that each hook sends, and a network's time for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import get_args

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gradcomp import command_line
from gradcomp.comm.announcement import shown_bytes
from gradcomp.comm.bucket import real_shape
from gradcomp.command_line import (
    OneLineParser,
    find_callable,
    in_words,
    not_negative,
    positive,
    positive_int,
    shown_seconds,
)
from gradcomp.hooks.named_hooks import NAMES, NamedHook, forms_of

from .collectives import Backend, Network, Shape, buckets_of, traffic

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
