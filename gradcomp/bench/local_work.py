"""Time a hook's own work on buckets of given shapes, without collectives and without other ranks.

    python -m gradcomp.bench.local_work

prints the times per element on this machine's CPU. gradcomp.plan.CPU has its numbers from there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from gradcomp import ops
from gradcomp.layout import BlockLayout
from gradcomp.plan.candidates import CANDIDATES, Candidate
from gradcomp.plan.models import Shape, num_elements

from .group import synchronize

MIN_ROUNDS = 3
# Like a user's 25 MiB bucket: two transformer blocks of width 512.
TYPICAL = ([(1536, 512), (1536,), (512, 512), (512,), (2048, 512), (2048,), (512, 2048), (512,)] * 2)[::-1]
TYPICAL_WORLD_SIZE = 4

Work = Callable[[torch.Tensor], None]


def local_work(
    hook: Candidate, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device, world_size: int
) -> Work:
    """Return a function that does a hook's own work on a flat bucket, as one of world_size ranks."""
    if hook.rank is not None:
        return _powersgd(hook, shapes, dtype, device, world_size)
    if hook.bits is not None:
        layout = BlockLayout(shapes, 128, world_size)
        return partial(
            _average, ops.quantized_plan(layout, dtype, device, bits=hook.bits, error_feedback=True)
        )
    if hook.wire_dtype is None:
        return lambda flat: None
    wire = torch.empty(num_elements(shapes), dtype=hook.wire_dtype, device=device)

    def cast(flat: torch.Tensor) -> None:
        ops.compress_cast(flat, out=wire, scale=1 / world_size, overwrite=True)
        ops.decompress_cast(wire, out=flat)

    return cast


def _average(plan: ops.QuantizedPlan, flat: torch.Tensor) -> None:
    """Quantize, average and dequantize a bucket, without collectives."""
    if plan.payload.numel():
        plan.quantize(flat, 0)
        # Stands in for an all-to-all. Row 0, this rank's own, has no codes.
        plan.received.copy_(plan.payload[-1:].expand_as(plan.received))
        plan.average(0)
        plan.payload[0] = plan.mean  # stands in for an all-gather
        plan.dequantize(flat)


def _powersgd(
    hook: Candidate, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device, world_size: int
) -> Work:
    options = hook.powersgd_options
    plan = ops.powersgd_plan(
        options.layout(shapes, dtype),
        dtype,
        device,
        **options.arithmetic(world_size),
        wire_dtype=options.wire_dtype(dtype),
        seed=0,
    )
    between: list[ops.QuantizedPlan] = []
    if options.is_quantized:
        wide = torch.promote_types(dtype, torch.float32)
        between = [
            ops.quantized_plan(each, wide, device, **options.wire_plan(dtype))
            for each in options.wire_layouts(plan.wire_numels, world_size)
        ]

    def work(flat: torch.Tensor) -> None:
        plan.project(flat, 1.0)
        if between:
            _average(between[0], plan.p_wire)
        plan.back_project(flat, 1.0)
        if between:
            _average(between[1], plan.q_wire)
        plan.reconstruct(flat, 0)

    return work


@torch.no_grad()
def median_s(
    hook: Candidate,
    buckets: Sequence[Sequence[Shape]],
    dtype: torch.dtype,
    device: torch.device,
    world_size: int,
    limit_s: float,
) -> float:
    """Return the median time of a hook's own work on all buckets.

    buckets: the shapes of each bucket.
    limit_s: the time of all rounds; at least MIN_ROUNDS are timed.
    """
    works = [local_work(hook, shapes, dtype, device, world_size) for shapes in buckets]
    flats = [torch.randn(num_elements(shapes), device=device).to(dtype) for shapes in buckets]
    samples: list[float] = []
    deadline = time.perf_counter() + limit_s
    while len(samples) < MIN_ROUNDS + 1 or time.perf_counter() < deadline:
        current = [flat.clone() for flat in flats]
        synchronize(device)
        start = time.perf_counter()
        for work, flat in zip(works, current, strict=True):
            work(flat)
        synchronize(device)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[1:])  # the first round compiles, and fills caches


def main() -> None:
    """Print, for one thread, each hook's nanoseconds per element and the rate of matrix products."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    print(f"# one thread, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}")
    for hook in CANDIDATES.values():
        seconds = median_s(hook, [TYPICAL], torch.float32, device, TYPICAL_WORLD_SIZE, 2.0)
        print(f'"{hook.name}": {seconds / num_elements(TYPICAL) * 1e9:.2f},')
    matrix = torch.randn(1024, 1024)
    start = time.perf_counter()
    for _ in range(20):
        matrix @ matrix
    print(f"# {20 * 2 * 1024**3 / (time.perf_counter() - start) / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
