"""The file that `python -m gradcomp bench` writes and `python -m gradcomp plan --from` reads: JSON, checked.

A value that can't be is a ValueError that names the field and shows the value.
"""

from __future__ import annotations

import json
import math
import reprlib
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from .candidates import Collective, CollectiveKind, Group, form_named
from .hardware import ONE_RANK_NODES, Link, MeasuredDevice, Nodes, fitted_rate
from .models import Bucket, Shape, buckets_of, num_elements
from .prediction import Compute

FORMAT = 2
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
GROUPS: tuple[Group, ...] = get_args(Group)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NOOP = "noop"  # the name of a step without any communication


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {reprlib.repr(value)}; it must {wanted}")


@dataclass(frozen=True)
class LinkSample:
    """The time of one collective, in seconds.

    kind, num_bytes, group: see candidates.Collective. All nodes' ranks run their collectives at once.
    """

    kind: CollectiveKind
    num_bytes: int
    seconds: float
    group: Group = "all"

    def __post_init__(self) -> None:
        _require(self.kind in KINDS, "kind", self.kind, f"be one of {', '.join(KINDS)}")
        _require(self.group in GROUPS, "group", self.group, f"be one of {', '.join(GROUPS)}")
        _require(self.num_bytes >= 1, "num_bytes", self.num_bytes, "be at least 1")
        _require(self.seconds > 0, "seconds", self.seconds, "be positive")


@dataclass(frozen=True)
class HookTime:
    """The times of steps with a hook, in seconds.

    name: as in docs/accuracy.md, by nodes if it ends with BY_NODES, or NOOP.
    step_p20_s, step_p50_s, step_p80_s: quantiles over num_steps steps.
    local_s: the hook's own work in a step; None for a hook without any.
    """

    name: str
    step_p20_s: float
    step_p50_s: float
    step_p80_s: float
    num_steps: int
    local_s: float | None = None

    def __post_init__(self) -> None:
        if self.name != NOOP:
            form_named(self.name)
        for name in ("step_p20_s", "step_p50_s", "step_p80_s"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "be positive")
        _require(self.local_s is None or self.local_s >= 0, "local_s", self.local_s, "not be negative")


@dataclass(frozen=True)
class Measurements:
    """Measurements of one model on one cluster.

    shapes: the parameters with gradients, in registration order.
    ready_at: for every bucket, the part of backward's time after which the bucket was ready; empty if that
        wasn't measured.
    round_trip_s: the time from a message to its answer between ranks (nodes), as hooks find it; 0 where ranks
        exchange no messages themselves, such as on NCCL.
    ranks_per_node: the number of ranks on every node, if there were several nodes of several ranks; else 1.
    """

    format: int
    date_utc: str
    device: str
    device_type: str
    backend: str
    world_size: int
    num_threads: int
    versions: dict[str, str]
    model: str
    dtype: str
    shapes: list[list[int]]
    bucket_cap_mb: float
    ready_at: list[float]
    forward_s: float
    backward_s: float
    optimizer_s: float
    round_trip_s: float
    link: list[LinkSample]
    hooks: list[HookTime]
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPES, "dtype", self.dtype, f"be one of {', '.join(DTYPES)}")
        _require(self.world_size >= 1, "world_size", self.world_size, "be at least 1")
        per_node = self.ranks_per_node
        _require(per_node >= 1, "ranks_per_node", per_node, "be at least 1")
        wanted = f"divide world_size, {self.world_size}"
        _require(self.world_size % per_node == 0, "ranks_per_node", per_node, wanted)
        _require(self.bucket_cap_mb > 0, "bucket_cap_mb", self.bucket_cap_mb, "be positive")
        _require(bool(self.shapes), "shapes", self.shapes, "hold at least one parameter")
        for index, shape in enumerate(self.shapes):
            _require(min(shape, default=1) >= 1, f"shapes[{index}]", shape, "have no length below 1")
        for name in ("forward_s", "backward_s", "optimizer_s", "round_trip_s"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "not be negative")
        num_times, num_buckets = len(self.ready_at), len(self._assumed_buckets())
        wanted = f"have {num_buckets} values, one for each bucket"
        _require(num_times in (0, num_buckets), "ready_at", self.ready_at, wanted)
        times = [0.0, *self.ready_at, 1.0]
        _require(times == sorted(times), "ready_at", self.ready_at, "rise from 0 to 1")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def numel(self) -> int:
        return num_elements(map(tuple, self.shapes))

    def step_s(self, name: str) -> float | None:
        """Return the median step time of a hook; None if it wasn't measured."""
        return next((hook.step_p50_s for hook in self.hooks if hook.name == name), None)

    def buckets(self) -> list[Bucket]:
        """Return DDP's buckets, with the measured times if there are any."""
        assumed = self._assumed_buckets()
        ready_at = self.ready_at or [bucket.ready_at for bucket in assumed]
        return [Bucket(bucket.shapes, time) for bucket, time in zip(assumed, ready_at, strict=True)]

    def _assumed_buckets(self) -> list[Bucket]:
        shapes: list[Shape] = [tuple(shape) for shape in self.shapes]
        return buckets_of(shapes, self.torch_dtype.itemsize, self.bucket_cap_mb * 2**20)

    def compute(self) -> Compute:
        return Compute(self.forward_s, self.backward_s, self.optimizer_s)

    def fitted_link(self) -> Link:
        """Return the link with a rate for each collective: if not measured, the all-reduce's.

        Its latency is the round trip; without one, the all-reduce's.
        A node counts as having one network card: the rates are those of all its cards together.
        Raises ValueError if no all-reduce was measured, of all ranks and within a node.
        """
        is_gloo, per_node = self.backend == "gloo", self.ranks_per_node
        unknown = Link(math.inf, 0.0, nodes=Nodes(per_node, math.inf), gathers_by_messages=is_gloo)
        samples: dict[tuple[CollectiveKind, Group], list[tuple[Collective, float]]] = {}
        for each in self.link:
            collective = Collective(each.kind, each.num_bytes, each.group)
            samples.setdefault((each.kind, each.group), []).append((collective, each.seconds))
        rates = {key: fitted_rate(found, unknown, self.world_size) for key, found in samples.items()}
        usual, within = rates.get(("all-reduce", "all")), rates.get(("all-reduce", "within"))
        if usual is None:
            raise ValueError("link has no all-reduce; without one no step can be predicted")
        if per_node > 1 and within is None:
            raise ValueError("link has no all-reduce within a node; without one no step can be predicted")
        return Link(
            usual.bytes_per_s,
            self.round_trip_s or usual.latency_s,
            has_tree=self.backend == "nccl",
            measured=rates,
            nodes=Nodes(per_node, within.bytes_per_s) if within else ONE_RANK_NODES,
            gathers_by_messages=is_gloo,
        )

    def measured_device(self) -> MeasuredDevice:
        """Return the device with the measured times of the hooks' own work."""
        local_ns = {
            hook.name: hook.local_s / self.numel * 1e9 for hook in self.hooks if hook.local_s is not None
        }
        # A CPU has no streams, so hooks compress on backward's thread there.
        return MeasuredDevice(self.device, {"none": 0.0, **local_ns}, is_inline=self.device_type == "cpu")

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Measurements:
        """Read a file. Raises ValueError if it can't be read, or holds anything but measurements."""
        try:
            return cls.checked(json.loads(path.read_text()))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} can't be read: {error}") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} isn't JSON: {error}") from error
        except ValueError as error:
            raise ValueError(f"{path} isn't what `python -m gradcomp bench` writes: {error}") from error

    @classmethod
    def checked(cls, given: Any) -> Measurements:
        """Return the measurements in a JSON object. Raises ValueError for any other value."""
        if isinstance(given, dict) and given.get("format") != FORMAT:
            raise ValueError(f"format is {given.get('format')!r}; this gradcomp reads {FORMAT}")
        read: Measurements = _read(given, cls, "")
        return read


def _read(value: Any, expected: Any, name: str) -> Any:
    """Return a JSON value as a type; raise ValueError if it is of another type.

    expected: float, int, str, a Literal of strings, list[type], dict[str, type], a dataclass, or one of these
        | None.
    name: the value's place in the file, such as link[1].seconds; empty for the whole file.
    """
    arguments, kind = get_args(expected), get_origin(expected) or expected
    if isinstance(expected, UnionType):
        return None if value is None else _read(value, arguments[0], name)
    if kind is Literal:
        return _read(value, str, name)  # the object that has the value knows which strings can be
    if kind is list and isinstance(value, list):
        return [_read(each, arguments[0], f"{name}[{index}]") for index, each in enumerate(value)]
    if kind is dict and isinstance(value, dict):
        return {key: _read(each, arguments[1], f"{name}.{key}") for key, each in value.items()}
    if is_dataclass(kind) and isinstance(value, dict):
        return _read_object(value, kind, name)
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind in (int, str) and type(value) is kind:
        return value
    wanted = {float: "a finite number", int: "a whole number", str: "a string", list: "a list"}
    place, wanted_kind = name or "the file", wanted.get(kind, "an object")
    raise ValueError(f"{place} is {reprlib.repr(value)}; it must be {wanted_kind}")


def _read_object(value: dict[str, Any], expected: Any, name: str) -> Any:
    """Return a JSON object as a dataclass. Errors of the dataclass's own begin with the name."""
    types, place = get_type_hints(expected), name or "the file"
    if unknown := [key for key in value if key not in types]:
        raise ValueError(f"{place} has {', '.join(map(repr, unknown))}, which are unknown here")
    needed = [field.name for field in fields(expected) if field.default is MISSING]
    if missing := [key for key in needed if key not in value]:
        raise ValueError(f"{place} lacks {', '.join(missing)}")
    values = {key: _read(each, types[key], f"{name}.{key}".lstrip(".")) for key, each in value.items()}
    try:
        return expected(**values)
    except ValueError as error:
        raise ValueError(f"{name}: {error}".lstrip(": ")) from error
