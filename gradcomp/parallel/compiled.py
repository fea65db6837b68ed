"""torch.compile: the wrapper itself is not compiled, and the module within it is, in graphs like buckets.

A compiled graph is one node of autograd, whose gradients all come when its backward ends. Within the forward
of torch's DistributedDataParallel torch.compile therefore cuts graphs where a bucket is full
(torch._dynamo.backends.distributed.DDPOptimizer). It finds that wrapper in a class attribute, and asks it for
the cap of a bucket alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel


@dataclass(frozen=True)
class Wrapper:
    """What torch.compile asks of the wrapper whose forward is running."""

    bucket_bytes_cap: int


@contextmanager
def graphs_end_with_buckets(cap_bytes: float) -> Iterator[None]:
    """Cut the graphs that are compiled inside where buckets of this cap are full."""
    # The first graph's cap is torch's for the first bucket, and may not be larger than the others'.
    wrapper = Wrapper(max(int(cap_bytes), dist._DEFAULT_FIRST_BUCKET_BYTES))
    holder: Any = TorchDistributedDataParallel
    before = getattr(holder, "_active_ddp_module", None)  # of a wrapper around this one
    holder._active_ddp_module = wrapper
    try:
        yield
    finally:
        holder._active_ddp_module = before
