"""Test that a block's last program adds up partial sums that are all there, launch after launch.

Without error feedback, P and Q on the wires are functions of the bucket alone. project and back_project are
launched again and again, on two buckets in turn, so that a stale partial sum is another number, while other
streams keep multiprocessors and memory busy. An access in the wrong order is rarely seen: the longer the test
runs, the more it says. On a GPU, the environment variable GRADCOMP_ARRIVAL_SECONDS prolongs it, as gpu-check
does.
"""

import os
import time
from collections.abc import Iterator

import torch

from gradcomp.kernels.powersgd import work as powersgd_work
from tests.hooks.powersgd_oracle import relative
from tests.kernels.powersgd.ranks import on_wire, orthonormal, panel_of, plans_of, random_grads
from tests.tolerances import POWERSGD_STAGE_DOT

FP32, BF16 = torch.float32, torch.bfloat16
SCALE = 0.5
MIN_ROUNDS = 2
SECONDS = float(os.environ.get("GRADCOMP_ARRIVAL_SECONDS", "0"))
# Many programs share a block of P and of Q.
ON_CUDA = [[(4096, 1024), (1024,), (1024, 4096), (1023, 1021)], [(96, 20000), (20000, 96)]]
ON_CPU = [[(33, 130), (5,), (70, 33)]]
KINDS = [(FP32, 4), (BF16, 32), (FP32, 1), (FP32, 32), (BF16, 4), (FP32, 8)]


class Repeated:
    """A plan, two buckets, and the wires that their first launches filled.

    changed: how many wires had other bits since then, and how many launches left a counter that isn't zero.
        It is on the device, so that no launch waits for the host.
    """

    def __init__(self, shapes: list[tuple[int, ...]], rank: int, dtype: torch.dtype, device: torch.device):
        self.name = f"{shapes}, rank {rank}, {dtype}"
        (self.plan,) = plans_of(shapes, rank, dtype, device, error_feedback=False, wire_dtype=FP32)
        for walk in (self.plan._work.project_work, self.plan._work.back_project_work):
            assert max(row[6] for row in walk) > 1, f"no programs share a block: {self.name}"
        self.grads = [random_grads(self.plan.layout, dtype, device, seed)[0] for seed in range(2)]
        self.first = [[wire.clone() for wire in self.wires(grad)] for grad in self.grads]
        self.changed = torch.zeros((), dtype=torch.int64, device=device)

    def wires(self, grad: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield P's wire and Q's, each when its launch is enqueued."""
        self.plan.project(grad, SCALE)
        yield self.plan.p_wire
        self.plan.back_project(grad, SCALE)
        yield self.plan.q_wire

    def again(self) -> None:
        for grad, first in zip(self.grads, self.first, strict=True):
            for wire, expected in zip(self.wires(grad), first, strict=True):
                self.changed += (wire.view(torch.int32) != expected.view(torch.int32)).any()
                self.changed += self.plan._bucket.arrived.any()

    def error(self) -> float:
        """Return the largest relative error of the first matrix's P and Q, by float64."""
        matrix, grad = self.plan.layout.matrices[0], self.grads[0]
        for _ in self.wires(grad):
            pass
        total = grad[: matrix.numel].double().cpu().view(matrix.rows, matrix.cols)
        sent, p = on_wire(self.plan, 0, "p"), panel_of(self.plan, 0, "p")
        return max(
            relative(sent, SCALE * total @ panel_of(self.plan, 0, "random")),
            relative(p, orthonormal(sent)),
            relative(on_wire(self.plan, 0, "q"), SCALE * total.mT @ p),
        )


def keep_busy(stream: torch.cuda.Stream, memory: torch.Tensor, cycles: int) -> None:
    """Enqueue work that takes bandwidth, then only a multiprocessor for some cycles, then bandwidth again."""
    with torch.cuda.stream(stream):
        memory.add_(1)
        torch.cuda._sleep(cycles)
        memory.mul_(2)


def test_a_blocks_last_program_finds_all_partial_sums(device, monkeypatch, record_property):
    on_cuda = device.type == "cuda"
    deadline = time.monotonic() + (SECONDS if on_cuda else 0)
    if not on_cuda:
        monkeypatch.setattr(powersgd_work, "NUM_PROGRAMS", dict.fromkeys(powersgd_work.NUM_PROGRAMS, 8))
    kinds, buckets = (KINDS, ON_CUDA) if on_cuda else (KINDS[:2], ON_CPU)
    every = [Repeated(shapes, rank, dtype, device) for dtype, rank in kinds for shapes in buckets]
    for each in every:
        assert each.error() <= 10 * POWERSGD_STAGE_DOT, each.name
    streams = [torch.cuda.Stream(device) for _ in range(2)] if on_cuda else []
    memories = [torch.ones(2**26, device=device) for _ in streams]
    num_rounds = 0
    while num_rounds < MIN_ROUNDS or time.monotonic() < deadline:
        for each in every:
            for stream, memory in zip(streams, memories, strict=True):
                keep_busy(stream, memory, cycles=200_000 if num_rounds % 2 else 1_000)
            each.again()
        num_rounds += 1
        if on_cuda:
            torch.cuda.synchronize()
    assert {each.name: int(each.changed) for each in every if each.changed} == {}
    record_property("launches with counters", num_rounds * len(every) * 4)
