"""Time a hook's own work on buckets of given shapes, without collectives and without other ranks.

    python -m gradcomp.bench.local_work

prints the times per element on this machine's CPU. gradcomp.plan.CPU has its numbers from there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gradcomp import ops
from gradcomp.compress.compressor import BucketSpec
from gradcomp.compress.quantized import QuantizedOptions
from gradcomp.compress.quantized_all_reduce import Form, LayoutFor
from gradcomp.layout import BlockLayout
from gradcomp.plan.candidates import CANDIDATES, Candidate
from gradcomp.plan.models import Shape, num_elements

from .group import synchronize

MIN_ROUNDS = 3
# Like a user's 25 MiB bucket: two transformer blocks of width 512.
TYPICAL = ([(1536, 512), (1536,), (512, 512), (512,), (2048, 512), (2048,), (512, 2048), (512,)] * 2)[::-1]
TYPICAL_WORLD_SIZE = 4

Work = Callable[[torch.Tensor], None]


def local_work(hook: Candidate, spec: BucketSpec) -> Work:
    """Return a function that does a hook's own work on a flat bucket, as one of its ranks, without nodes."""
    if hook.rank is not None:
        return _powersgd(hook, spec)
    if hook.bits is not None:
        layout_for = partial(BlockLayout, spec.shapes, QuantizedOptions(hook.bits).block_size)
        return _average(layout_for, spec.dtype, spec, bits=hook.bits, error_feedback=True)
    if hook.wire_dtype is None:
        return lambda flat: None
    wire = torch.empty(sum(spec.numels), dtype=hook.wire_dtype, device=spec.device)

    def cast(flat: torch.Tensor) -> None:
        ops.compress_cast(flat, out=wire, scale=1 / spec.world_size, overwrite=True)
        ops.decompress_cast(wire, out=flat)

    return cast


def _average(layout_for: LayoutFor, dtype: torch.dtype, spec: BucketSpec, **options: Any) -> Work:
    """Return a function that quantizes, averages and dequantizes a buffer, without collectives."""
    exact_dtype = options.get("exact_dtype") or dtype
    form = Form.of(layout_for, spec, options["bits"], exact_dtype.itemsize)
    plan = ops.quantized_plan(form.layout, dtype, spec.device, **options, num_senders=form.num_senders)

    def average(flat: torch.Tensor) -> None:
        if not plan.payload.numel():
            return
        plan.quantize(flat, 0)
        # Stands in for an exchange. In two exchanges row 0, this rank's own, has no codes.
        plan.received.copy_(plan.payload[-1:].expand_as(plan.received))
        if form.num_senders:
            plan.sum(flat, 0)
            return
        plan.average(0)
        plan.payload[0] = plan.mean  # stands in for an all-gather
        plan.dequantize(flat)

    return average


def _powersgd(hook: Candidate, spec: BucketSpec) -> Work:
    options, dtype = hook.powersgd_options, spec.dtype
    plan = ops.powersgd_plan(
        options.layout(spec.shapes, dtype),
        dtype,
        spec.device,
        **options.arithmetic(spec.world_size),
        wire_dtype=options.wire_dtype(dtype),
        seed=0,
    )
    between: list[Work] = []
    if options.is_quantized:
        wide = torch.promote_types(dtype, torch.float32)
        between = [
            _average(layout_for, wide, spec, **options.wire_plan(dtype))
            for layout_for in options.wire_layouts(plan.wire_numels)
        ]

    def work(flat: torch.Tensor) -> None:
        plan.project(flat, 1.0)
        if between:
            between[0](plan.p_wire)
        plan.back_project(flat, 1.0)
        if between:
            between[1](plan.q_wire)
        plan.reconstruct(flat, 0)

    return work


@torch.no_grad()
def median_s(
    hook: Candidate,
    buckets: Sequence[Sequence[Shape]],
    dtype: torch.dtype,
    device: torch.device,
    world_size: int,
    has_delay: bool,
    limit_s: float,
) -> float:
    """Return the median time of a hook's own work on all buckets.

    buckets: the shapes of each bucket.
    has_delay: see BucketSpec.
    limit_s: the time of all rounds; at least MIN_ROUNDS are timed.
    """
    specs = [
        BucketSpec(tuple(shapes), dtype, device, world_size, 0, has_delay=has_delay) for shapes in buckets
    ]
    works = [local_work(hook, spec) for spec in specs]
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
        seconds = median_s(hook, [TYPICAL], torch.float32, device, TYPICAL_WORLD_SIZE, False, 2.0)
        print(f'"{hook.name}": {seconds / num_elements(TYPICAL) * 1e9:.2f},')
    matrix = torch.randn(1024, 1024)
    start = time.perf_counter()
    for _ in range(20):
        matrix @ matrix
    print(f"# {20 * 2 * 1024**3 / (time.perf_counter() - start) / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
