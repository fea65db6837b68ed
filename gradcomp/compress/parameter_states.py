"""What a state keeps of its parameters from step to step, by parameter, and the compressors of its buckets.

    {"layer.weight": {"error": [8, 4], "direction": [4, 2]}, "layer.bias": {"error": [8]}, ...}

A compressor works on a bucket, as one contiguous memory. It is made when a bucket with new parameters or
options comes, takes over the entries of the bucket's parameters, and gives them back when its parameters come
in other buckets, or when someone reads them:

    first step of a run      bucket 0: 0 1 2 3 4 5 6 7
    later steps              bucket 0: 7 6 5     bucket 1: 4 3 2     bucket 2: 1 0

So an error follows its parameter to any bucket, run or copy of a state. What a compressor keeps of a whole
bucket has the keys of all the bucket's parameters, in their order, as its key, a tuple.
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.device import has_streams
from gradcomp.layout import FlatLayout

from ..comm.bucket import ShardBucket, memory_layout, real_shape
from ..comm.exchange import Works
from ..comm.process_group import Explaining
from ..comm.streams import side_stream
from .agreement import Place
from .compressor import BucketSpec, Compressor, State
from .parameter_keys import ParameterKeys, draw_of

_OF_AVERAGE = "average_("  # begins the names that average_ gives tensors with keys
# What is kept of one parameter, by name. "error" has the parameter's shape.
Entry = dict[str, torch.Tensor]
Entries = dict[str | tuple[str, ...], Entry]


@dataclass
class Bucket:
    """A bucket's parameters, and its compressor.

    index: the bucket's index.
    dtype: the buffer's.
    options: the compressor's.
    layout, keys, parameters: of each parameter.
    compressor: None before the first compressed step.
    device: the compressor's.
    made_for: what the state has made it for; empty without one.
    unit: the buffer's gradients have been multiplied by it; so have the compressor's and the pending errors,
        but not the errors of entries.
    pending: by position, errors that another compressor has left of tensors that this one sends exactly. Each
        is added to its tensor's next gradient, and so sent once: then None. That of an unused tensor waits.
    sent: the pending errors that are part of this step's average. On CUDA the side stream may read one until
        the step ends, so it is freed in the next step.
    undo: (the last step's number, functions that take it back when called in turn), if the state keeps these.
    operation: the hook's name, and what explains errors of its averages; None before the first.
    """

    index: int
    dtype: torch.dtype
    options: Any
    layout: FlatLayout
    keys: list[str]
    parameters: list[weakref.ref[torch.Tensor]]
    compressor: Compressor | None = None
    made_for: tuple[Any, ...] = ()
    device: torch.device | None = None
    is_warmed_up: bool = False
    unit: float = 1.0
    pending: dict[int, torch.Tensor | None] = field(default_factory=dict)
    sent: dict[int, torch.Tensor] = field(default_factory=dict)
    undo: tuple[int, list[Callable[[], None]]] | None = None
    operation: tuple[str, Explaining] | None = None

    @cached_property
    def draw(self) -> int:
        """A number that random choices for the bucket depend on: on its parameters, not their order."""
        return draw_of(self.keys)

    def spec(self, bucket: dist.GradBucket, place: Place, seed: int = 0) -> BucketSpec:
        """Return what a compressor of the bucket is made for."""
        return BucketSpec(
            self.layout.shapes,
            self.dtype,
            bucket.buffer().device,
            seed=seed,
            is_shard=isinstance(bucket, ShardBucket),
            draws=tuple(draw_of([key]) - self.draw for key in self.keys),
            world_size=place.size,
            ranks_per_node=place.ranks_per_node,
            place=place.place,
            has_delay=place.has_delay,
        )

    @property
    def waits(self) -> bool:
        """True if errors are pending, or were a step ago.

        Ranks may disagree. So a plain compressor issues the same all-reduce as the state.
        """
        return bool(self.sent) or any(error is not None for error in self.pending.values())

    # --- the compressor ---

    def stages(
        self, bucket: dist.GradBucket, group: dist.ProcessGroup, seed: int, undoable: int | None
    ) -> Works:
        """Reduce a bucket with the compressor. Yields each collective under way.

        undoable: the step's number, to keep what takes it back; None to keep nothing.
        """
        compressor, flat, unused = self.compressor, bucket.buffer(), []
        assert compressor is not None
        # torch's DDP calls a hook before it writes averages, so a parameter without a gradient was not used.
        # gradcomp's buckets don't tell: the Reducer calls take_back for each one that no rank has used.
        if isinstance(bucket, dist.GradBucket):
            unused = [i for i, parameter in enumerate(bucket.parameters()) if parameter.grad is None]
        # The step's undo, if its backward brings the bucket again.
        earlier = self.undo[1] if self.undo is not None and self.undo[0] == undoable else []
        self.undo = None
        if undoable is not None:
            before = partial(vars(self).update, pending=dict(self.pending), sent={})
            self.undo = undoable, [compressor.snapshot(), before, *earlier]
        if self.pending and self.waits:  # used tensors' errors are added to their gradients
            self.sent = {i: each for i, each in self.pending.items() if each is not None and i not in unused}
            self.pending |= dict.fromkeys(self.sent)
            parts = flat.split(self.layout.numels)
            for position, error in self.sent.items():
                parts[position].add_(error)
        out = bucket.shard if isinstance(bucket, ShardBucket) else flat
        yield from compressor.reduce(flat, out, group, seed, unused)

    def current_error(self) -> torch.Tensor | None:
        """Return this rank's error, [numel], for reading only; None on all ranks or on none."""
        assert self.compressor is not None
        error = self.compressor.current_error()
        return error if error is None or not self.waits else self.added(self.pending, error)

    def added(
        self, errors: Mapping[int, torch.Tensor | None], to: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a copy of an error, [numel], by default zeros, plus errors by position."""
        wide = torch.promote_types(self.dtype, torch.float32)
        whole = torch.zeros(self.layout.numel, dtype=wide, device=self.device) if to is None else to.clone()
        parts = whole.split(self.layout.numels)
        for position, each in errors.items():
            if each is not None:
                parts[position].add_(each)
        return whole

    def scale_errors(self, factor: float) -> None:
        """Multiply all errors by factor."""
        if self.compressor is None:
            return
        state = self.compressor.state()
        if "error" in state:
            self.compressor.load({**state, "error": state["error"] * factor})
        self.pending = {i: error if error is None else error * factor for i, error in self.pending.items()}
        if self.undo is not None:
            self.undo[1].append(partial(self.scale_errors, factor))

    def add_to_error(self, key: str, values: torch.Tensor) -> None:
        """Add an unused average, flat, to its parameter's error."""
        position = self.keys.index(key)
        if self.compressor is not None and position not in self.compressor.sent_exactly:
            self.compressor.add_to_error(self.layout.offsets[position], values)
        elif position in self.sent:
            self.pending[position] = values.clone()  # which has the error that was sent

    # --- entries ---

    def entries(self) -> Entries:
        """Return copies of what is kept of the parameters; empty without a compressor."""
        entries: Entries = {}
        state = {} if self.compressor is None else self.compressor.state()
        if self.pending:  # zeros where they have been sent: all ranks have entries of the same names
            state["error"] = self.added(self.pending, state.get("error"))
        for name, value in state.items():
            if name == "error":
                shaped = self.layout.parts(value if self.unit == 1 else value / self.unit)
            elif isinstance(value, list):
                shaped = value
            else:
                entries.setdefault(tuple(self.keys), {})[name] = value
                continue
            for key, each in zip(self.keys, shaped, strict=True):
                if each is not None:
                    entries.setdefault(key, {})[name] = each
        return entries

    def take_over(self, entries: Mapping[Any, Entry]) -> None:
        """Continue from entries of the bucket's parameters: the reverse of `entries`.

        Errors that are missing are zeros.
        """
        assert self.compressor is not None
        own = [entries.get(key, {}) for key in self.keys]
        state: State = {**entries.get(tuple(self.keys), {})}
        for name in dict.fromkeys(name for entry in own for name in entry):
            state[name] = [entry.get(name) for entry in own]
        if "error" in state:
            errors, state["error"] = state["error"], self.added({})
            for part, error in zip(self.layout.parts(state["error"]), errors, strict=True):
                if error is not None:
                    part.copy_(error)  # a loaded one may be on the CPU
            parts = state["error"].mul_(self.unit).split(self.layout.numels)
            for position in self.compressor.sent_exactly:
                self.pending[position] = parts[position].clone()
                parts[position].zero_()
        if state:
            self.compressor.load(state)


class ParameterStates:
    """The entries of all parameters of a state, and the compressors that have taken them over."""

    def __init__(self) -> None:
        self.keys = ParameterKeys()
        self.loaded: list[str] = []  # keys of loaded errors, until it is known whose they are
        self._num_known = 0
        self.lost_undo = -1  # the last step that can't be taken back in all buckets
        self.waiting: Entries = {}  # the entries that no compressor has taken over
        self._buckets: list[Bucket] = []
        # By index, which is a hint only: torch gives 0 to all buckets of a static graph's first step.
        self._of_step: dict[int, Bucket] = {}
        self._of_last_step: dict[int, Bucket] = {}

    # --- buckets ---

    def bucket_of(self, bucket: dist.GradBucket, options: Any) -> Bucket:
        """Return what is known of a bucket: as before, if its parameters and options are unchanged."""
        index, parameters, dtype = bucket.index(), bucket.parameters(), bucket.buffer().dtype
        # A real parameter has its gradient's shape. real_shape also handles complex ones, but takes longer.
        shapes = tuple([parameter.shape for parameter in parameters])
        found = self._of_last_step.get(index)
        if (
            found is None
            or (found.dtype, found.options) != (dtype, options)
            or len(found.parameters) != len(parameters)
            or not all(map(operator.is_, [ref() for ref in found.parameters], parameters))
            or (found.layout.shapes != shapes and found.layout.shapes != tuple(map(real_shape, parameters)))
        ):
            found = self._changed(index, parameters, dtype, options)
        self._of_step[index] = found
        unit = getattr(bucket, "unit", 1.0)  # which torch's buckets lack
        if found.unit != unit:
            found.scale_errors(unit / found.unit)
            found.unit = unit
        return found

    def _changed(
        self, index: int, parameters: Sequence[torch.Tensor], dtype: torch.dtype, options: Any
    ) -> Bucket:
        layout = memory_layout(parameters)
        keys = self.keys.keys_of(parameters, layout.shapes)
        new = Bucket(index, dtype, options, layout, keys, list(map(weakref.ref, parameters)))
        for each in self._buckets:
            of_each = each.keys, each.dtype, each.options, vars(each.layout)
            if of_each == (keys, dtype, options, vars(layout)):
                each.index, each.parameters, each.operation = index, new.parameters, None
                return each
        for each in self._buckets:
            if not set(keys).isdisjoint(each.keys):
                self._give_back(each)
                each.parameters = []  # no index leads to it any more
        self._buckets = [each for each in self._buckets if set(keys).isdisjoint(each.keys)]
        self._buckets.append(new)
        return new

    def make_compressor(self, bucket: Bucket, make: type[Compressor], spec: BucketSpec) -> list[str]:
        """Give a bucket another compressor, which takes over the entries.

        Returns the keys of parameters whose errors were lost, as their shapes differ.
        """
        self._give_back(bucket)
        bucket.compressor, bucket.device = _made(make, spec, bucket.options), spec.device
        own: list[str | tuple[str, ...]] = [*bucket.keys, tuple(bucket.keys)]
        taken: Entries = {key: self.waiting.pop(key) for key in own if key in self.waiting}
        lost = {
            key: taken.pop(key)["error"]
            for key, shape in zip(bucket.keys, bucket.layout.shapes, strict=True)
            if "error" in taken.get(key, {}) and taken[key]["error"].shape != shape
        }
        bucket.take_over(taken)
        return [key for key, error in lost.items() if _is_any(error)]

    @torch.inference_mode(False)
    def _give_back(self, bucket: Bucket) -> None:
        """Take over the entries of a bucket's parameters from its compressor, and drop the compressor."""
        for key, entry in bucket.entries().items():
            self.waiting.setdefault(key, {}).update(entry)
        bucket.compressor, bucket.made_for = None, ()
        bucket.pending, bucket.sent = {}, {}
        if bucket.undo is not None:
            self.lost_undo, bucket.undo = max(self.lost_undo, bucket.undo[0]), None

    def give_all_back(self) -> None:
        """Drop all compressors, because the group or the nodes have changed."""
        for bucket in self._buckets:
            self._give_back(bucket)

    def forget_directions(self) -> None:
        """Keep only the errors of the entries that wait."""
        errors = {key: entry["error"] for key, entry in self.waiting.items() if "error" in entry}
        self.waiting = {key: {"error": error} for key, error in errors.items()}

    def undo(self, step: int) -> None:
        """Take the buckets of this step and later ones back to the state before it."""
        for bucket in self._buckets:
            if bucket.undo is not None and bucket.undo[0] >= step:
                (_, functions), bucket.undo = bucket.undo, None
                if bucket.device is not None and has_streams(bucket.device):  # which may still run the step
                    torch.cuda.current_stream(bucket.device).wait_stream(side_stream(bucket.device))
                for function in functions:
                    function()

    def end_step(self) -> None:
        """Forget the buckets of deleted parameters that the step hasn't used."""
        self.keys.of_step.clear()
        self._of_last_step, self._of_step = self._of_step, {}
        of_step = set(map(id, self._of_last_step.values()))
        self._buckets = [
            each
            for each in self._buckets
            if id(each) in of_step or any(ref() is not None for ref in each.parameters)
        ]

    # --- entries ---

    def entries(self) -> Entries:
        """Return copies of all entries: those of buckets first, in the order of buckets."""
        copies: Entries = {}
        for bucket in sorted(self._buckets, key=lambda bucket: bucket.index):
            for key, entry in bucket.entries().items():
                copies.setdefault(key, {}).update(entry)
        for key, entry in self.waiting.items():
            copies.setdefault(key, {}).update({name: value.clone() for name, value in entry.items()})
        return copies

    def load(self, entries: Entries) -> None:
        """Replace all entries."""
        self.waiting, self._buckets, self._of_step, self._of_last_step = dict(entries), [], {}, {}
        errors = {str(key): entry["error"] for key, entry in entries.items() if "error" in entry}
        self.loaded = [key for key, error in errors.items() if _is_any(error)]
        self._num_known = len(self.keys.known())

    def unclaimed(self) -> list[str]:
        """After a step without a new parameter, return the keys of loaded errors that no parameter has.

        A parameter that has its name, but isn't used, loses nothing; nor do errors that are all zero.
        """
        known, before = self.keys.known(), self._num_known
        known.update(*(bucket.keys for bucket in self._buckets))  # their parameters may have been deleted
        self._num_known = len(known)
        if before != len(known):
            return []
        loaded, self.loaded = self.loaded, []
        # Other tensors of average_ may come in later calls.
        has_some = any(key.startswith(_OF_AVERAGE) for key in known.intersection(loaded))
        return [key for key in loaded if key not in known and not (has_some and key.startswith(_OF_AVERAGE))]

    def name(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give parameters their names as keys; see ParameterKeys.name."""
        for before, name in self.keys.name(named_parameters):
            for bucket in [each for each in self._buckets if before in each.keys]:
                self._give_back(bucket)
                self._buckets.remove(bucket)
                bucket.parameters = []
            if name in self.waiting:
                raise ValueError(
                    f"a bucket has brought {name} already, without its name, and the checkpoint has a memory "
                    "of that name: call number_parameters before the first step"
                )
            if before in self.waiting:
                self.waiting[name] = self.waiting.pop(before)

    def scale_errors(self, factor: float) -> None:
        """Multiply all errors by factor."""
        for bucket in self._buckets:
            bucket.scale_errors(factor)
        for entry in self.waiting.values():
            if "error" in entry:
                entry["error"] = entry["error"] * factor


def _is_any(error: torch.Tensor) -> bool:
    """Return whether any element isn't zero. Expanded errors are zeros; any() would copy them."""
    return (not error.dim() or any(error.stride())) and bool(error.any())


def _made(make: type[Compressor], bucket: BucketSpec, options: Any) -> Compressor:
    """Make a compressor. Raises TypeError if it lacks options, or counts no whole elements."""
    name = getattr(make, "__name__", type(make).__name__)
    try:
        made = make(bucket, options)
    except AttributeError as error:
        if options is None and "NoneType" in str(error):
            raise TypeError(f"{name} takes options, but CompressorState got none: {error}") from error
        raise
    if not isinstance(made.sent_numel, int):
        raise TypeError(
            f"{name}.sent_numel is {made.sent_numel!r}, but must be an int: the number of elements of an "
            "all-reduce that sends as many bytes"
        )
    return made
