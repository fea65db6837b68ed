"""The file that `python -m gradcomp bench` writes and `python -m gradcomp plan --from` reads: JSON, checked.

A file that isn't one, or holds something else than it should, is a ValueError that names the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import GenericAlias, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch

from .candidates import CollectiveKind, candidate_named
from .hardware import Link, MeasuredDevice, Rate, fitted_rate
from .models import Bucket, Shape, buckets_of, ddp_assignment, num_elements
from .prediction import Compute

FORMAT = 1
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LinkSample:
    """A collective of this kind on a buffer of so many bytes, all ranks' together, took so long."""

    kind: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class HookTime:
    """A hook's step times, and the hook's own work in a step (None for a hook that has none).

    name: as in docs/accuracy.md, or "noop" for steps without any communication.
    """

    name: str
    step_p20_s: float
    step_p50_s: float
    step_p80_s: float
    num_steps: int
    local_s: float | None = None


@dataclass(frozen=True)
class Measurements:
    """What was measured on one cluster with one model.

    shapes: of the parameters with gradients, in registration order. ready_at: for every bucket, the part of
    backward's time after which it was ready; empty where that wasn't measured.
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
    link: list[LinkSample]
    hooks: list[HookTime]

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
        shapes: list[Shape] = [tuple(shape) for shape in self.shapes]
        assumed = buckets_of(shapes, self.torch_dtype.itemsize, self.bucket_cap_mb * 2**20)
        if not self.ready_at:
            return assumed
        pairs = zip(assumed, self.ready_at, strict=True)
        return [Bucket(bucket.shapes, ready_at) for bucket, ready_at in pairs]

    def compute(self) -> Compute:
        return Compute(self.forward_s, self.backward_s, self.optimizer_s)

    def fitted_link(self) -> Link:
        """Return the link with the rates of each kind of collective; the all-reduce's for the others."""
        rates: dict[CollectiveKind, Rate] = {}
        for kind in KINDS:
            samples = [(each.num_bytes, each.seconds) for each in self.link if each.kind == kind]
            if samples:
                rates[kind] = fitted_rate(kind, self.world_size, samples)
        if "all-reduce" not in rates:
            raise ValueError("link has no all-reduce, without which no step can be predicted")
        usual = rates["all-reduce"]
        return Link(usual.bytes_per_s, usual.latency_s, has_tree=self.backend == "nccl", measured=rates)

    def measured_device(self) -> MeasuredDevice:
        """Return the device with the measured times of the hooks' own work."""
        local_ns = {
            hook.name: hook.local_s / self.numel * 1e9 for hook in self.hooks if hook.local_s is not None
        }
        # Hooks compress beside backward where there are streams, which CPUs have not.
        return MeasuredDevice(self.device, {"none": 0.0, **local_ns}, is_inline=self.device_type == "cpu")

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Measurements:
        """Return a file's measurements.

        Raises ValueError for a file that can't be read, or isn't one of measurements.
        """
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} can't be read: {error}") from error
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} isn't JSON: {error}") from error
        try:
            return cls.checked(given)
        except ValueError as error:
            raise ValueError(f"{path} isn't what `python -m gradcomp bench` writes: {error}") from error

    @classmethod
    def checked(cls, given: Any) -> Measurements:
        """Return the measurements that a JSON object holds. Raises ValueError for any other value."""
        if isinstance(given, Mapping) and given.get("format") != FORMAT:
            raise ValueError(f"format is {given.get('format')!r}; this gradcomp reads {FORMAT}")
        read: Measurements = _typed(given, cls, "the file")
        _check_values(read)
        return read


def _typed(value: Any, expected: Any, name: str) -> Any:
    """Return a JSON value as a type: a dataclass, a number, str, list[...], dict[str, ...], ... | None."""
    origin = get_origin(expected)
    if isinstance(expected, UnionType):
        return None if value is None else _typed(value, get_args(expected)[0], name)
    if origin is list and isinstance(value, Sequence) and not isinstance(value, str):
        (item,) = get_args(expected)
        return [_typed(each, item, f"{name}[{index}]") for index, each in enumerate(value)]
    if origin is dict and isinstance(value, Mapping):
        return {key: _typed(each, get_args(expected)[1], f"{name}.{key}") for key, each in value.items()}
    if expected is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if expected in (int, str) and type(value) is expected:
        return value
    if isinstance(expected, type) and not isinstance(expected, GenericAlias) and isinstance(value, Mapping):
        return _object(value, expected, name)
    raise ValueError(f"{name} is {_shortened(value)}; it has to be {_described(expected)}")


def _object(value: Mapping[str, Any], expected: Any, name: str) -> Any:
    """Return a JSON object as a dataclass."""
    types, prefix = get_type_hints(expected), "" if name == "the file" else f"{name}."
    if unknown := [key for key in value if key not in types]:
        raise ValueError(f"{name} has {', '.join(map(repr, unknown))}, which are unknown here")
    needed = [field.name for field in fields(expected) if field.default is MISSING]
    if missing := [key for key in needed if key not in value]:
        raise ValueError(f"{name} lacks {', '.join(missing)}")
    return expected(**{key: _typed(each, types[key], f"{prefix}{key}") for key, each in value.items()})


def _described(expected: Any) -> str:
    names = {float: "a finite number", int: "a whole number", str: "a string"}
    return names.get(expected, "a list" if get_origin(expected) is list else "an object")


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_values(read: Measurements) -> None:
    """Raise ValueError for values of the right types that can't be."""
    if read.dtype not in DTYPES:
        raise ValueError(f"dtype is {read.dtype!r}; it has to be one of {', '.join(DTYPES)}")
    if read.world_size < 1:
        raise ValueError(f"world_size is {read.world_size}; it has to be at least 1")
    if read.bucket_cap_mb <= 0:
        raise ValueError(f"bucket_cap_mb is {read.bucket_cap_mb}; it has to be positive")
    if not read.shapes or any(length < 1 for shape in read.shapes for length in shape):
        raise ValueError("shapes has to hold a parameter at least, and no length below 1")
    for name in ("forward_s", "backward_s", "optimizer_s"):
        if getattr(read, name) < 0:
            raise ValueError(f"{name} is {getattr(read, name)}; a time can't be negative")
    for index, sample in enumerate(read.link):
        if sample.kind not in KINDS:
            raise ValueError(f"link[{index}].kind is {sample.kind!r}; it has to be one of {', '.join(KINDS)}")
        if sample.num_bytes < 1 or sample.seconds <= 0:
            raise ValueError(f"link[{index}] has {sample.num_bytes} bytes in {sample.seconds} s")
    for index, hook in enumerate(read.hooks):
        if hook.name != "noop":
            candidate_named(hook.name)
        times = (hook.step_p20_s, hook.step_p50_s, hook.step_p80_s)
        if min(times) <= 0 or (hook.local_s is not None and hook.local_s < 0):
            raise ValueError(f"hooks[{index}] ({hook.name}) has a time that isn't positive")
    _check_ready_at(read)


def _check_ready_at(read: Measurements) -> None:
    itemsize = DTYPES[read.dtype].itemsize
    sizes = [num_elements([tuple(shape)]) * itemsize for shape in reversed(read.shapes)]
    num_buckets = len(ddp_assignment(sizes, read.bucket_cap_mb * 2**20))
    if read.ready_at and len(read.ready_at) != num_buckets:
        raise ValueError(f"ready_at has {len(read.ready_at)} values, but there are {num_buckets} buckets")
    if any(not 0 <= each <= 1 for each in read.ready_at) or sorted(read.ready_at) != read.ready_at:
        raise ValueError("ready_at has to rise from 0 to 1")
