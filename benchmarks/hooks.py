"""gradcomp's default hooks beside torch's, at world size 1: on a bucket directly and, on CPU, in training.

There is one process, so nothing crosses a wire: the times are of a hook's own work on device and host. The
backend is NCCL on CUDA and gloo on CPU. A call ends when the current stream waits for the hook's future (on a
CPU, when the future is done).

In training a call is forward and backward of a small model under torch's DDP, also without a hook ("none").
On CPU a hook costs more there than its own time: see isolated.py.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Case, Setup, elementwise_error, frobenius_error, rounding_error
from gradcomp.comm.bucket import GradBucket
from gradcomp.hooks import default_hooks

# A 25 MiB bucket of a transformer with 1024 features.
SHAPES = [(1024, 1024)] * 6 + [(256, 1024)]

Hook = Callable[[object, GradBucket], "torch.futures.Future[torch.Tensor]"]


class FakeBucket(GradBucket):
    """A bucket with random gradients of these shapes."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], device: torch.device, index: int = 0, is_last: bool = True
    ):
        parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        buffer = torch.randn(sum(p.numel() for p in parameters), device=device)
        super().__init__(index, buffer, parameters, is_last)


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    # The name, the dtype on the wire, and the bytes per element that each of the hook's own passes moves.
    for name, dtype, passes in (
        ("allreduce_hook", torch.float32, [4 + 4]),
        ("fp16_compress_hook", torch.float16, [4 + 2, 2 + 4]),
        ("bf16_compress_hook", torch.bfloat16, [4 + 2, 2 + 4]),
    ):
        yield Case(
            name,
            label="25 MiB bucket, W=1",
            dtype="float32",
            num_bytes=25 * 2**20 // 4 * sum(passes),
            min_launches=len(passes),
            max_error=rounding_error(dtype),
            baseline="torch",
            build=partial(_calling, name, device),
            error_of=partial(elementwise_error, dtype=dtype),
            isolated=("gradcomp", "torch") if device.type == "cpu" else (),
            comes_first=True,
        )

    if device.type == "cpu":
        yield Case(
            "fp16_compress_hook in training",
            label="6 × (Linear 512, LayerNorm, GELU), batch 64, W=1",
            dtype="float32",
            num_bytes=6 * (512 * 512 + 3 * 512) * (4 + 4),
            max_error=rounding_error(torch.float16),
            baseline="torch",
            build=_training,
            error_of=frobenius_error,
            isolated=("gradcomp", "torch", "none"),
        )


def _calling(name: str, device: torch.device) -> Setup:
    join_group_of_one(device)
    bucket = FakeBucket(SHAPES, device)
    buffer = bucket.buffer()
    gradient = buffer.clone()
    return Setup(
        providers={
            "gradcomp": lambda: call(getattr(default_hooks, name), bucket),
            "torch": lambda: call(getattr(torch_hooks, name), bucket),
        },
        reference=lambda: [gradient.double()],
        restore=lambda: buffer.copy_(gradient),
    )


def _training() -> Setup:
    join_group_of_one(torch.device("cpu"))
    layers = [(torch.nn.Linear(512, 512), torch.nn.LayerNorm(512), torch.nn.GELU()) for _ in range(6)]
    model = torch.nn.Sequential(*(each for layer in layers for each in layer))
    data = torch.randn(64, 512)
    hooks = {
        "gradcomp": default_hooks.fp16_compress_hook,
        "torch": torch_hooks.fp16_compress_hook,
        "none": None,
    }

    def step(model: torch.nn.Module, data: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        model(data).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    def in_ddp(hook: Hook | None) -> Callable[[], list[torch.Tensor]]:
        # Buckets of two layers each.
        wrapped = DistributedDataParallel(deepcopy(model), bucket_cap_mb=2)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        return partial(step, wrapped, data)

    return Setup(
        providers={name: in_ddp(hook) for name, hook in hooks.items()},
        reference=lambda: step(deepcopy(model).double(), data.double()),
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
