"""All-reduce hooks that send gradients unchanged, or rounded to 16 bits.

Drop-in for ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks``: same names, signatures and
results. One difference: the 16-bit hooks round once, after dividing. torch's hooks round twice, before and
after dividing, and so overflow earlier.

The hooks also run in torch's python_reducer, which calls them while compiled autograd traces a backward. In
that case there is no bucket: torch's DDP passes (gradient, parameter) instead, and ignores the hook's result.
Inductor combines the collectives of several gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.comm.all_reduce import average_in_place
from gradcomp.comm.bucket import (
    Hook,
    Hooked,
    checked_bucket,
    refuse_result,
    require_bucket,
    require_dense_floats,
    require_hook,
    take_wire,
)
from gradcomp.comm.consistency import require_same_on_all_ranks
from gradcomp.comm.exchange import Works
from gradcomp.comm.pipeline import Pipeline, average_in_stages
from gradcomp.comm.process_group import Explaining, joined_group, kept_of, resolve_group
from gradcomp.comm.streams import Future
from gradcomp.comm.torch_private import all_reduce_traced
from gradcomp.device import has_streams

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]


def is_traced_gradient(bucket: Any) -> bool:
    """Return whether a hook is being traced with (gradient, parameter) instead of a bucket.

    Outside tracing a tuple doesn't count: a file read by torch.load may call hooks with tuples of its choice.
    """
    return isinstance(bucket, tuple) and torch.compiler.is_compiling()


def average_traced(bucket: Any, group: dist.ProcessGroup, dtype: torch.dtype | None) -> Any:
    """Average a traced hook's (gradient, parameter) in place, on the wire in the given or its own dtype."""
    gradient: torch.Tensor = bucket[0]
    wire = gradient * (1 / group.size())
    return gradient.copy_(all_reduce_traced(wire if dtype is None else wire.to(dtype), group))


def allreduce_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in its own dtype. DDP without a hook does so, too, up to rounding.

    1. Divide the bucket by the world size, in place.
    2. All-reduce the bucket (sum). On gloo, over links with a delay, in one exchange or two
       (comm/exchange.py), which takes fewer round trips than DDP's.

    On the wire: the bucket.
    State: the process group, or None for the default one.

    Raises TypeError if the argument is not a bucket, or the bucket is neither floating-point nor complex.
    """
    if is_traced_gradient(bucket):
        return average_traced(bucket, resolve_group("allreduce_hook", process_group, "state"), None)  # type: ignore[no-any-return]
    require_bucket("allreduce_hook", bucket)
    group = resolve_group("allreduce_hook", process_group, "state")
    buffer = bucket.buffer()
    if not (buffer.is_floating_point() or buffer.is_complex()):
        raise TypeError(f"allreduce_hook averages floating-point buckets, got {buffer.dtype}")
    return average_in_place(bucket, group, Explaining.averaging(bucket.index(), "allreduce_hook", group))


def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in float16.

    1. Divide the bucket by the world size and round it to float16, in one pass.
    2. All-reduce (sum), in float16. On gloo, over links with a delay, in one exchange or two, in float32.
    3. Write the result back to the bucket in the bucket's dtype, in one pass.

    Only the average must fit float16 (±65504), not the gradient before division.

    On the wire: 2 bytes per element.
    State: the process group, or None for the default one.

    Raises TypeError unless the bucket is floating-point; RuntimeError in a first eager step if hooks differ.

    Example::

        ddp_model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    """
    return _compress_hook("fp16_compress_hook", torch.float16, process_group, bucket)


def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in bfloat16: float32's range, 8 bits of precision.

    fp16_compress_hook lists the steps; here the 16-bit dtype is bfloat16. The hook works on every backend
    that all-reduces bfloat16, including NCCL and gloo.

    On the wire: 2 bytes per element.
    State: the process group, or None for the default one.

    Raises TypeError unless the bucket is floating-point; RuntimeError if the backend lacks bfloat16.
    """
    return _compress_hook("bf16_compress_hook", torch.bfloat16, process_group, bucket)


# Unless torch was built with NCCL, its DDP refuses a hook whose __name__ is bf16_compress_hook. Pickle finds
# the hook by __qualname__, which stays.
bf16_compress_hook.__name__ = "gradcomp_bf16_compress_hook"


def _compress_hook(
    name: str, dtype: torch.dtype, process_group: Any, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in a 16-bit dtype with the hook of this name."""
    if isinstance(bucket, tuple) and is_traced_gradient(bucket):
        return average_traced(bucket, resolve_group(name, process_group, "state"), dtype)
    buffer, group = checked_bucket(name, bucket, process_group)
    if name not in (kept := kept_of(group)):  # torch's DDP compares no hooks
        advice = "Give every rank the same hook"
        require_same_on_all_ranks("the 16-bit hook", {"name": name}, group, buffer.device, advice)
        kept[name] = True
    operation = Explaining.averaging(bucket.index(), name, group)
    return average_in_place(bucket, group, operation, wire_dtype=dtype)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook that runs the given hook on the bucket rounded to float16.

    1. Replace the bucket's buffer by a copy rounded to float16. The copy is undivided, because the given hook
       divides: the gradient itself must fit float16 (±65504).
    2. Run the given hook.
    3. Write its result to the original buffer, in the original dtype, and give the bucket that buffer back.

    On the wire: the bytes that the given hook sends for a float16 bucket.
    State: the given hook's state.
    ``fp16_compress_wrapper(allreduce_hook)`` is fp16_compress_hook.

    Raises TypeError if the given hook is not callable. In backward, the returned hook raises TypeError if the
    bucket is not a floating-point bucket.

    Example::

        state = PowerSGDState(process_group=None, matrix_approximation_rank=4)
        ddp_model.register_comm_hook(state, default_hooks.fp16_compress_wrapper(powerSGD_hook))
    """
    if hook is allreduce_hook:
        return fp16_compress_hook
    return _compress_wrapper("fp16_compress_wrapper", torch.float16, hook)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook that runs the given hook on the bucket rounded to bfloat16.

    fp16_compress_wrapper lists the steps and errors; here the 16-bit dtype is bfloat16, and
    ``bf16_compress_wrapper(allreduce_hook)`` is bf16_compress_hook.
    """
    if hook is allreduce_hook:
        return bf16_compress_hook
    return _compress_wrapper("bf16_compress_wrapper", torch.bfloat16, hook)


def _compress_wrapper(name: str, dtype: torch.dtype, hook: Hook) -> Hook:
    """Return the wrapper of this name: a hook that runs the given one on buckets in a 16-bit dtype."""
    require_hook(hook, whose=name)
    # Of its own: a stage that waits for a bucket of its own pipeline would wait without end.
    pipeline = Pipeline()

    def compress_wrapper_hook(hook_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        require_bucket(name, bucket)
        buffer = bucket.buffer()
        require_dense_floats(name, buffer)
        group = joined_group(Hooked(hook, hook_state).group)
        operation = Explaining.averaging(bucket.index(), full_name, group)
        keep: Callable[[], None]

        def start() -> Future:
            nonlocal keep
            wire, keep = take_wire(bucket, dtype)
            bucket.set_buffer(ops.cast(buffer, out=wire))
            try:
                future = hook(hook_state, bucket)
                if not isinstance(future, torch.Future):
                    refuse_result(future, hook)
                return future
            except BaseException:
                bucket.set_buffer(buffer)
                raise

        def finish(future: Future) -> torch.Tensor:
            with operation:
                result = future.value()
            bucket.set_buffer(buffer)
            ops.cast(result, out=buffer)
            keep()
            return buffer

        def stages() -> Works:
            future = start()
            yield future  # type: ignore[misc]  # it is waited for as a collective is
            # gloo's futures know no streams: their work is on the default stream.
            torch.cuda.current_stream(buffer.device).wait_stream(torch.cuda.default_stream(buffer.device))
            finish(future)

        if not has_streams(buffer.device):
            return start().then(finish)
        return average_in_stages(bucket, stages(), operation, pipeline)

    full_name = f"{name}({getattr(hook, '__qualname__', hook)})"
    compress_wrapper_hook.__qualname__ = full_name
    return compress_wrapper_hook
