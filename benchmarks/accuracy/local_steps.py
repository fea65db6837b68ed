"""Local steps (DiLoCo): every rank trains by itself, and now and then they average how far they have gone."""

import torch
from torch import nn

from benchmarks.demo.measure import WireMeter
from gradcomp import average_
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook


class LocalSteps:
    """The outer step of DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1), every so many steps.

    The weights that all ranks have in common take a step of SGD with Nesterov momentum 0.9 and learning rate
    0.7, as there, by the pseudo-gradients' average.
    interval: the local steps between two outer ones. bits: 4 to send pseudo-gradients in 4 bits with error
    feedback; None: as they are.
    sent_bytes: what this rank has handed to collectives so far, as of all-reduces.
    """

    def __init__(self, model: nn.Module, interval: int, bits: int | None):
        self._weights = [weight.detach() for weight in model.parameters()]
        self._names = [name for name, _ in model.named_parameters()]
        self._common = [weight.clone().requires_grad_() for weight in self._weights]
        self._outer = torch.optim.SGD(self._common, lr=0.7, momentum=0.9, nesterov=True)
        self._interval = interval
        self._state = None if bits is None else QuantizationState(bits=bits)
        self.sent_bytes = 0

    def after_step(self, step: int, *, is_last: bool) -> None:
        """Take the outer step if it is time for it. step: the number of local steps so far."""
        if step % self._interval and not is_last:
            return
        moved = [before.detach() - now for before, now in zip(self._common, self._weights, strict=True)]
        with WireMeter() as meter:
            if self._state is None:
                average_(moved)
            else:
                average_(moved, quantization_hook, self._state, keys=self._names)
        self.sent_bytes += meter.num_bytes
        for weight, pseudo_gradient in zip(self._common, moved, strict=True):
            weight.grad = pseudo_gradient
        self._outer.step()
        for weight, new in zip(self._weights, self._common, strict=True):
            weight.copy_(new.detach())
