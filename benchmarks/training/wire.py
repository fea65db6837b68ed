"""What this rank hands to collectives: it is counted, and held back as a slow link would hold it.

    collective ──▶ its operator, here ──▶ held: bytes / bandwidth + delay ──▶ gloo, over the loopback

Every collective is an operator of torch's dispatcher, whether DDP's C++ reducer or a hook issues it; so are
messages from one rank to another. The process group stays gloo's, so hooks take the paths that they take on
gloo.
"""

import threading
import time
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RECEIVES = {"recv_", "recv_any_source_"}  # they send nothing


@dataclass
class Link:
    """The link on which a rank sends.

    delay_ms: one way.

    Bytes follow one another; delays overlap. Nothing arrives before what was sent before it: the ranks must
    begin their collectives in one order.
    """

    mbit_per_s: float
    delay_ms: float
    _sent_at: float = field(default=0.0, init=False)  # of what was sent last
    _arrives_at: float = field(default=0.0, init=False)

    def __str__(self) -> str:
        return f"{self.mbit_per_s:g} Mbit/s with {self.delay_ms:g} ms each way"

    def arrival(self, num_bytes: float, num_hops: int, now: float) -> float:
        """Return the time, in seconds, at which bytes sent now arrive, after this number of delays."""
        self._sent_at = max(self._sent_at, now) + num_bytes * 8 / (self.mbit_per_s * 1e6)
        self._arrives_at = max(self._arrives_at, self._sent_at + num_hops * self.delay_ms / 1e3)
        return self._arrives_at


class Wire(TorchDispatchMode):
    """A counter of the bytes that this rank hands to collectives inside a ``with`` block, and their link.

    link: None leaves the collectives as they are. Otherwise gloo gets each one when the link has carried its
        bytes, so it ends when the last rank's have arrived. The next collective and the block's end raise
        gloo's errors, because torch's wait for such a future raises none.

    A message and an all-to-all take one delay; others a ring's: 2 (W − 1) an all-reduce, W − 1 any other.
    Real ones of gloo take more: its sender waits until the receiver is ready. It sees what this thread calls,
    backward on a CPU too, and every operator takes some microseconds longer.
    """

    def __init__(self, link: Link | None = None):
        super().__init__()
        self._link = link
        self.num_bytes = Fraction(0)  # of all-reduces over all ranks that send as much
        self._held: SimpleQueue[Any] = SimpleQueue()
        self._error: RuntimeError | None = None

    def __enter__(self) -> "Wire":
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()
        super().__enter__()
        return self

    def __exit__(self, error: type[BaseException] | None, *details: object) -> None:
        super().__exit__(error, *details)
        self._held.put(None)
        if error is None:  # otherwise other ranks may never answer
            self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count what is sent, and let gloo send it, now or later."""
        name = func.__name__.split(".")[0]
        if func.namespace != "c10d" or name in RECEIVES:
            return func(*args, **(kwargs or {}))
        if self._error is not None:
            raise self._error
        tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
        num_bytes = sum(tensor.nbytes for tensor in tensors) * share_of_all_reduce(name)
        self.num_bytes += num_bytes
        link = self._link
        if link is None:
            return func(*args, **(kwargs or {}))
        size = dist.get_world_size()
        num_hops = {"allreduce_": 2 * (size - 1), "send": 1, "alltoall_base_": 1}.get(name, size - 1)
        arrival = link.arrival(float(num_bytes * 2 * (size - 1) / size), num_hops, time.monotonic())
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._held.put((arrival, partial(func, *args, **(kwargs or {})), future, args[0]))
        work = c10d._create_work_from_future(future).boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def _carry(self) -> None:
        """Hand each collective to gloo when it has arrived; a thread waits for its end."""
        waiting: list[threading.Thread] = []
        while (held := self._held.get()) is not None:
            arrival, begin, future, result = held
            time.sleep(max(0.0, arrival - time.monotonic()))
            try:
                begun = begin()
            except RuntimeError as error:
                self._error = error
                future.set_result(result)
                continue
            work = c10d.Work.unbox(begun[-1] if isinstance(begun, tuple) else begun)
            waiting = [thread for thread in waiting if thread.is_alive()]
            waiting.append(threading.Thread(target=self._end, args=(work, future, result), daemon=True))
            waiting[-1].start()
        for thread in waiting:
            thread.join()

    def _end(self, work: dist.Work, future: Any, result: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self._error = error
        future.set_result(result)


def is_simulated() -> bool:
    """Whether this thread is a rank of gradcomp.testing.run_ranks, whose collectives pass no dispatcher."""
    return hasattr(dist.group.WORLD, "simulation")


class SimulatedWire:
    """A counter of the bytes that this simulated rank hands to its world's collectives, in Wire's unit."""

    def __init__(self) -> None:
        group: Any = dist.group.WORLD
        issue, self.num_bytes = group._issue, 0.0
        shares = {"all_to_all_single": 1 / 2, "all_gather_into_tensor": group.size() / 2}

        def counted(name: str, *given: Any, **named: Any) -> Any:
            work = issue(name, *given, **named)
            self.num_bytes += work.sent_bytes * shares.get(name, 1.0)
            return work

        group._issue = counted

    def __enter__(self) -> "SimulatedWire":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def share_of_all_reduce(operator: str) -> Fraction:
    """Return the bytes that a rank sends per byte of a collective's tensors, divided by an all-reduce's."""
    if operator in ("alltoall_base_", "_allgather_base_", "alltoall_", "allgather_"):
        return Fraction(1, 2)
    if operator == "_reduce_scatter_base_":
        return Fraction(dist.get_world_size(), 2)  # of its output
    if operator == "send":
        return Fraction(dist.get_world_size(), 2 * (dist.get_world_size() - 1))
    return Fraction(1)
