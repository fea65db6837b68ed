"""A few numbers, reduced over the ranks: measurements, and the tokens or samples that averages count."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.device import has_streams, pinned

from ..rules import plain
from .process_group import Explaining, device_for, joined_group, require_group


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
        with self._operation:
            for group in groups[:-1]:
                dist.all_reduce(on_device, operation, group=group)
            self._work: Any = dist.all_reduce(on_device, operation, group=groups[-1], async_op=True)
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


def loss_factor(count: Any, process_group: dist.ProcessGroup | None = None) -> Any:
    """Return a factor for this rank's summed loss: averages are then gradients of the mean over all counts.

    count: the tokens, samples or weights that this rank's loss sums over in the coming step, in all its
        micro-batches; a number or a tensor of one element, 0 or more.
    process_group: the ranks that average gradients; None for the default group, or one rank if there is none.

    The factor is the number of ranks divided by the sum of all counts; 0 if all counts are 0. Multiply a loss
    that is a mean by this rank's count, too. Every rank of the group must call this once per step: it is an
    all-reduce of one element.

    Returns a float for a number. For a tensor it returns one on the tensor's device, float32 for an integer
    count, otherwise float64, and on CUDA the host doesn't wait.

    Raises ValueError on every rank unless each count is a finite number of 0 or more, and the counts' sum and
    the factor are finite in fp64. A CUDA tensor's value raises nothing, but makes every rank's factor NaN.

    Example::

        factor = gradcomp.loss_factor(num_tokens)
        (factor * cross_entropy(logits, labels, reduction="sum")).backward()
    """
    require_group("loss_factor", process_group)
    group, is_tensor = joined_group(process_group), isinstance(count, torch.Tensor)
    device = count.device if is_tensor else torch.device("cpu")
    on_host = not has_streams(device)
    on = device_for(group, ()) if group is not None and on_host else device
    value, is_number = plain(count), True
    try:
        if type(value) not in (int, float) and (
            not is_tensor or value.is_complex() or value.dtype == torch.bool
        ):
            raise TypeError
        total = torch.as_tensor(value, dtype=torch.float64, device=on).detach().reshape(())
    except (OverflowError, RuntimeError, TypeError, ValueError):
        # The other ranks wait for this one.
        is_number, total = False, torch.tensor(math.nan, dtype=torch.float64, device=on)
    total = total.where(total >= 0, math.nan)
    if group is not None:
        with Explaining.of("add up all ranks' counts with loss_factor", group):
            dist.all_reduce(total, group=group)
    factor = torch.where(total == 0, 0.0, (1 if group is None else group.size()) / total)
    factor = factor.where(factor.isfinite() & total.isfinite(), math.nan)
    if not is_number or (on_host and factor.isnan()):
        raise ValueError(
            "loss_factor takes a finite number of 0 or more on every rank, with a finite sum and a mean of at"
            f" least 6e-309; this rank's is {repr(count)[:100]}"
        )
    if not is_tensor:
        return factor.item()
    return factor.to(device, torch.float64 if count.is_floating_point() else torch.float32)
