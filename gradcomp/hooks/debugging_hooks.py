"""Hooks for measuring where time is spent. They don't average gradients."""

from typing import Any

import torch
import torch.distributed as dist

from gradcomp.comm.bucket import require_bucket
from gradcomp.comm.streams import completed

__all__ = ["noop_hook"]


def noop_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the bucket unchanged: no communication, so every rank keeps its own gradients.

    A step with this hook takes the time of a step with free communication. No compression can save more.
    Don't train with this hook: replicas drift apart.

    Raises TypeError if the argument is not a bucket.
    """
    require_bucket("noop_hook", bucket)
    buffer = bucket.buffer()
    return completed(buffer.device, buffer)
