"""The average of sparse gradients (``nn.Embedding(sparse=True)``): every rank's rows, gathered."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gradcomp.compress.operation import Operation


def average_rows(parameter: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the mean over the ranks of a parameter's sparse gradient, coalesced; None counts as zeros.

    Gathers the rows that have a gradient and their indices, padded to the longest list, on any backend; an
    all-reduce of sparse tensors exists on gloo alone. Moves W · (longest list) rows. The host waits: it has
    to know how many rows there are.
    """
    rows, values = _rows(parameter)
    count = torch.tensor([len(rows)], device=parameter.device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    with Operation.of(f"average a sparse gradient of shape {list(parameter.shape)}", group):
        dist.all_gather(counts, count, group=group)
        lengths = [int(each) for each in counts]
        longest = max(lengths)
        all_rows = _gather(rows, longest, lengths, group)
        all_values = _gather(values, longest, lengths, group)
    values, shape = all_values / group.size(), parameter.shape
    mean = torch.sparse_coo_tensor(all_rows[None], values, shape, check_invariants=False)
    return mean.coalesce()


def _rows(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of the rows that have a gradient, and the rows."""
    gradient = parameter.grad
    if gradient is None:
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return rows, torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    gradient = gradient.detach().coalesce()
    return gradient.indices()[0], gradient.values()


def _gather(mine: torch.Tensor, longest: int, lengths: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    padded = mine.new_zeros(longest, *mine.shape[1:])
    padded[: len(mine)] = mine
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded, group=group)
    return torch.cat([each[:length] for each, length in zip(everyone, lengths, strict=True)])
