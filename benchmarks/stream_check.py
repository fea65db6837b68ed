"""Check that no hook makes the host wait for the GPU, and that every hook keeps to stream order.

python -m benchmarks.stream_check runs on NCCL at world size 1. A bucket's gradient arrives late: a sleeping
kernel runs before the copy that writes it, and until then the buffer holds NaN. The hook is called at once.
It must

1. not synchronize in any way that torch.cuda.set_sync_debug_mode("error") sees;
2. return to the host while the kernel still sleeps;
3. make the current stream wait for its result. The result must be the gradient; with error feedback, the
   gradient plus the state's error before the call, minus the state's error after it.

The check must also catch a hook that does synchronize. Exit status: 0 if all is right, 2
without a GPU, 1 otherwise.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks.checked_hooks import HOOKS
from benchmarks.hooks import SHAPES, FakeBucket, Hook, call, join_group_of_one

SLEEP_CYCLES = 1_000_000_000  # about half a second; a hook needs a few milliseconds
# The first calls pass over steps without compression, compile, build what is kept per bucket, and fill the
# allocator's cache.
NUM_WARM_UP_CALLS = 5


def problem_of(hook: Hook, state: Any, max_error: float, device: torch.device) -> str | None:
    """Describe the hook's first failure; None if there is none.

    state: None, or a state with a state_dict() like PowerSGDState's.
    """
    bucket = FakeBucket(SHAPES, device)
    buffer = bucket.buffer()
    gradient = torch.randn_like(buffer)
    result = torch.empty_like(buffer)
    for _ in range(NUM_WARM_UP_CALLS):
        bucket.set_buffer(buffer.copy_(gradient))
        result.copy_(call(hook, bucket, state)[0])
    error_before = _error_in(state)
    bucket.set_buffer(buffer.fill_(float("nan")))
    result.fill_(float("nan"))
    arrival = torch.cuda.Event()
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SLEEP_CYCLES)
        buffer.copy_(gradient)
        arrival.record()
        result.copy_(call(hook, bucket, state)[0])
        host_waited = arrival.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize(device)
    if host_waited:
        return "the host was held until the gradient had arrived"
    expected = gradient.double() + error_before - _error_in(state)
    error = (result - expected).abs().max().item() / gradient.abs().max().item()
    if not error <= max_error:  # written so that NaN fails
        return f"off by {error:.3g}, allowed {max_error:.3g}: it does not keep to stream order"
    return None


def _error_in(state: Any) -> torch.Tensor | float:
    """Return the error that the state keeps for the only bucket."""
    if state is None:
        return 0.0
    torch.cuda.synchronize()
    return state.state_dict()["buckets"][0]["error"].double()


def _synchronizing_hook(state: object, bucket: FakeBucket) -> torch.futures.Future[torch.Tensor]:
    torch.cuda.synchronize()
    device = bucket.buffer().device
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[device])
    future.set_result(bucket.buffer())
    return future


def main() -> int:
    if not torch.cuda.is_available():
        print("stream_check: no CUDA GPU is available")
        return 2
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    join_group_of_one(device)
    failed = False
    for name, hook_check in HOOKS.items():
        try:
            state = hook_check.make_state() if hook_check.make_state else None
            problem = problem_of(hook_check.make(), state, hook_check.max_error, device)
        except Exception as error:  # one broken hook must not hide the problems of the others
            problem = f"raised {type(error).__name__}: {error}"
        print(f"{name:<24} {'FAILED: ' + problem if problem else 'ok'}", flush=True)
        failed |= problem is not None
    if problem_of(_synchronizing_hook, None, 0.0, device) is None:
        print("stream_check: FAILED to notice a hook that synchronizes: the check itself is broken")
        failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
