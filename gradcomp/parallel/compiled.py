"""torch.compile: the wrapper itself is not compiled, and the module within it is, in graphs like buckets.

A compiled graph is one node of autograd, whose gradients all come when its backward ends. Within the forward
of torch's DistributedDataParallel torch.compile therefore cuts graphs where a bucket is full
(torch._dynamo.backends.distributed.DDPOptimizer). It finds that wrapper in a class attribute, and asks it for
the cap of a bucket alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Wrapper:
    """What torch.compile asks of the wrapper whose forward is running."""

    bucket_bytes_cap: int


def not_compiled(function: Function) -> Function:
    """Make torch.compile leave this function alone, but not the functions that it calls.

    This is torch.compiler.disable(recursive=False), which would take seconds to import what it needs. Where
    torch has other private names for it, that import is made.
    """
    try:
        action = eval_frame._FrameAction
        strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except AttributeError:
        disabled: Function = torch.compiler.disable(function, recursive=False)
        return disabled
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


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
