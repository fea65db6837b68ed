"""Scratch: device memory that all of a thread's plans on a device share, one plan at a time."""

import threading
import weakref
from collections.abc import Sequence

import torch

LINE_BYTES = 256  # every part of a scratch begins on a multiple of it


class Scratch:
    """Device memory that keeps its contents from a plan's first stage in a step to the plan's last stage.

    memory: uint8, as many bytes as the largest user needs. When the scratch grows, `memory` becomes another
        tensor, and the old one is freed at once. A user that finds another tensor must take its parts again.
    """

    def __init__(self, device: torch.device):
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, num_bytes: int) -> None:
        """Grow to num_bytes if the scratch is smaller."""
        if self.memory.numel() < num_bytes:
            device = self.memory.device
            # Free it now: other plans' views would keep it alive.
            self.memory.untyped_storage().resize_(0)
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)


class _Scratches(threading.local):
    """A thread's scratch on each device. The plans that use a scratch keep it alive."""

    def __init__(self) -> None:
        self.by_device: weakref.WeakValueDictionary[torch.device, Scratch] = weakref.WeakValueDictionary()


_scratches = _Scratches()


def shared_scratch(device: torch.device) -> Scratch:
    """Return this thread's scratch on a device.

    Plans that share a scratch must use it on one stream. Between a plan's first and last stage in a step, no
    other plan may run a stage. The first use must be on that stream too, because it allocates the memory.
    """
    scratch = _scratches.by_device.get(device)
    if scratch is None:
        scratch = _scratches.by_device[device] = Scratch(device)
    return scratch


def parts_of_scratch(memory: torch.Tensor, parts: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Return views of a scratch's memory, one per part.

    parts: (number of elements, dtype) of each part.
    """
    views, start = [], 0
    for numel, dtype in parts:
        stop = start + numel * dtype.itemsize
        views.append(memory[start:stop].view(dtype))
        start = -(-stop // LINE_BYTES) * LINE_BYTES
    return views


def num_bytes_of(parts: Sequence[tuple[int, torch.dtype]]) -> int:
    """Return the bytes that parts take in a scratch, with padding.

    parts: (number of elements, dtype) of each part.
    """
    return sum(-(-numel * dtype.itemsize // LINE_BYTES) * LINE_BYTES for numel, dtype in parts)
