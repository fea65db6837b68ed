"""The largest of all ranks' values."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradcomp import ops

from .process_group import Operation


class MaximumOfRanks:
    """The largest of all ranks' values, element by element, by one small all-reduce that begins now.

    what: the purpose, in words that follow "could not", for messages.
    values: as many on every rank; may be infinite.
    device: a device whose tensors the group's backend takes.

    Every rank of the group must make it in the same place among its collectives. The host waits in `wait`
    only, which may be called steps later.
    """

    def __init__(self, what: str, values: Sequence[float], group: dist.ProcessGroup, device: torch.device):
        self._operation = Operation.of(what, group)
        self._values = torch.tensor(values, dtype=torch.float64)
        self._passed: Any = None  # on CUDA, the event after the copy to the host
        on_device = ops.send(self._values, device)
        with self._operation:
            self._work = dist.all_reduce(on_device, dist.ReduceOp.MAX, group=group, async_op=True)
            if ops.has_streams(device):
                self._work.wait()  # the stream waits
                self._values = torch.empty_like(self._values, pin_memory=True)
                self._values.copy_(on_device, non_blocking=True)
                self._passed = torch.cuda.Event()
                self._passed.record(torch.cuda.current_stream(device))
            else:
                self._values = on_device

    def wait(self) -> list[float]:
        """Return the largest values."""
        with self._operation:
            if self._passed is None:
                self._work.wait()
            else:
                self._passed.synchronize()
        found: list[float] = self._values.tolist()
        return found
