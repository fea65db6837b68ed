"""Averages that are weighted by tokens or samples, from ordinary averages over ranks."""

import math
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.device import has_streams

from ..rules import described, plain
from .process_group import Explaining, device_for, joined_group, require_group


def loss_factor(count: Any, process_group: dist.ProcessGroup | None = None) -> Any:
    """Return a factor for this rank's summed loss: averages are then gradients of the mean over all counts.

    count: the tokens, samples or weights that this rank's loss sums over in the coming step, in all its
        micro-batches; a number or a tensor of one element, 0 or more.
    process_group: the ranks that average gradients; None for the default group, or one rank if there is none.

    The factor is the number of ranks divided by the sum of all counts; 0 if all counts are 0. Multiply a loss
    that is a mean by this rank's count, too. Every rank of the group must call this once per step: it is an
    all-reduce of one element.

    Returns a float for a number. For a tensor it returns one on the tensor's device, float32 for an integer
    count, otherwise float64, and on CUDA the host doesn't wait.

    Raises TypeError for anything but a real number, ValueError if it is negative or not finite; ValueError on
    all other ranks, too, and on all ranks if the counts' sum or the factor is infinite in fp64.
    A CUDA tensor's value raises nothing, but makes the factor NaN on every rank.

    Example::

        factor = gradcomp.loss_factor(num_tokens)
        (factor * cross_entropy(logits, labels, reduction="sum")).backward()
    """
    require_group("loss_factor", process_group)
    group, value = joined_group(process_group), plain(count)
    num_ranks = 1 if group is None else group.size()
    if is_tensor := isinstance(value, torch.Tensor):
        device, is_dense = value.device, value.layout == torch.strided and not value.is_meta
        is_number = is_dense and value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    else:
        device, is_number = torch.device("cpu"), type(value) in (int, float)
    on_host = not has_streams(device)
    error: Exception | None = None
    if not is_number:
        error = TypeError(f"loss_factor takes a number, or a tensor of one number, got {described(count)}")
    elif on_host:
        value = value.item() if is_tensor else value
        if not 0 <= value <= torch.finfo(torch.float64).max:
            error = ValueError(f"loss_factor takes a finite count of 0 or more, got {value!r}")
    # The other ranks wait for this one, so an invalid count is sent, too.
    sent = value if error is None else math.nan
    on = device_for(group, ()) if group is not None and on_host else device
    total = torch.as_tensor(sent, dtype=torch.float64, device=on).detach().reshape(())
    total = total.where(total >= 0, math.nan)
    if group is not None:
        with Explaining.of("add up all ranks' counts with loss_factor", group):
            dist.all_reduce(total, group=group)
    factor = torch.where(total == 0, 0.0, num_ranks / total)
    factor = factor.where(factor.isfinite() & total.isfinite(), math.nan)
    if error is not None:
        raise error
    if on_host and factor.isnan():
        raise ValueError(
            "loss_factor takes finite counts of 0 or more, but another rank's count is not, or the counts' "
            "sum is infinite, or their mean is below 6e-309, where the factor would be infinite. This rank's "
            f"count is {value!r}"
        )
    if not is_tensor:
        return factor.item()
    return factor.to(device, torch.float64 if count.is_floating_point() else torch.float32)
