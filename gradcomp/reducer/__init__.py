"""Gradient averaging without torch's DDP: buckets that fill during backward, averaged through any hook."""

# These functions keep the default process group that exists when they are first imported, as the constructor
# of an optimizer does. No group exists yet, so destroy_process_group() can end its group's threads later. A
# thread that is alive while Python shuts down may abort the process.
import torch.distributed.nn.functional  # noqa: F401

from gradcomp.comm.bucket import GradBucket

from .average import average_
from .broadcast import RepeatedBroadcast, broadcast_coalesced
from .core import Reducer

__all__ = ["GradBucket", "Reducer", "RepeatedBroadcast", "average_", "broadcast_coalesced"]
