"""A trace of the work that is enqueued on streams, on benchmarks.stub_cuda, and the mistakes in its order.

Every launch, tensor operation and collective has a stream and the memory that it accesses. Two accesses to
the same memory, one of them a write, must be ordered: by their stream, or by waits for events, collectives
and futures. Each stream has a clock: for every stream, the number of accesses that have ended before the
stream's next one (vector clocks: Fidge, and Mattern, 1988). A wait takes over the clock of the awaited.

Memory that is freed may be used again at once, on the stream that allocated it. So all accesses to it must be
ordered before that stream's next work. For Tensor.record_stream's streams the allocator waits.

Nothing is computed: kernels are neither compiled nor run here. All tensors that a kernel gets count as read
and written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import stub_cuda

Clock = dict[str, int]  # by stream
_CALLBACKS = itertools.count(100)  # streams of futures' callbacks


@dataclass(frozen=True)
class Access:
    """An access to the bytes [start, stop), the count-th one of a stream. name: for messages."""

    start: int
    stop: int
    is_write: bool
    stream: str
    count: int
    name: str

    def has_ended(self, clock: Clock) -> bool:
        return self.count <= clock.get(self.stream, 0)

    def conflicts_with(self, other: Access) -> bool:
        return self.start < other.stop and other.start < self.stop and (self.is_write or other.is_write)


@dataclass(frozen=True)
class Work:
    """One piece of work: its name, its stream, and the accesses that have ended before it."""

    name: str
    stream: str
    count: int
    before: Clock

    def is_after(self, other: Work) -> bool:
        return other.count <= self.before.get(other.stream, 0)


@dataclass
class Block:
    """A storage: the stream that allocated it, and the accesses to it.

    recorded: the streams of Tensor.record_stream.
    """

    storage: StorageWeakRef
    stream: str
    accesses: list[Access] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)


class Trace(TorchDispatchMode):
    """The work that is enqueued while the trace is entered.

    problems: mistakes, in words.
    works: everything that was enqueued, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.works: list[Work] = []
        self._clocks: dict[str, Clock] = {}
        self._blocks: dict[int, Block] = {}  # by the storage's address
        self._is_paused = False

    def current_stream(self) -> str:
        return f"stream {torch.cuda.current_stream().cuda_stream}"

    def clock(self, stream: str | None = None) -> Clock:
        """Return a stream's clock; by default the current stream's."""
        return self._clocks.setdefault(stream or self.current_stream(), {})

    def wait(self, clock: Clock, stream: str | None = None) -> None:
        """Make a stream wait; by default the current one."""
        merge(self.clock(stream), clock)

    def enqueue(
        self, name: str, tensors: Iterable[tuple[torch.Tensor, bool]], stream: str | None = None
    ) -> None:
        """Add work to a stream; by default to the current one.

        tensors: (tensor, whether the work writes to it).
        """
        self._free()
        stream = stream or self.current_stream()
        clock = self.clock(stream)
        count = clock[stream] = clock.get(stream, 0) + 1
        self.works.append(Work(name, stream, count, {**clock, stream: count - 1}))
        for tensor, is_write in tensors:
            if not tensor.numel():
                continue
            last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            access = Access(start, start + (last + 1) * tensor.itemsize, is_write, stream, count, name)
            accesses = self.block(tensor, stream).accesses
            self.problems += [
                f"{name} on {stream} isn't ordered after {other.name} on {other.stream}"
                for other in accesses
                if access.conflicts_with(other) and not other.has_ended(clock)
            ]
            accesses.append(access)

    def block(self, tensor: torch.Tensor, stream: str) -> Block:
        """Return a tensor's block. stream: allocates the block if it isn't known."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._blocks:
            self._blocks[address] = Block(StorageWeakRef(storage), stream)
        return self._blocks[address]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Trace nothing: what runs inside is one piece of work, or none."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def _free(self) -> None:
        """Forget the storages that are gone by now."""
        for address, block in list(self._blocks.items()):
            if block.storage.expired():
                clock = self.clock(block.stream).copy()
                for stream in block.recorded:
                    merge(clock, self.clock(stream))
                self.problems += [
                    f"memory of {block.stream} is freed before {each.name} on {each.stream} has ended"
                    for each in block.accesses
                    if not each.has_ended(clock)
                ]
                del self._blocks[address]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        arguments = func._schema.arguments
        aliases = [each.alias_info for each in arguments]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if self._is_paused or is_view or func.namespace != "aten":
            return out
        if "empty" in str(func):
            self._free()
            for tensor in tensors_in(out):
                self.block(tensor, self.current_stream())
            return out
        given = zip(args, aliases, strict=False)
        named = [(kwargs[each.name], each.alias_info) for each in arguments if each.name in kwargs]
        tensors = [
            (each, alias is not None) for value, alias in [*given, *named] for each in tensors_in(value)
        ]
        self.enqueue(str(func), [*tensors, *((each, True) for each in tensors_in(out))])
        return out


def merge(clock: Clock, other: Clock) -> None:
    """Add to a clock what another has counted."""
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_in(each)]
    return []


class TracedWork:
    """A collective on NCCL's stream. It keeps its tensors until it is waited for, as NCCL's does."""

    def __init__(self, trace: Trace, stream: str, tensors: Any):
        self._trace, self._clock, self._tensors = trace, trace.clock(stream).copy(), tensors
        self._stream = stream

    def wait(self, timeout: Any = None) -> bool:
        self._trace.wait(self._clock)
        self._tensors = None
        return True

    def get_future(self) -> Any:
        """Return a future like NCCL's: a callback runs on a stream of its own that waits for the collective.

        The future keeps the tensors, and the allocator waits for NCCL's stream and the callback's.
        """
        trace, clock, nccl = self._trace, self._clock, self._stream
        tensors: Any = tensors_in(self._tensors)

        class Future(torch.futures.Future):  # type: ignore[type-arg]
            def then(self, callback: Callable[[Any], Any]) -> Any:
                own = torch.cuda.Stream(stream_id=next(_CALLBACKS))
                for tensor in tensors:
                    tensor.record_stream(own)
                    trace.block(tensor, nccl).recorded.add(nccl)
                trace.wait(clock, f"stream {own.cuda_stream}")
                with torch.cuda.stream(own):
                    chained: Any = torch.futures.Future()
                    chained.set_result(callback(self))
                return chained

        future: Any = Future()
        future.set_result(tensors)
        future.clock = clock
        return future


def install(trace: Trace) -> None:
    """Trace streams, futures, kernels and collectives, in the whole process.

    stub_cuda.install() must have come before.
    """
    _trace_waits(trace)
    _trace_kernels(trace)
    _trace_collectives(trace)


def _trace_waits(trace: Trace) -> None:
    def record(event: Any, stream: Any = None) -> None:
        event.clock = trace.clock(stream and f"stream {stream.cuda_stream}").copy()

    def wait_for(event: Any, stream: Any = None) -> None:
        trace.wait(event.clock, stream and f"stream {stream.cuda_stream}")

    stub_cuda._Event.record, stub_cuda._Event.wait = record, wait_for  # type: ignore[method-assign]
    future: Any = torch.futures.Future
    set_result, wait = future.set_result, future.wait

    def traced_set_result(self: Any, result: Any) -> None:
        self.clock = trace.clock().copy()
        set_result(self, result)

    def traced_wait(self: Any) -> Any:
        value = wait(self)
        trace.wait(self.clock)
        return value

    future.set_result, future.wait = traced_set_result, traced_wait

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        trace.block(tensor, trace.current_stream()).recorded.add(f"stream {stream.cuda_stream}")

    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]


def _trace_kernels(trace: Trace) -> None:
    from gradcomp.kernels import flatten, launch

    def traced_run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if not (warmup or trace.is_paused):
            trace.enqueue(self.__name__, [(each, True) for each in tensors_in(args)])

    def traced_stage(self: Any, **values: Any) -> None:
        for each in self._launches:
            arguments = [values[a.name] if isinstance(a, launch.Slot) else a for a in each._arguments]
            trace.enqueue(each._kernel.__name__, [(tensor, True) for tensor in tensors_in(arguments)])

    triton.runtime.JITFunction.run = traced_run
    launch.Stage.__call__ = traced_stage  # type: ignore[method-assign]
    launch.Launch.compile = lambda self: False  # type: ignore[method-assign]

    copy = flatten.copy

    def traced_copy(
        tensors: Any, tables: Any, flat: Any, *, scale: float = 1.0, to_flat: bool = True
    ) -> None:
        """Trace a kernel that gets the tensors' addresses in a table."""
        name = "flatten" if to_flat else "unflatten"
        of_tensors = [(each, not to_flat) for each in tensors_in(tensors)]
        trace.enqueue(name, [*of_tensors, (flat, to_flat)])
        with trace.paused():
            copy(tensors, tables, flat, scale=scale, to_flat=to_flat)

    flatten.copy = traced_copy


def _trace_collectives(trace: Trace) -> None:
    from gradcomp.comm import exchange

    def on_nccls_stream(name: str, tensors: Any, group: Any) -> TracedWork:
        stream = f"NCCL's stream of group {id(group)}"
        trace.wait(trace.clock().copy(), stream)
        trace.enqueue(name, [(tensor, True) for tensor in tensors_in(tensors)], stream)
        return TracedWork(trace, stream, tensors)

    def of_one_rank(tensors: Any) -> list[Any]:
        """Cut the rows of several ranks to the stub's one."""
        least = min(each.numel() for each in tensors_in(tensors))
        return [each[:least] if isinstance(each, torch.Tensor) else each for each in tensors]

    def traced_collective(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*tensors: Any, group: Any = None, async_op: bool = False, **named: Any) -> Any:
            with trace.paused():
                function(*of_one_rank(tensors), group=group, **named)
            if async_op:
                return on_nccls_stream(name, tensors, group or dist.group.WORLD)
            # NCCL then works on the current stream.
            return trace.enqueue(name, [(tensor, True) for tensor in tensors_in(tensors)])

        return traced

    def traced_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def traced(group: Any, *tensors: Any) -> Any:
            work = method(group, *of_one_rank(tensors))
            return work if trace.is_paused else on_nccls_stream(name, tensors, group)

        return traced

    for name in ("all_reduce", "reduce_scatter_tensor", "broadcast"):
        setattr(dist, name, traced_collective(name, getattr(dist, name)))
    of_group = "allreduce", *exchange._OF_GROUP
    for name, method in zip(("all_reduce", "all_to_all_single", "all_gather"), of_group, strict=True):
        setattr(dist.ProcessGroup, method, traced_method(name, getattr(dist.ProcessGroup, method)))
