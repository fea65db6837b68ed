"""Quantized all-reduces of simulated ranks, and checks of quantized blocks, for the kernels' tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from gradcomp import ops
from gradcomp.compress.quantized_all_reduce import Codes, zeros_of
from gradcomp.kernels.launch import Stage
from gradcomp.layout import BlockLayout


class Rank(Codes):
    """A simulated rank's codes in an all-reduce, or in a reduce-scatter."""

    def __init__(self, *arguments, bits, error_feedback=True, uncompressed_dtype=None, **options):
        error = zeros_of(*arguments, arguments[0].world_size) if error_feedback else None
        coding = {"bits": bits, "uncompressed_dtype": uncompressed_dtype}
        super().__init__(*arguments, error, **coding, **options)
        self._decode = ops.decoder(*arguments, **coding)

    def average(self, rank: int) -> None:
        self.add(self.mean, rank)

    def decode(self, flat: torch.Tensor) -> None:
        self._decode(payload=self.payload, buffer=flat)


def plans_of(
    layout: BlockLayout, dtype: torch.dtype, device: torch.device, world_size: int = 0, **options: Any
) -> list[Rank]:
    """Return a simulated rank's codes on the kernels for each rank, by default one per shard."""
    plans = [Rank(layout, dtype, device, **options) for _ in range(world_size or layout.world_size)]
    assert all(isinstance(operation, Stage) for plan in plans for operation in plan.operations)
    return plans


def plain_plans_of(layout: BlockLayout, dtype: torch.dtype, world_size: int = 0, **options: Any):
    """Return the same in plain torch."""
    with mock.patch.object(ops, "_INTERPRETED", False):
        cpu = torch.device("cpu")
        return [Rank(layout, dtype, cpu, **options) for _ in range(world_size or layout.world_size)]


def padding_of(layout: BlockLayout) -> list[slice]:
    """Return the slices of the padded blocks that belong to no tensor."""
    ends = [0, *(run.stored.stop for run in layout.runs)]
    starts = [*(run.stored.start for run in layout.runs), layout.world_size * layout.shard_numel]
    return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def random_grads(layout: BlockLayout, dtype: torch.dtype, device: torch.device, seed: int) -> list[Any]:
    """Return a bucket for each rank."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.world_size, layout.numel)
    return list(torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype))


def all_to_all(plans: Sequence[Any]) -> None:
    for owner, plan in enumerate(plans):
        for sender, other in enumerate(plans):
            plan.received[sender].copy_(other.payload[owner])


def all_gather(plans: Sequence[Any]) -> None:
    for plan in plans:
        for owner, other in enumerate(plans):
            plan.payload[owner].copy_(other.mean)


def all_reduce(plans: Sequence[Any], grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run the all-reduce; return every rank's averaged bucket."""
    outputs = [grad.clone() for grad in grads]
    for rank, plan in enumerate(plans):
        plan.encode(outputs[rank], rank)
    all_to_all(plans)
    for rank, plan in enumerate(plans):
        plan.average(rank)
    all_gather(plans)
    for rank, plan in enumerate(plans):
        plan.decode(outputs[rank])
    return outputs


def sections_of(
    payload: torch.Tensor, layout: BlockLayout, dtype: torch.dtype, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the codes [blocks, bytes], scales and exact elements of one payload, on the CPU."""
    sections, _ = layout.sections(bits, dtype.itemsize)
    # Copy: view refuses an empty section that isn't aligned.
    codes, scales, exact = (payload.cpu()[section].clone() for section in sections)
    return codes.view(-1, layout.code_bytes(bits)), scales.view(torch.bfloat16), exact.view(dtype)
