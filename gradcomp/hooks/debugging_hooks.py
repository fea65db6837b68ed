"""Hooks for measuring where time is spent; their gradients are not averages."""

from typing import Any

import torch
import torch.distributed as dist

from gradcomp.comm.bucket import require_bucket
from gradcomp.comm.streams import completed

__all__ = ["noop_hook"]


def noop_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the bucket as it is: no communication, so every rank keeps its own gradients.

    A step with this hook costs what a step would cost if communication were free: the most that any
    compression can save. Replicas drift apart; don't train with it.

    Raises TypeError for anything but a bucket.

    Example::

        ddp_model.register_comm_hook(None, debugging_hooks.noop_hook)
    """
    require_bucket("noop_hook", bucket)
    buffer = bucket.buffer()
    return completed(buffer.device, lambda: buffer)
