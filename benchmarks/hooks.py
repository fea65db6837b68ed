"""gradcomp's hooks without PowerSGD beside torch's, on one bucket, at world size 1.

There is one process, so nothing crosses a wire: the times are of a hook's own work on device and host. The
backend is NCCL on CUDA and gloo on CPU. A call ends when the current stream waits for the hook's future (on a
CPU, when the future is done).
"""

import atexit
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks

from benchmarks.harness import Case, Setup, elementwise_error, frobenius_error, rounding_error
from gradcomp.comm.bucket import GradBucket
from gradcomp.hooks import default_hooks
from gradcomp.hooks.quantization_hooks import (
    QuantizationState,
    quantization_hook,
    quantization_pertensor_hook,
)

# A 25 MiB bucket of a transformer with 1024 features.
SHAPES = [(1024, 1024)] * 6 + [(256, 1024)]
NUM_ELEMENTS = 25 * 2**20 // 4

Hook = Callable[[object, GradBucket], "torch.futures.Future[torch.Tensor]"]


class FakeBucket(GradBucket):
    """A bucket with random gradients of these shapes."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        device: torch.device,
        index: int = 0,
        is_last: bool = True,
        dtype: torch.dtype = torch.float32,
    ):
        parameters = [torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype)) for shape in shapes]
        buffer = torch.randn(sum(p.numel() for p in parameters), device=device, dtype=dtype)
        super().__init__(index, buffer, parameters, is_last)


# By case: the dtype on the wire, and the bytes per element that each of the hook's own passes moves.
DEFAULT_HOOKS: dict[str, tuple[torch.dtype, list[int]]] = {
    "allreduce_hook": (torch.float32, [4 + 4]),
    "fp16_compress_hook": (torch.float16, [4 + 2, 2 + 4]),
    "bf16_compress_hook": (torch.bfloat16, [4 + 2, 2 + 4]),
}
# The providers of the case quantization_hook: the hook, and what makes its state.
QUANTIZED: dict[str, tuple[Hook, Callable[[], Any]]] = {
    "int8": (quantization_hook, partial(QuantizationState, bits=8)),
    "int4": (quantization_hook, partial(QuantizationState, bits=4)),
    "pertensor": (quantization_pertensor_hook, lambda: None),
    "fp16": (default_hooks.fp16_compress_hook, lambda: None),
    "torch_fp16": (torch_hooks.fp16_compress_hook, lambda: None),
}
MAX_QUANTIZED_ERROR = 0.2  # of the norm of normal gradients: what two roundings to 4 bits leave


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    case = partial(Case, label="25 MiB bucket, W=1", dtype="float32")
    for name, (dtype, passes) in DEFAULT_HOOKS.items():
        hooks = {
            "gradcomp": (getattr(default_hooks, name), lambda: None),
            "torch": (getattr(torch_hooks, name), lambda: None),
        }
        yield case(
            name,
            num_bytes=NUM_ELEMENTS * sum(passes),
            min_launches=len(passes),
            max_error=rounding_error(dtype),
            baseline="torch",
            build=partial(_calling, hooks, device),
            error_of=partial(elementwise_error, dtype=dtype),
        )
    yield case(
        "quantization_hook",
        num_bytes=NUM_ELEMENTS * (4 + 4),
        max_error=MAX_QUANTIZED_ERROR,
        baseline="torch_fp16",
        build=partial(_calling, QUANTIZED, device),
        error_of=frobenius_error,
        num_elements=NUM_ELEMENTS,
    )


def _calling(hooks: Mapping[str, tuple[Hook, Callable[[], Any]]], device: torch.device) -> Setup:
    join_group_of_one(device)
    bucket = FakeBucket(SHAPES, device)
    buffer = bucket.buffer()
    gradient = buffer.clone()
    return Setup(
        {name: partial(call, hook, bucket, make_state()) for name, (hook, make_state) in hooks.items()},
        reference=lambda: [gradient.double()],
        restore=lambda _: buffer.copy_(gradient),
    )


def call(hook: Hook, bucket: GradBucket, state: object = None) -> list[torch.Tensor]:
    """Call the hook and let the current stream (on CPU: the caller) wait for its result."""
    return [hook(state, bucket).wait()]


def join_group_of_one(device: torch.device) -> None:
    """Join a process group of this process alone, unless it is in a group; leave it at exit."""
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_leave)


def _leave() -> None:
    gc.collect()  # frees models of torch's DDP, which would keep the group's threads alive
    if dist.is_initialized():
        dist.destroy_process_group()
