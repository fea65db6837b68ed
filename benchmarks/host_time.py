"""Time PowerSGD's hook on the host per bucket, with CUDA stubbed: python -m benchmarks.host_time.

The real hook runs on a real bucket of torch's DDP: state, streams, plan, Triton's launcher. stub_cuda.py
stands in for CUDA. Prints median, p20 and p80 of the whole hook. Further calls time each part; there the
clocks around the parts add some 0.5 µs each.
"""

# ruff: noqa: E402 the stub must be installed before gradcomp is imported
from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks import stub_cuda

stub_cuda.install()

import torch
import torch.distributed as dist
import triton

from benchmarks import environment, models
from gradcomp.comm import pipeline
from gradcomp.compress import state
from gradcomp.hooks import powerSGD_hook as powersgd
from gradcomp.kernels.powersgd.plan import PowerSGDPlan

WARM_UP_CALLS = 20


class Parts:
    """Clocks around functions. Time in an inner function with a clock counts for the inner function only."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = defaultdict(list)
        self._now: dict[str, float] = defaultdict(float)
        self._inner = [0.0]
        self._replaced: list[tuple[Any, str, Any]] = []

    def clock(self, part: str, owner: Any, name: str) -> None:
        """Put a clock around a function or method."""
        function = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                elapsed = time.perf_counter() - start
                self._now[part] += elapsed - self._inner.pop()
                self._inner[-1] += elapsed

        self._replaced.append((owner, name, function))
        setattr(owner, name, timed)

    def end_of_call(self) -> None:
        """Note each part's time since the last end_of_call."""
        for part, seconds in self._now.items():
            self.samples[part].append(seconds * 1e6)
        self._now.clear()

    def remove(self) -> None:
        """Take the clocks away."""
        for owner, name, function in reversed(self._replaced):
            setattr(owner, name, function)


def ddp_bucket(shapes: Sequence[models.Shape]) -> Any:
    """Return the bucket that torch's DDP gives to a hook for parameters of these shapes."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    module = torch.nn.Module()
    for index, parameter in enumerate(reversed(parameters)):
        module.register_parameter(f"p{index}", parameter)
    module.forward = lambda: sum(parameter.sum() for parameter in parameters)
    ddp = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=10_000)
    found: list[Any] = []

    def keep(_, bucket):  # DDP compares annotations with types
        found.append(bucket)
        future = torch._C.Future([])
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, keep)
    for _ in range(2):  # DDP has its buckets from the second step on
        ddp().backward()
    bucket = found[-1]
    if len(bucket.parameters()) != len(shapes):
        raise RuntimeError(f"DDP made a bucket of {len(bucket.parameters())} parameters, not {len(shapes)}")
    return bucket


@contextmanager
def clocked() -> Iterator[Parts]:
    """Put clocks around the parts of a hook's call while the context lasts."""
    parts = Parts()
    for stage in ("project", "back_project", "reconstruct"):
        parts.clock("launches", PowerSGDPlan, stage)
    parts.clock("all_reduce", dist, "all_reduce")
    parts.clock("Future", torch.futures.Future, "__init__")
    parts.clock("Future", torch.futures.Future, "set_result")
    parts.clock("streams", pipeline, "on_side_stream")
    parts.clock("streams", pipeline, "wait_for_current_stream")
    parts.clock("pipeline", pipeline.Pipeline, "add")
    parts.clock("state", state.CompressorState, "average")
    parts.clock("state", powersgd, "powerSGD_hook")
    # The stages that the pipeline runs are the state's and the compressor's.
    parts.clock("state", pipeline, "_advanced")
    try:
        yield parts
    finally:
        parts.remove()


def samples_us(call: Callable[[], object], num_calls: int) -> list[float]:
    """Time calls one by one."""
    found = []
    for _ in range(num_calls):
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e6)
    return found


def measure(shapes: Sequence[models.Shape], rank: int, num_calls: int) -> dict[str, list[float]]:
    """Return the times of the whole hook and of its parts for one bucket, in µs."""
    bucket = ddp_bucket(shapes)
    own = powersgd.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)

    def call() -> None:
        powersgd.powerSGD_hook(own, bucket)

    samples_us(call, WARM_UP_CALLS)
    times = {"hook": samples_us(call, num_calls)}
    with clocked() as parts:
        for _ in range(num_calls):
            call()
            parts.end_of_call()
    return {**times, **parts.samples}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--calls", type=int, default=1000, help="calls per bucket and measurement")
    parser.add_argument("--models", nargs="*", default=list(models.MODELS), choices=models.MODELS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"commit {environment.commit()}, {versions}, rank {arguments.rank}; µs per bucket")
    print(f"{'bucket':32} {'part':12} {'p20':>7} {'median':>7} {'p80':>7}")
    for model in arguments.models:
        shapes = models.one_bucket(model)
        label = f"{model}, {len(shapes)} parameters"
        for part, samples in measure(shapes, arguments.rank, arguments.calls).items():
            p20, _, _, p80 = statistics.quantiles(samples, n=5, method="inclusive")
            print(f"{label:32} {part:12} {p20:7.1f} {statistics.median(samples):7.1f} {p80:7.1f}")
            label = ""


if __name__ == "__main__":
    main()
