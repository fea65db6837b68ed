"""All-reduce hooks that send gradients as they are, or rounded to 16 bits.

Drop-in for ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks``: same names, signatures and
results (the 16-bit hooks round once, after dividing, where torch rounds twice and overflows first).

The hooks also run in torch's python_reducer, which calls them while compiled autograd traces a backward.
There is no bucket then: torch's DDP gives a hook (gradient, parameter), and does not look at the result.
Inductor combines the collectives of several gradients.
"""

from typing import Any

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.comm.bucket import (
    Hook,
    checked_bucket,
    checked_future,
    require_bucket,
    require_dense_floats,
)
from gradcomp.comm.kept_buffers import keep_wire, take_wire
from gradcomp.comm.process_group import Operation, joined_group, resolve_group
from gradcomp.comm.streams import all_reduce_compressed, average_in_place, run_hook_compressed

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]


def is_traced_gradient(bucket: Any) -> bool:
    """Return whether a hook is being traced with a gradient and its parameter in a bucket's place.

    Only then: a file that torch.load reads may call hooks with tuples of its choice.
    """
    return isinstance(bucket, tuple) and torch.compiler.is_compiling()


def average_traced(bucket: Any, group: dist.ProcessGroup, dtype: torch.dtype | None) -> Any:
    """Average the gradient in place, on the wire in this dtype or its own; of traceable operations alone."""
    # Imported late, as torch does: it takes long.
    from torch.distributed._functional_collectives import all_reduce

    gradient: torch.Tensor = bucket[0]
    wire = gradient * (1 / group.size())
    return gradient.copy_(all_reduce(wire if dtype is None else wire.to(dtype), "sum", group))


def allreduce_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in its own dtype: what DDP does without a hook.

    1. Divide the bucket by the world size, in place. 2. All-reduce it (sum).

    On the wire: the bucket. State: the process group, or None for the default one.

    Raises TypeError for anything but a bucket, and for one that is neither floating-point nor complex.

    Example::

        ddp_model.register_comm_hook(None, default_hooks.allreduce_hook)
    """
    if is_traced_gradient(bucket):
        return average_traced(bucket, resolve_group("allreduce_hook", process_group, "state"), None)  # type: ignore[no-any-return]
    require_bucket("allreduce_hook", bucket)
    group = resolve_group("allreduce_hook", process_group, "state")
    buffer = bucket.buffer()
    if not (buffer.is_floating_point() or buffer.is_complex()):
        raise TypeError(f"allreduce_hook averages floating-point buckets, got {buffer.dtype}")
    return average_in_place(buffer, group, Operation.averaging(bucket.index(), "allreduce_hook", group))


def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in float16.

    1. Divide by the world size and round to float16, in one pass. 2. All-reduce (sum), in float16.
    3. Write the result back to the bucket in its own dtype, in one pass.

    Only the average has to fit float16 (±65504), not the gradient before division. On the wire: 2 bytes
    per element. State: the process group, or None for the default one.

    Raises TypeError for anything but a bucket, and for one that is not floating-point.

    Example::

        ddp_model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    """
    return _compress_hook("fp16_compress_hook", torch.float16, process_group, bucket)


def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in bfloat16: float32's range, 8 bits of precision.

    The steps of fp16_compress_hook with bfloat16 in float16's place. Runs on every backend that
    all-reduces bfloat16: NCCL, and gloo too.

    Raises TypeError for anything but a bucket, and for one that is not floating-point, RuntimeError when the
    backend does not all-reduce bfloat16.

    Example::

        ddp_model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    """
    return _compress_hook("bf16_compress_hook", torch.bfloat16, process_group, bucket)


# torch's DDP refuses a hook of this very name unless it was built with NCCL. Pickle goes by __qualname__.
bf16_compress_hook.__name__ = "gradcomp_bf16_compress_hook"


def _compress_hook(
    name: str, dtype: torch.dtype, process_group: Any, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in this 16-bit dtype; name: the hook's name in messages."""
    if is_traced_gradient(bucket):
        return average_traced(bucket, resolve_group(name, process_group, "state"), dtype)  # type: ignore[no-any-return]
    buffer, group = checked_bucket(name, bucket, process_group)
    first = bucket.parameters()[0]

    def compress() -> torch.Tensor:
        wire = take_wire(bucket, name, dtype)
        return ops.compress_cast(buffer, out=wire, scale=1 / group.size(), overwrite=True)

    def decompress(wire: torch.Tensor) -> torch.Tensor:
        ops.decompress_cast(wire, out=buffer)
        keep_wire(first, name, wire)
        return buffer

    return all_reduce_compressed(
        buffer.device, group, Operation.averaging(bucket.index(), name, group), compress, decompress
    )


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Run a hook on the bucket rounded to float16; return its result in the bucket's own dtype.

    1. Round the bucket to float16 (undivided: the hook divides, so the gradient itself has to fit ±65504)
    and put it in the bucket's place. 2. Run the hook. 3. Write its result to the original buffer, which
    takes its place again.

    On the wire: what the hook sends for a float16 bucket. State: the hook's own.
    ``fp16_compress_wrapper(allreduce_hook)`` is fp16_compress_hook.

    Raises TypeError if the hook is not callable or, in backward, for anything but a floating-point
    bucket.

    Example::

        state = PowerSGDState(process_group=None, matrix_approximation_rank=4)
        ddp_model.register_comm_hook(state, default_hooks.fp16_compress_wrapper(powerSGD_hook))
    """
    if hook is allreduce_hook:
        return fp16_compress_hook
    return _compress_wrapper("fp16_compress_wrapper", torch.float16, hook)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Run a hook on the bucket rounded to bfloat16; return its result in the bucket's own dtype.

    The steps of fp16_compress_wrapper with bfloat16 in float16's place.

    Example::

        state = PowerSGDState(process_group=None, matrix_approximation_rank=4)
        ddp_model.register_comm_hook(state, default_hooks.bf16_compress_wrapper(powerSGD_hook))
    """
    if hook is allreduce_hook:
        return bf16_compress_hook
    return _compress_wrapper("bf16_compress_wrapper", torch.bfloat16, hook)


def _compress_wrapper(name: str, dtype: torch.dtype, hook: Hook) -> Hook:
    """Return the hook that runs another one on buckets in this 16-bit dtype."""
    if not callable(hook):
        raise TypeError(f"{name} wraps a communication hook, got {hook!r}")

    def compress_wrapper_hook(hook_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        require_bucket(name, bucket)
        buffer = bucket.buffer()
        require_dense_floats(name, buffer)
        first = bucket.parameters()[0]
        wire: torch.Tensor

        def start() -> torch.futures.Future[torch.Tensor]:
            nonlocal wire
            wire = take_wire(bucket, name, dtype)
            bucket.set_buffer(ops.compress_cast(buffer, out=wire))
            try:
                return checked_future(hook(hook_state, bucket), hook)
            except BaseException:
                bucket.set_buffer(buffer)
                raise

        def finish(result: torch.Tensor) -> torch.Tensor:
            bucket.set_buffer(buffer)
            ops.decompress_cast(result, out=buffer)
            keep_wire(first, name, wire)
            return buffer

        is_group = isinstance(hook_state, dist.ProcessGroup)
        group = joined_group(hook_state if is_group else getattr(hook_state, "process_group", None))
        operation = Operation.averaging(bucket.index(), full_name, group)
        return run_hook_compressed(buffer.device, operation, start, finish)

    full_name = f"{name}({getattr(hook, '__qualname__', hook)})"
    compress_wrapper_hook.__qualname__ = full_name
    return compress_wrapper_hook
