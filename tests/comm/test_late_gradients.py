"""Test hooks on gradients that arrive late: no hook makes the host wait, and all keep to stream order.

The group has one rank, on NCCL. A sleeping kernel runs before the copy that writes a gradient, and until then
the bucket's buffer holds NaN. On a CPU no gradient is late, and only the results are compared.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from benchmarks.hooks import SHAPES, FakeBucket, join_group_of_one
from tests.hooks.checked import HOOKS
from tests.kept import error_in

SLEEP_CYCLES = 1_000_000_000  # about half a second; a step's hooks need a few milliseconds
SHORT_SLEEP_CYCLES = 20_000_000  # between two buckets, so that each is later than the bucket before it
# The first steps pass over steps without compression, compile, build what is kept per bucket, and fill the
# allocator's cache.
NUM_WARM_UP_STEPS = 5
# The shapes of each bucket of a step: 25 MiB in all on a GPU.
STEPS_ON_CUDA = {"one bucket": [SHAPES], "three buckets": [SHAPES[:3], [(1024, 512), (512,)], SHAPES[-2:]]}
STEPS_ON_CPU = {
    "one bucket": [[(256, 192), (9,), (256, 192)]],
    "three buckets": [[(256, 192), (9,)], [(128, 256)], [(192, 160), (7,)]],
}


@pytest.fixture(scope="module", autouse=True)
def group(device: torch.device) -> Iterator[None]:
    join_group_of_one(device)
    yield
    dist.destroy_process_group()


class Late(FakeBucket):
    """A bucket with a gradient that arrives late."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.memory = self.buffer()
        self.gradient, self.result = torch.randn_like(self.memory), torch.empty_like(self.memory)

    def arrive(self, sleep_cycles):
        """Enqueue the gradient behind a sleeping kernel. Returns a function: has the gradient arrived?"""
        self.set_buffer(self.memory)
        if self.memory.device.type == "cpu":
            self.memory.copy_(self.gradient)
            return lambda: False
        torch.cuda._sleep(sleep_cycles)
        self.memory.copy_(self.gradient)
        arrival = torch.cuda.Event()
        arrival.record()
        return arrival.query


def take_step(hook, state, buckets, sleep_cycles=(0, 0)):
    """Call the hook for all buckets, and make the current stream wait for their results.

    Returns whether the first gradient had arrived when the host was done.
    """
    futures, arrivals = [], []
    for bucket in buckets:
        arrivals.append(bucket.arrive(sleep_cycles[bucket.index() > 0]))
        futures.append(hook(state, bucket))
    for bucket, future in zip(buckets, futures, strict=True):
        bucket.result.copy_(future.wait())
    return arrivals[0]()


@contextmanager
def synchronizing_is_an_error(device):
    if device.type == "cpu":
        yield
        return
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def errors_in(state, buckets):
    if state is None:
        return [torch.zeros_like(bucket.gradient) for bucket in buckets]
    if buckets[0].gradient.is_cuda:
        torch.cuda.synchronize()
    parts = error_in(state).split([bucket.gradient.numel() for bucket in buckets])
    return [part.to(bucket.gradient.device) for part, bucket in zip(parts, buckets, strict=True)]


@pytest.mark.parametrize("step", STEPS_ON_CPU)
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.usefixtures("plain_torch")
def test_late_gradients(name, step, device):
    """A result is the gradient; with error feedback, plus the error before, minus the error after."""
    check, shapes = HOOKS[name], (STEPS_ON_CPU if device.type == "cpu" else STEPS_ON_CUDA)[step]
    hook, state = check.make(), check.make_state and check.make_state()
    buckets = [Late(each, device, i, i == len(shapes) - 1) for i, each in enumerate(shapes)]
    for _ in range(NUM_WARM_UP_STEPS):
        take_step(hook, state, buckets)
    before = errors_in(state, buckets)
    for bucket in buckets:
        for tensor in (bucket.memory, bucket.result):
            tensor.fill_(torch.nan)
    with synchronizing_is_an_error(device):
        assert not take_step(hook, state, buckets, (SLEEP_CYCLES, SHORT_SLEEP_CYCLES)), "the host was held"
    for bucket, old, new in zip(buckets, before, errors_in(state, buckets), strict=True):
        off = (bucket.result.double() + new - bucket.gradient - old).abs().max()
        assert off <= check.max_error * bucket.gradient.abs().max(), f"bucket {bucket.index()}"
    assert state is None or state.compression_stats()[0] > 1, "nothing was compressed"


def test_waiting_for_the_gradient_is_seen(device):
    """What the test above relies on. On a CPU nothing is late."""
    late = Late(STEPS_ON_CPU["one bucket"][0], device, 0, True)
    late.arrive(0)
    waited = False
    with synchronizing_is_an_error(device):
        try:
            late.buffer().sum().item()
        except RuntimeError:
            waited = True
    assert waited == (device.type == "cuda")
