"""Local steps instead of an average in every step; see gradcomp.local_steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from benchmarks.demo.measure import WireMeter
from gradcomp.hooks.named_hooks import NamedHook
from gradcomp.local_steps import LocalSteps


@dataclass(frozen=True)
class LocalOptions:
    """The settings of a run: LocalSteps' every and delay, and the hook for the pseudo-gradients."""

    every: int
    hook: str = "none"
    delay: int = 0

    @classmethod
    def named(cls, name: str) -> LocalOptions:
        """Return the settings of a run such as "20:int4:delay=5" or "20:powersgd:8".

        Raises ValueError for another name.
        """
        every, *rest = name.split(":")
        if not every.isdecimal() or not int(every):
            raise ValueError(f"{every!r} is not a number of local steps")
        found = cls(int(every))
        if rest and rest[-1].startswith("delay="):
            found = replace(found, delay=int(rest.pop().removeprefix("delay=")))
        if rest:
            found = replace(found, hook=":".join(rest))
        NamedHook.named(found.hook)
        return found


class LocalTraining:
    """Exchanges of one model, and the bytes that this rank has handed to collectives in them."""

    def __init__(self, model: nn.Module, options: LocalOptions):
        start_iter = 2 if "powersgd" in options.hook else 0  # as early as the hook can
        state, hook = NamedHook.named(options.hook).state_and_hook(start_iter)
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        self._local = LocalSteps(model, outer, options.every, hook, state, delay=options.delay)
        self.every = options.every
        self.sent_bytes = 0

    def step(self, *, is_last: bool) -> None:
        """Call it after every step of the inner optimizer."""
        with WireMeter() as meter:
            if is_last:
                self._local.join()
            else:
                self._local.step()
        self.sent_bytes += meter.num_bytes
