"""Check that no hook makes the host wait for the GPU, and that every hook keeps to stream order.

python -m benchmarks.stream_check runs on NCCL at world size 1, with one bucket per step and with three in
flight. Gradients arrive late: a sleeping kernel runs before the copy that writes a gradient, and until then
the bucket's buffer holds NaN. The hooks are called at once, one after another. They must

1. not synchronize in any way that torch.cuda.set_sync_debug_mode("error") sees;
2. return to the host while the first kernel still sleeps;
3. make the current stream wait for their results. Each result must be the bucket's gradient; with error
   feedback, the gradient plus the state's error before the step, minus the state's error after it.

The check must also catch a hook that does synchronize. On a CPU (--device cpu) no gradient is late, and only
the results are checked. Exit status: 0 if all is right, 2 without a GPU, 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.checked_hooks import HOOKS, HookCheck
from benchmarks.hooks import SHAPES, FakeBucket, Hook, join_group_of_one

SLEEP_CYCLES = 1_000_000_000  # about half a second; a step's hooks need a few milliseconds
SHORT_SLEEP_CYCLES = 20_000_000  # between two buckets, so that each is later than the bucket before it
# The first steps pass over steps without compression, compile, build what is kept per bucket, and fill the
# allocator's cache.
NUM_WARM_UP_STEPS = 5

Shapes = Sequence[tuple[int, ...]]
# By name, the shapes of each bucket of a step.
STEPS: dict[str, list[Shapes]] = {
    "one bucket": [SHAPES],
    "three buckets": [SHAPES[:3], [(1024, 512), (512,)], SHAPES[-2:]],
}
STEPS_ON_CPU: dict[str, list[Shapes]] = {
    "one bucket": [[(64, 48), (9,), (64, 48)]],
    "three buckets": [[(64, 48), (9,)], [(32, 64)], [(48, 40), (7,)]],
}


class _Late:
    """A bucket with a gradient that arrives late."""

    def __init__(self, bucket: FakeBucket):
        self.bucket, self.buffer = bucket, bucket.buffer()
        self.gradient, self.result = torch.randn_like(self.buffer), torch.empty_like(self.buffer)

    def forget(self) -> None:
        for tensor in (self.buffer, self.result):
            tensor.fill_(float("nan"))

    def arrive(self, sleep_cycles: int) -> Callable[[], bool]:
        """Enqueue the gradient behind a sleeping kernel. Returns a function: has the gradient arrived?

        On a CPU the gradient is there at once, and the function says no: nothing was waited for.
        """
        self.bucket.set_buffer(self.buffer)
        if self.buffer.device.type != "cuda":
            self.buffer.copy_(self.gradient)
            return lambda: False
        if sleep_cycles:
            torch.cuda._sleep(sleep_cycles)
        self.buffer.copy_(self.gradient)
        arrival = torch.cuda.Event()
        arrival.record()
        return arrival.query


def problem_of(
    hook: Hook, state: Any, max_error: float, device: torch.device, shapes: Sequence[Shapes]
) -> str | None:
    """Describe the first failure of a step's hooks; None if there is none.

    state: None, or a state with a state_dict() like PowerSGDState's.
    shapes: of each bucket of the step.
    """
    last = len(shapes) - 1
    buckets = [_Late(FakeBucket(each, device, i, is_last=i == last)) for i, each in enumerate(shapes)]
    for _ in range(NUM_WARM_UP_STEPS):
        _step(hook, state, buckets, is_late=False)
    errors_before = _errors_in(state, len(buckets))
    for bucket in buckets:
        bucket.forget()
    with _synchronizing_is_an_error(device):
        host_waited = _step(hook, state, buckets, is_late=True)
    if host_waited:
        return "the host was held until the gradient had arrived"
    errors_after = _errors_in(state, len(buckets))
    for index, (bucket, before, after) in enumerate(zip(buckets, errors_before, errors_after, strict=True)):
        expected = bucket.gradient.double() + before - after
        error = (bucket.result - expected).abs().max().item() / bucket.gradient.abs().max().item()
        if not error <= max_error:  # written so that NaN fails
            return (
                f"bucket {index} is off by {error:.3g}, allowed {max_error:.3g}: the hook does not keep to "
                "stream order"
            )
    return None


def _step(hook: Hook, state: Any, buckets: Sequence[_Late], is_late: bool) -> bool:
    """Call the hook for all buckets, and make the current stream wait for their results.

    Returns whether the first gradient had arrived when the host was done.
    """
    futures, arrivals = [], []
    for index, late in enumerate(buckets):
        arrivals.append(late.arrive(is_late * (SHORT_SLEEP_CYCLES if index else SLEEP_CYCLES)))
        futures.append(hook(state, late.bucket))
    for late, future in zip(buckets, futures, strict=True):
        late.result.copy_(future.wait())
    return arrivals[0]()


@contextmanager
def _synchronizing_is_an_error(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize(device)


def _errors_in(state: Any, num_buckets: int) -> list[torch.Tensor | float]:
    """Return the error that the state keeps for each bucket. Waits for the GPU."""
    if state is None:
        return [0.0] * num_buckets
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    kept = state.state_dict()["buckets"]
    return [kept[index]["error"].double() for index in range(num_buckets)]


def _synchronizing_hook(state: object, bucket: FakeBucket) -> torch.futures.Future[torch.Tensor]:
    torch.cuda.synchronize()
    device = bucket.buffer().device
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[device])
    future.set_result(bucket.buffer())
    return future


def _problem_with(hook_check: HookCheck, device: torch.device) -> str | None:
    """Describe the hook's first failure in any of the steps; None if there is none."""
    for name, shapes in (STEPS if device.type == "cuda" else STEPS_ON_CPU).items():
        try:
            hook = hook_check.make()
            assert hook is not None
            state = hook_check.make_state() if hook_check.make_state else None
            problem = problem_of(hook, state, hook_check.max_error, device, shapes)
        except Exception as error:  # one broken hook must not hide the problems of the others
            problem = f"raised {type(error).__name__}: {error}"
        if problem is not None:
            return f"{name}: {problem}"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stream_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = torch.device(parser.parse_args(argv).device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            print("stream_check: no CUDA GPU is available")
            return 2
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    join_group_of_one(device)
    failed = False
    for name, hook_check in HOOKS.items():
        problem = _problem_with(hook_check, device)
        print(f"{name:<24} {'FAILED: ' + problem if problem else 'ok'}", flush=True)
        failed |= problem is not None
    if device.type == "cuda" and _problem_with(HookCheck(lambda: _synchronizing_hook), device) is None:
        print("stream_check: FAILED to notice a hook that synchronizes: the check itself is broken")
        failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
