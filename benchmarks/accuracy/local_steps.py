"""Local steps instead of an average in every step; see gradcomp.local_steps.

A run is named "local:20:int4:momentum=0.9": the number of local steps, the hook for the pseudo-gradients, and
settings. The others are LocalSteps' defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import nn

from benchmarks.demo.measure import WireMeter
from benchmarks.named_hooks import named_hook
from gradcomp import average_
from gradcomp.local_steps import LocalSteps


@dataclass(frozen=True)
class LocalOptions:
    """The settings of a run.

    every: local steps between exchanges. sent_in: "none", or a hook's name with "-" instead of ":".
    lr, momentum: of the outer SGD, with Nesterov momentum if that isn't 0.
    fragments, delay: LocalSteps'.
    start: first steps; after each of them all weights are averaged, uncompressed. Their bytes don't count,
        like the bytes of other hooks' plain first steps.
    """

    every: int
    sent_in: str = "none"
    lr: float = 1.0
    momentum: float = 0.0
    fragments: int = 1
    delay: int = 0
    start: int = 0

    @classmethod
    def named(cls, name: str) -> LocalOptions:
        """Return the settings of a run of this name, without "local:". Raises ValueError for another."""
        every, *rest = name.split(":")
        if not every.isdecimal() or not int(every):
            raise ValueError(f"{every!r} is not a number of local steps")
        found = cls(int(every))
        kinds = {each.name: type(each.default) for each in fields(cls)[1:]}
        for part in rest:
            key, _, value = part.partition("=")
            if not value:
                named_hook(part.replace("-", ":"))
                found = replace(found, sent_in=part)
            elif key in kinds:
                found = replace(found, **{key: kinds[key](value)})
            else:
                raise ValueError(f"there is no setting {key!r}; known are {', '.join(kinds)}")
        return found


class LocalTraining:
    """Exchanges of one model, and the bytes that this rank has handed to collectives in them."""

    def __init__(self, model: nn.Module, options: LocalOptions):
        self._num_plain_steps, self._num_steps = options.start, 0
        outer = torch.optim.SGD(
            model.parameters(), lr=options.lr, momentum=options.momentum, nesterov=options.momentum > 0
        )
        hook, make_state = named_hook(options.sent_in.replace("-", ":"))
        self._local = LocalSteps(
            model, outer, options.every, hook, make_state(2), options.fragments, delay=options.delay
        )
        self._weights = [each.detach() for each in model.parameters()]
        self.every = options.every
        self.sent_bytes = self.num_counted = 0

    def step(self, *, is_last: bool) -> None:
        """Call it after every step of the inner optimizer."""
        self._num_steps += 1
        if self._num_steps <= self._num_plain_steps:
            average_(self._weights)
            self._local.restart()
            return
        self.num_counted += 1
        with WireMeter() as meter:
            if is_last:
                self._local.join()
            else:
                self._local.step()
        self.sent_bytes += meter.num_bytes
