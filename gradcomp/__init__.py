"""Gradient compression for data-parallel PyTorch."""

from importlib import metadata

from . import hooks
from .comm.reduced_values import loss_factor
from .hooks import apply_to_torch
from .parallel import DistributedDataParallel
from .reducer import Reducer, average_

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "__version__",
    "apply_to_torch",
    "average_",
    "hooks",
    "loss_factor",
]

try:
    __version__ = metadata.version("gradcomp")
except metadata.PackageNotFoundError:  # a checkout that isn't installed
    __version__ = "0+unknown"
