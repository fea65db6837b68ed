"""Gradient averaging without torch's DDP: buckets that fill during backward, averaged through any hook."""

# Its functions keep the default process group that there is when they are first imported, which constructing
# an
# optimizer does. There is none yet: so destroy_process_group() can end the group's threads. One that is alive
# while Python shuts down may abort the process.
import torch.distributed.nn.functional  # noqa: F401

from gradcomp.compress.grad_bucket import GradBucket

from .average import average_
from .broadcast import RepeatedBroadcast, broadcast_coalesced
from .core import Reducer

__all__ = ["GradBucket", "Reducer", "RepeatedBroadcast", "average_", "broadcast_coalesced"]
