"""Optimizers of torch's _apply_optimizer_in_backward, which step on their own."""

from collections.abc import Callable, Iterable

import torch


def take_over(params: Iterable[torch.Tensor]) -> Callable[[], None] | None:
    """Keep such optimizers from stepping in backward; what to call once their parameters are averaged. None for none."""
    stepping = [param for param in params if hasattr(param, "_in_backward_optimizers")]
    if not stepping:
        return None
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for param in stepping:
        for handle in param_to_optim_hook_handle_map.get(param, ()):
            handle.remove()

    def step() -> None:
        for param in stepping:
            for optimizer in param._in_backward_optimizers:
                optimizer.step()
            param.grad = None

    return step
