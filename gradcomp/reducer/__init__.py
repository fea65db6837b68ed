"""Gradient averaging without torch's DDP: buckets that fill during backward, averaged through any hook."""

from .agreement import broadcast_coalesced
from .average import average_
from .bucket import GradBucket
from .core import Reducer

__all__ = ["GradBucket", "Reducer", "average_", "broadcast_coalesced"]
