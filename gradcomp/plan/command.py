"""The command `python -m gradcomp plan`: predict which hook to use, and when not to compress."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .candidates import CANDIDATES, Candidate, candidate_named
from .hardware import BANDWIDTH_UTILIZATION, CPU, GPUS, LAUNCH_S, ONE_RANK_NODES, Device, Gpu, Link, Nodes
from .measurements import DTYPES, Measurements
from .models import BUCKET_CAP_BYTES, BUILT_IN_MODELS, Model, buckets_of, load_model
from .prediction import Compute
from .recommendation import Scenario
from .show import as_json, draw_map, table, text_map

DEVICES: dict[str, Device] = {device.name: device for device in (*GPUS, CPU)}
LATENCIES_US = {"nccl": 10.0, "gloo": 50.0}
MIB = 2**20
# Options that --from excludes: a file of measurements has their values.
REPLACED_BY_FILE = (
    *("model", "device", "backend", "batch", "forward_ms", "backward_ms", "optimizer_ms", "dtype"),
    "bucket_cap_mb",
)


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=28)


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports an error in one line, then exits with status 2. Its help texts are aligned."""

    def __init__(self, **options: Any):
        super().__init__(**{"formatter_class": _formatter, **options})

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = plan_parser()
    options = parser.parse_args(arguments)
    try:
        scenario, link, world_size, measured = _from_file(options) if options.file else _from_options(options)
        for each in scenario.hooks:  # raises for a hook without a measured time on this device
            scenario.device.local_s(each, each.payload((), scenario.dtype, 1), 0)
        if options.picture:
            draw_map(scenario, link, options.picture)
    except ImportError:
        parser.error("--picture needs matplotlib, which isn't installed: pip install matplotlib")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps(as_json(scenario, link, world_size), indent=1))
    elif options.map:
        print(text_map(scenario, link))
    else:
        print(table(scenario, link, world_size, measured))


def plan_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="python -m gradcomp plan",
        description="Predict a training step's time with every hook, and say which to use. Nothing is "
        "measured: docs/internals/plan.md has the formulas.",
    )
    model = parser.add_argument_group("what is trained")
    text = "module:callable, which returns an nn.Module or a list of shapes. Default: bert-large."
    model.add_argument("--model", help=f"The model: {', '.join(BUILT_IN_MODELS)}, or {text}")
    model.add_argument("--device", choices=DEVICES, help="What each rank computes on. Default: H200.")
    model.add_argument("--batch", type=positive_int, metavar="N", help="Images or sequences per rank.")
    for part in ("forward", "backward", "optimizer"):
        text = f"The time of {part}, instead of the one from operations and the device's rate."
        model.add_argument(f"--{part}-ms", type=not_negative, metavar="MS", help=text)
    model.add_argument("--dtype", choices=DTYPES, help="The gradients' dtype. Default: float32.")
    text = "DDP's option of this name. Default: 25."
    model.add_argument("--bucket-cap-mb", type=positive, metavar="MB", help=text)
    text = "Take all of the above from a file that `python -m gradcomp bench` wrote."
    model.add_argument("--from", dest="file", type=Path, metavar="FILE", help=text)
    network = parser.add_argument_group("the network")
    text = "The number of ranks. Default: 64, rounded to whole nodes, or FILE's."
    network.add_argument("--ranks", type=positive_int, metavar="N", help=text)
    text = "The rate of each network card, such as 200Mbit or 10Gbps. Default: 10Gbit, or FILE's."
    network.add_argument("--bandwidth", type=bits_per_s, metavar="RATE", help=text)
    text = "The ranks of a node, which share its network cards. Default: 1, or FILE's."
    network.add_argument("--ranks-per-node", type=positive_int, metavar="N", help=text)
    text = "The network cards of a node. Default: 1."
    network.add_argument("--cards-per-node", type=positive_int, metavar="N", help=text)
    text = (
        "The rate of each rank's links within its node, in one direction, such as 450GB/s. Default: FILE's, "
        "or 80%% of the GPU's data sheet on nccl; on gloo there is none."
    )
    network.add_argument("--bandwidth-within", type=bits_per_s, metavar="RATE", help=text)
    text = (
        "The time per message between two ranks; on gloo of a message and its answer, the smallest exchange. "
        "Default: 10 for nccl, 50 for gloo, or FILE's."
    )
    network.add_argument("--latency-us", type=not_negative, metavar="US", help=text)
    text = "The process group's backend. Default: nccl, on the CPU gloo."
    network.add_argument("--backend", choices=LATENCIES_US, help=text)
    output = parser.add_argument_group("what is shown")
    text = "The hooks to compare, separated by commas. Default: all that docs/accuracy.md names."
    output.add_argument("--hook", type=_hooks, metavar="NAMES", help=text)
    text = "What a recommended hook may cost in loss on docs/accuracy.md's GPT. Default: %(default)s."
    output.add_argument("--max-loss", type=not_negative, default=0.02, metavar="NATS", help=text)
    text = "Show the hook to use by bandwidth and ranks, as a table."
    output.add_argument("--map", action="store_true", help=text)
    text = "Draw that map into a file. Needs matplotlib."
    output.add_argument("--picture", type=Path, metavar="FILE", help=text)
    output.add_argument("--json", action="store_true", help="Print the table as JSON.")
    return parser


def _from_options(
    options: argparse.Namespace,
) -> tuple[Scenario, Link, int, dict[str, float] | None]:
    """Return scenario, link, number of ranks, and None for the measured times.

    Raises ValueError for an unknown model.
    """
    device = DEVICES[options.device or "H200"]
    backend = options.backend or ("nccl" if isinstance(device, Gpu) else "gloo")
    dtype = DTYPES[options.dtype or "float32"]
    cap_bytes = BUCKET_CAP_BYTES if options.bucket_cap_mb is None else options.bucket_cap_mb * MIB
    model = load_model(options.model or "bert-large")
    compute, source = _compute(options, model, device)
    scenario = Scenario(
        model=model.name,
        buckets=tuple(buckets_of(model.parameters, dtype.itemsize, cap_bytes)),
        dtype=dtype,
        device=device,
        backend=backend,
        compute=compute,
        hooks=options.hook or tuple(CANDIDATES.values()),
        max_loss=options.max_loss,
        compute_source=source,
        cost_source=_cost_source(device),
    )
    bits = 10e9 if options.bandwidth is None else options.bandwidth
    latency_us = LATENCIES_US[backend] if options.latency_us is None else options.latency_us
    per_node = options.ranks_per_node or 1
    world_size = options.ranks or max(1, 64 // per_node) * per_node
    # gloo sends a GPU's gradients through the host's memory, not over NVLink.
    within = device.within_bytes_per_s if isinstance(device, Gpu) and backend == "nccl" else None
    link = Link(
        bits / 8,
        latency_us / 1e6,
        has_tree=backend == "nccl",
        nodes=_nodes(
            options,
            per_node,
            world_size,
            None if within is None else BANDWIDTH_UTILIZATION * within,
            f"{backend}'s links within a node of {device.name}",
        ),
        gathers_by_messages=backend == "gloo" and not isinstance(device, Gpu),
    )
    return scenario, link, world_size, None


def _nodes(
    options: argparse.Namespace,
    per_node: int,
    world_size: int,
    within_bytes_per_s: float | None,
    within: str,
) -> Nodes:
    """Return nodes of per_node ranks.

    within_bytes_per_s: the bandwidth within a node if --bandwidth-within isn't given; None if unknown.
    within: the links within a node, for messages.

    Raises ValueError for ranks that aren't whole nodes, and for an unknown bandwidth within.
    """
    cards, bits = options.cards_per_node or 1, options.bandwidth_within
    if world_size % per_node:
        raise ValueError(f"--ranks is {world_size}; it must be a multiple of --ranks-per-node, {per_node}")
    if per_node == 1:
        if bits is not None:
            raise ValueError("--bandwidth-within needs --ranks-per-node of at least 2")
        return Nodes(1, ONE_RANK_NODES.within_bytes_per_s, cards)
    if bits is not None:
        within_bytes_per_s = bits / 8
    if within_bytes_per_s is None:
        raise ValueError(f"nothing is known of {within}: give --bandwidth-within")
    return Nodes(per_node, within_bytes_per_s, cards)


def _compute(options: argparse.Namespace, model: Model, device: Device) -> tuple[Compute, str]:
    """Return the times of forward, backward and optimizer, and their origin in words."""
    batch = options.batch or model.batch
    flops = model.forward_flops(batch)
    if flops:
        forward_s = device.compute_s(flops, model.utilization)
        backward_s = 2 * forward_s
        samples = f"{batch * model.samples_per_item:,} {model.sample}s"
        source = f"from {samples} per rank, {3 * flops / 1e12:.3g} TFLOP at {_rate(device, model)}"
    elif options.backward_ms is None:
        raise ValueError(
            f"nothing is known of the computing time of {model.name!r}: give --backward-ms (and "
            "--forward-ms), or measure it: python -m gradcomp bench"
        )
    else:
        backward_s = options.backward_ms / 1e3
        forward_s = backward_s / 2
        source = "as given; forward half of backward, unless given"
    parts = {"forward": forward_s, "backward": backward_s, "optimizer": device.optimizer_s(model.numel)}
    given = {name: getattr(options, f"{name}_ms") for name in parts}
    changed = {name: value / 1e3 for name, value in given.items() if value is not None}
    if flops and changed:
        source += f"; {', '.join(changed)} as given"
    return Compute(*(parts | changed).values()), source


def _rate(device: Device, model: Model) -> str:
    if isinstance(device, Gpu):
        return f"{model.utilization:.0%} of {device.peak_flops / 1e12:.0f} TFLOP/s in bf16 (assumed)"
    return f"{device.flops / 1e9:.0f} GFLOP/s (assumed)"


def _cost_source(device: Device) -> str:
    if isinstance(device, Gpu):
        memory = f"{BANDWIDTH_UTILIZATION:.0%} of {device.memory_bytes_per_s / 1e9:,.0f} GB/s"
        return (
            f"own work from bytes moved at {memory}, and {LAUNCH_S * 1e6:g} µs a launch (no run on a GPU has "
            "been made)"
        )
    return "own work as measured on one x86-64 core with AVX-512; another CPU differs"


def _from_file(
    options: argparse.Namespace,
) -> tuple[Scenario, Link, int, dict[str, float] | None]:
    """Return scenario, link, number of ranks, and by hook the measured step times; None for another network.

    Raises ValueError for a file without measurements.
    """
    for name in REPLACED_BY_FILE:
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} and --from exclude each other: what {option} says is in the file")
    read = Measurements.read(options.file)
    device = read.measured_device()
    timed = [candidate_named(name) for name in device.local_ns]
    scenario = Scenario(
        model=read.model,
        buckets=tuple(read.buckets()),
        dtype=read.torch_dtype,
        device=device,
        backend=read.backend,
        compute=read.compute(),
        hooks=options.hook or tuple(timed),
        max_loss=options.max_loss,
        compute_source=f"measured on {read.world_size} ranks, {read.date_utc}",
        cost_source=f"own work measured for {read.world_size} ranks; for another number the same is assumed",
    )
    fitted = read.fitted_link()
    world_size = options.ranks or read.world_size
    per_node = options.ranks_per_node or fitted.nodes.ranks
    if per_node > 1 and fitted.nodes.ranks == 1 and options.bandwidth is None:
        raise ValueError(
            f"--ranks-per-node needs --bandwidth: {options.file} was measured without nodes, so it has the "
            "rate of a rank, not of a network card"
        )
    if options.cards_per_node and options.bandwidth is None:
        raise ValueError("--cards-per-node needs --bandwidth, which is then of each card")
    within = fitted.nodes.within_bytes_per_s if fitted.nodes.ranks > 1 else None
    nodes = _nodes(options, per_node, world_size, within, f"the links within a node in {options.file}")
    link = replace(fitted, nodes=nodes)
    if any(given is not None for given in (options.bandwidth, options.latency_us, options.bandwidth_within)):
        link = replace(
            link,
            bytes_per_s=fitted.bytes_per_s if options.bandwidth is None else options.bandwidth / 8,
            latency_s=fitted.latency_s if options.latency_us is None else options.latency_us / 1e6,
            measured={},
        )
    is_as_measured = link == fitted and world_size == read.world_size
    measured = {hook.name: hook.step_p50_s for hook in read.hooks} if is_as_measured else None
    return scenario, link, world_size, measured


def bits_per_s(text: str) -> float:
    """Parse a bandwidth such as 200Mbit, 2.5Gbit/s, 10Gbps or 450GB/s, for argparse. A capital B is bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgG])([bB][iI][tT]|b|B)(?:/[sS]|ps)?", text.strip())
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a bandwidth; write it as 200Mbit or 10Gbit")
    bits = 8 if found[3] == "B" else 1
    return float(found[1]) * bits * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2].lower()]


def _hooks(text: str) -> tuple[Candidate, ...]:
    """Parse names of hooks. "none" is always among them: every hook is compared with it."""
    try:
        named = [candidate_named(name.strip()) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return tuple(dict.fromkeys([CANDIDATES["none"], *named]))


def _number(accepts: Callable[[float], bool], described: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (accepts(value) and value < float("inf")):
            raise argparse.ArgumentTypeError(f"{text!r} is not {described}")
        return value

    return parse


positive = _number(lambda value: value > 0, "a number above 0")
not_negative = _number(lambda value: value >= 0, "a number of at least 0")


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
