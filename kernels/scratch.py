"""Memory that all of a thread's plans on a device use, one after another."""

import threading
import weakref
from collections.abc import Sequence

import torch

LINE_BYTES = 256  # parts begin on multiples of it


class Scratch:
    """Device memory whose contents last from a plan's first stage in a step to its last.

    It is as large as the largest of its users needs. When it grows, `memory` becomes another tensor, by which
    its users see that they have to take their parts anew; the old memory is freed at once.
    """

    def __init__(self, device: torch.device):
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, num_bytes: int) -> None:
        """Grow to so many bytes if there are fewer."""
        if self.memory.numel() < num_bytes:
            device = self.memory.device
            # Other plans' views would keep it.
            self.memory.untyped_storage().resize_(0)
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)


class _Scratches(threading.local):
    """A thread's scratches, each kept by the plans that use it."""

    def __init__(self) -> None:
        self.by_device: weakref.WeakValueDictionary[torch.device, Scratch] = weakref.WeakValueDictionary()


_scratches = _Scratches()


def shared_scratch(device: torch.device) -> Scratch:
    """Return this thread's scratch on a device.

    No stage of another plan may come between a plan's first and last in a step, all on one stream. The first
    use has to be on that stream, from whose memory it is allocated.
    """
    scratch = _scratches.by_device.get(device)
    if scratch is None:
        scratch = _scratches.by_device[device] = Scratch(device)
    return scratch


def parts_of_scratch(memory: torch.Tensor, parts: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Return the parts, each of so many elements of a dtype, as views of a scratch's memory."""
    views, start = [], 0
    for numel, dtype in parts:
        stop = start + numel * dtype.itemsize
        views.append(memory[start:stop].view(dtype))
        start = -(-stop // LINE_BYTES) * LINE_BYTES
    return views


def num_bytes_of(parts: Sequence[tuple[int, torch.dtype]]) -> int:
    """Return the bytes that these parts take in a scratch."""
    return sum(-(-numel * dtype.itemsize // LINE_BYTES) * LINE_BYTES for numel, dtype in parts)
