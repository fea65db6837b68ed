"""PowerSGD and a quantized all-reduce in their shortest form, to read before the hooks.

Each is one step of one rank over a real process group, with the papers' letters: W ranks; M [n, m], a
gradient matrix plus its error E; P [n, r] and Q [m, r], factors of rank r.

The hooks compute the same means, bucket by bucket. Besides, they overlap collectives with backward, send all
tensors of a bucket in one collective, and survive inf and NaN, overflow, and matrices of zeros.
"""

# ruff: noqa: N806 the papers' letters

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

Memory = dict[str, Tensor]  # what a rank keeps of a tensor from step to step; {} before the first step


def power_sgd(gradient: Tensor, memory: Memory, r: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the mean of the ranks' gradients, sent in two thin factors; see docs/powersgd.md.

    Algorithms 1 and 2 of Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019.

    gradient: this rank's [n, ...], a matrix of its first dimension against the others.
    memory: E [n, m] and Q [m, r]; updated.
    """
    W = dist.get_world_size(group)

    def mean(tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=group)
        return tensor / W

    if gradient.ndim < 2:
        return mean(gradient.clone())
    M = gradient.flatten(1)
    n, m = M.shape
    if 2 * (n + m) * r >= n * m:  # the factors would save less than half
        return mean(gradient.clone())
    if not memory:
        same = torch.Generator().manual_seed(0)  # every rank needs the same Q
        memory["Q"] = torch.randn(m, r, generator=same).to(M)
        memory["E"] = torch.zeros_like(M)

    M = M + memory["E"]  # error feedback: add what earlier steps left out
    P = mean(M @ memory["Q"])  # first all-reduce
    P = torch.linalg.qr(P).Q  # orthonormal columns
    Q = mean(M.T @ P)  # second all-reduce
    average: Tensor = P @ Q.T  # the ranks' mean M, projected on the span of P
    memory["E"] = M - average
    memory["Q"] = Q  # warm start: the next step begins with a good Q
    return average.view_as(gradient)


def quantized_all_reduce(
    gradient: Tensor, memory: Memory, block_size: int = 128, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the mean of the ranks' gradients, sent in 8 bits; see docs/quantization_explained.md.

    The hook does this between three ranks or more. Two ranks send each other all their codes, and add.

    memory: E [W, blocks, block_size]; updated.
    """
    W, rank, numel = dist.get_world_size(group), dist.get_rank(group), gradient.numel()
    num_blocks = -(-numel // (W * block_size))  # of a shard
    M = gradient.new_zeros(W, num_blocks, block_size)  # shard i of M goes to rank i; zeros at the end
    M.view(-1)[:numel] = gradient.flatten()
    if memory:
        M += memory["E"]  # error feedback: add what the last step's rounding lost
    codes, scales = quantize(M)
    memory["E"] = M - codes * scales.float()

    all_codes, all_scales = torch.empty_like(codes), torch.empty_like(scales)
    dist.all_to_all_single(all_codes, codes, group=group)  # all ranks' codes of this rank's shard
    dist.all_to_all_single(all_scales, scales, group=group)
    shards = (all_codes * all_scales.float()).to(gradient)
    shards[rank] = M[rank]  # this rank's own values stay exact: it doesn't send them
    total = shards.sum(0)
    codes, scales = quantize(total / W)
    memory["E"][rank] = total - W * (codes * scales.float())

    dist.all_gather(list(all_codes), codes, group=group)  # all shards' means
    dist.all_gather(list(all_scales), scales, group=group)
    average = all_codes * all_scales.float()  # all ranks compute this from the same bytes
    return average.view(-1)[:numel].view_as(gradient).to(gradient)


def quantize(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (int8 codes [..., block_size], bf16 scales [..., 1]), with blocks ≈ codes · scales.

    Four bits are the same with 7 in place of 127.
    """
    exact = blocks.abs().amax(-1, keepdim=True) / 127
    scales = exact.bfloat16()
    scales = torch.where(scales < exact, scales.nextafter(torch.full_like(scales, torch.inf)), scales)  # up
    codes = (blocks / scales.where(scales > 0, 1)).round()  # a block of zeros has the scale 0
    return codes.to(torch.int8), scales
