"""Scratch: device memory that plans on a device take in turns, each for the stages of one step."""

import threading
import weakref
from collections.abc import Sequence

import torch

LINE_BYTES = 256  # every part of a scratch begins on a multiple of it


class Scratch:
    """Device memory that keeps its contents from a plan's first stage in a step to the plan's last stage.

    memory: uint8, as many bytes as the largest user needs. When the scratch grows, `memory` becomes another
        tensor, and the old one is freed at once. A user that finds another tensor must take its parts again.
    is_taken: whether a plan is between its first and last stage.
    """

    def __init__(self, device: torch.device):
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.is_taken = False

    def reserve(self, num_bytes: int) -> None:
        """Grow to num_bytes if the scratch is smaller."""
        if self.memory.numel() < num_bytes:
            device = self.memory.device
            # Free it now: other plans' views would keep it alive.
            self.memory.untyped_storage().resize_(0)
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)


# Each device's scratches. The plans that have used a scratch keep it alive.
_scratches: dict[torch.device, weakref.WeakSet[Scratch]] = {}
_lock = threading.Lock()


def take_scratch(device: torch.device, last: Scratch | None) -> Scratch:
    """Return a scratch that no other plan has; a new one if all are taken.

    last: the scratch to prefer. A plan that gets its last one again needs no new views.

    There are as many scratches as plans that were under way at once. A scratch is used on the device's side
    stream, and by collectives that this stream waits for before the scratch is given back. So a plan that
    takes it later, from whatever thread, comes after all earlier work on it.
    """
    with _lock:
        scratches = _scratches.setdefault(device, weakref.WeakSet())
        found = next((each for each in (last, *scratches) if each is not None and not each.is_taken), None)
        if found is None:
            found = Scratch(device)
            scratches.add(found)
        found.is_taken = True
    return found


def parts_of_scratch(memory: torch.Tensor, parts: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Return views of a scratch's memory, one per part.

    parts: (number of elements, dtype) of each part.
    """
    views, start = [], 0
    for numel, dtype in parts:
        views.append(memory[start:][: numel * dtype.itemsize].view(dtype))
        start += num_bytes_of([(numel, dtype)])
    return views


def num_bytes_of(parts: Sequence[tuple[int, torch.dtype]]) -> int:
    """Return the bytes that parts of parts_of_scratch take, with padding."""
    return sum(-(-numel * dtype.itemsize // LINE_BYTES) * LINE_BYTES for numel, dtype in parts)
