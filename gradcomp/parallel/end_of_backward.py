"""The end of a backward through the wrapper: unaveraged gradients are found, and optimizers stepped."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from gradcomp.reducer import errors

if TYPE_CHECKING:
    from .distributed import DistributedDataParallel


class EndOfBackward:
    """Called by the reducer at the end of a backward, with whether the gradients have been averaged.

    Raises RuntimeError if parameters of the module have gradients that are neither averaged nor to be
    ignored: those that were added, replaced or unfrozen after construction. Otherwise steps the optimizers
    of torch's _apply_optimizer_in_backward, which would step before the averaging on their own.

    averaged: the reducer's parameters. The wrapper is held weakly, since it holds the reducer, which holds
    this object.
    """

    def __init__(self, ddp: "DistributedDataParallel", averaged: Sequence[torch.Tensor], ignored: set[str]):
        self._ddp, self._averaged, self._ignored = weakref.ref(ddp), averaged, ignored
        # Kept alive: an id may come again.
        named = ddp.module.named_parameters()
        self._known = {id(param): param for param in averaged}
        self._known |= {id(param): param for name, param in named if name in ignored}
        self._stepping: list[torch.Tensor] = []

    def take_over_optimizers(self) -> None:
        """Keep optimizers from stepping in backward, also those attached since the last call."""
        self._stepping = [param for param in self._averaged if hasattr(param, "_in_backward_optimizers")]
        if self._stepping:
            from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

            for param in self._stepping:
                for handle in param_to_optim_hook_handle_map.get(param, ()):
                    handle.remove()

    def __call__(self, is_averaged: bool) -> None:
        ddp = self._ddp()
        if ddp is not None and any(map(self._is_left_out, _parameters(ddp.module))):
            named = ddp.module.named_parameters()
            names = [name for name, param in named if name not in self._ignored and self._is_left_out(param)]
            if names:
                raise RuntimeError(errors.not_averaged_parameters(names))
        if is_averaged:
            for param in self._stepping:
                for optimizer in param._in_backward_optimizers:  # type: ignore[attr-defined]
                    optimizer.step()
                param.grad = None

    def _is_left_out(self, param: torch.Tensor) -> bool:
        return (
            id(param) not in self._known and param.requires_grad and param.is_leaf and param.grad is not None
        )


def _parameters(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters, without the names that take most of Module.parameters()'s time."""
    return [param for each in module.modules() for param in each._parameters.values() if param is not None]
