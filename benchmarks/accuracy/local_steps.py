"""Local steps instead of an average in every step; see gradcomp.local_steps."""

from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.demo.wire import Wire
from gradcomp.hooks.named_hooks import NamedHook
from gradcomp.local_steps import LocalSteps


@dataclass(frozen=True)
class LocalOptions:
    """The settings of a run: LocalSteps' arguments of these names, and the hook for the pseudo-gradients.

    outer: learning rate and Nesterov's momentum of the outer SGD. to: exchanges become rarer as the square of
    the (inner) learning rate falls, up to ``to`` steps from one to the next; 0 for no change.
    """

    every: int
    hook: str = "none"
    delay: int = 0
    fragments: int = 1
    to: int = 0
    outer: tuple[float, float] = (1.0, 0.0)

    @classmethod
    def named(cls, name: str) -> "LocalOptions":
        """Return the settings of a run such as "20:int4:delay=5" or "20:powersgd:8:outer=0.7/0.9".

        Raises ValueError for another name.
        """
        every, *rest = name.split(":")
        if not every.isdecimal() or not int(every):
            raise ValueError(f"{every!r} is not a number of local steps")
        given = dict(each.split("=", 1) for each in rest if "=" in each)
        hook = ":".join(each for each in rest if "=" not in each) or "none"
        NamedHook.named(hook)
        if unknown := set(given) - {"delay", "fragments", "to", "outer"}:
            raise ValueError(f"there is no setting {min(unknown)!r}; known are delay, fragments, to, outer")
        learning_rate, _, momentum = given.pop("outer", "1/0").partition("/")
        numbers = {key: int(value) for key, value in given.items()}
        return cls(int(every), hook, **numbers, outer=(float(learning_rate), float(momentum or 0)))


def local_steps_of(model: nn.Module, options: LocalOptions) -> LocalSteps:
    start_iter = 2 if "powersgd" in options.hook else 0  # as early as the hook can
    state, hook = NamedHook.named(options.hook).state_and_hook(start_iter)
    learning_rate, momentum = options.outer
    outer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum, nesterov=momentum > 0)
    numbers = {"fragments": options.fragments, "delay": options.delay}
    return LocalSteps(model, outer, options.every, hook, state, **numbers)


class LocalTraining:
    """Exchanges of one model, and the bytes that this rank has handed to collectives in them."""

    def __init__(self, model: nn.Module, options: LocalOptions, wire: Wire):
        self._local = local_steps_of(model, options)
        self._options, self._wire = options, wire
        self.sent_bytes = 0

    def step(self, num_steps: int, steps: int) -> None:
        """Call it after every step of the inner optimizer, the ``num_steps``-th of ``steps``."""
        if self._options.to:
            # The learning rate falls linearly. Gu et al., "A Quadratic Synchronization Rule for Distributed
            # Deep Learning", 2024.
            every = self._options.every * (steps / (steps - num_steps + 1)) ** 2
            self._local.every = min(int(every), self._options.to)
        before = self._wire.num_bytes
        if num_steps == steps:
            self._local.join()
        else:
            self._local.step()
        self.sent_bytes += self._wire.num_bytes - before
