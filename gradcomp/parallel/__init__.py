"""DistributedDataParallel: torch's wrapper of that name, thin, on top of the Reducer."""

from .distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
