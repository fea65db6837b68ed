"""Time PowerSGD's hook on the host per bucket, with CUDA stubbed: python -m benchmarks.host_time.

The real hook runs on a real bucket of torch's DDP: state, streams, plan, Triton's launcher. stub_cuda.py
stands in for CUDA. Prints p20, median and p80 of a call.
"""

# ruff: noqa: E402 the stub must be installed before gradcomp is imported
import argparse
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import stub_cuda

stub_cuda.install()

import torch
import triton

from benchmarks import environment, models
from benchmarks.clock import Timing
from gradcomp.hooks import powerSGD_hook as powersgd

WARM_UP_CALLS = 20


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


def measure(shapes: Sequence[models.Shape], rank: int, num_calls: int) -> Timing:
    """Time calls of the hook for one bucket, one by one."""
    bucket = ddp_bucket(shapes)
    state = powersgd.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    for _ in range(WARM_UP_CALLS):
        powersgd.powerSGD_hook(state, bucket)
    samples_us = []
    for _ in range(num_calls):
        start = time.perf_counter()
        powersgd.powerSGD_hook(state, bucket)
        samples_us.append((time.perf_counter() - start) * 1e6)
    return Timing(samples_us)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--calls", type=int, default=1000, help="calls per bucket")
    parser.add_argument("--models", nargs="*", default=list(models.MODELS), choices=models.MODELS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"commit {environment.commit()}, {versions}, rank {arguments.rank}; µs per bucket")
    print(f"{'bucket':32} {'p20':>7} {'median':>7} {'p80':>7}")
    for model in arguments.models:
        shapes = models.one_bucket(model)
        us = measure(shapes, arguments.rank, arguments.calls).us
        print(f"{model + f', {len(shapes)} parameters':32} {us.p20:7.1f} {us.p50:7.1f} {us.p80:7.1f}")


if __name__ == "__main__":
    main()
