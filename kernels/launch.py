"""Launching on the device where the tensors are, from whatever thread."""

import threading
from contextlib import AbstractContextManager

import torch

_interpreter = threading.RLock()


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """A context for launches on a device: Triton launches on the current one.

    Its interpreter, which runs launches on a CPU, keeps its state in globals, while hooks run on several threads: there the
    context is entered by one thread at a time.
    """
    return torch.cuda.device(device) if device.type == "cuda" else _interpreter
