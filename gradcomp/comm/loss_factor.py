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

    Returns a float for a number. For a tensor it returns a float32 tensor on the tensor's device, and on CUDA
    the host doesn't wait.

    Raises TypeError for anything but a real number, ValueError if it is negative or not finite; ValueError on
    all other ranks, too. A CUDA tensor's value raises nothing, but makes the factor NaN on every rank.

    Example::

        factor = gradcomp.loss_factor(num_tokens)
        (factor * cross_entropy(logits, labels, reduction="sum")).backward()
    """
    require_group("loss_factor", process_group)
    group, value = joined_group(process_group), plain(count)
    is_tensor, error = isinstance(value, torch.Tensor), _error(value)
    device = value.device if is_tensor else torch.device("cpu")
    on = device if group is None or has_streams(device) else device_for(group, ())
    # The other ranks wait for this one, so an invalid count is sent, too.
    sent = math.nan if error is not None else value.detach() if is_tensor else float(value)
    total = torch.as_tensor(sent, dtype=torch.float64, device=on).reshape(())
    total = total.where((total >= 0) & total.isfinite(), math.nan)
    if group is not None:
        with Explaining.of("add up all ranks' counts with loss_factor", group):
            dist.all_reduce(total, group=group)
    total = total.where(total.isfinite(), math.nan)
    if error is not None:
        raise error
    if not has_streams(device) and math.isnan(total.item()):
        raise ValueError(
            "loss_factor takes finite counts of 0 or more, but another rank's count, or the sum, is not"
        )
    factor = torch.where(total == 0, 0.0, (1 if group is None else group.size()) / total)
    return factor.to(device, torch.float32) if is_tensor else factor.item()


def _error(count: Any) -> Exception | None:
    """Return the error of an invalid count; None for a valid one, and where the host would wait for it."""
    value = count
    if isinstance(count, torch.Tensor):
        is_dense = count.layout == torch.strided and not count.is_meta
        is_number = is_dense and count.numel() == 1 and not count.is_complex() and count.dtype != torch.bool
        value = count.item() if is_number and not has_streams(count.device) else 0
    else:
        is_number = isinstance(count, int | float) and not isinstance(count, bool)
    if not is_number:
        return TypeError(f"loss_factor takes a number, or a tensor of one number, got {described(count)}")
    if not 0 <= value <= torch.finfo(torch.float64).max:
        return ValueError(f"loss_factor takes a finite count of 0 or more, got {value!r}")
    return None
