"""Gradient compression for data-parallel PyTorch."""

from . import hooks
from .parallel import DistributedDataParallel
from .reducer import Reducer, average_

__all__ = ["DistributedDataParallel", "Reducer", "average_", "hooks"]
