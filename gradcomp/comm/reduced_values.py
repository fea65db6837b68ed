"""A few numbers, reduced over the ranks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.device import has_streams, pinned

from .process_group import Explaining


class ReducedValues:
    """Numbers reduced over the ranks, element by element, by a small all-reduce that begins now.

    what: the purpose, in words that follow "could not", for messages.
    values: as many on every rank; may be infinite.
    groups: the ranks. With several groups, such as a grid's rows and columns, one all-reduce follows another.
    device: a device whose tensors the groups' backends take.
    operation: the largest of the ranks' values, or their sum, for example.

    Every rank of the groups must make it in the same place among its collectives. On CUDA the host waits in
    `wait` only, which may be called steps later; on a CPU it also waits for all groups but the last.
    """

    def __init__(
        self,
        what: str,
        values: Sequence[float],
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        operation: Any = dist.ReduceOp.MAX,
    ):
        self._operation = Explaining.of(what, groups[0])
        self._passed: Any = None  # on CUDA, the event after the copy to the host
        on_device = host = torch.tensor(values, dtype=torch.float64, device="cpu")
        if has_streams(device):
            on_device = torch.empty_like(host, device=device)
            on_device.copy_(pinned(host, device), non_blocking=True)
        self._values = on_device
        self._work: Any = None
        with self._operation:
            for group in groups:
                if self._work is not None:
                    self._work.wait()
                self._work = dist.all_reduce(on_device, operation, group=group, async_op=True)
            if has_streams(device):
                self._work.wait()  # the stream waits
                self._values = pinned(torch.empty_like(host), device)
                self._values.copy_(on_device, non_blocking=True)
                self._passed = torch.cuda.current_stream(device).record_event()

    def wait(self) -> list[float]:
        """Return the reduced values."""
        with self._operation:
            if self._passed is None:
                self._work.wait()
            else:
                self._passed.synchronize()
        found: list[float] = self._values.tolist()  # on CUDA, of the copy in host memory, which is complete
        return found
