"""Which hook a plan recommends, and when it recommends none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .accuracy_costs import accuracy_cost
from .candidates import Candidate
from .prediction import StepPrediction

# docs/choosing.md: with less to gain, communication isn't the bottleneck.
LEAST_HEADROOM = 0.1
# A hook that costs more accuracy has to be so much faster.
LEAST_GAIN = 1.05
# How many times as many bytes a hook may save here as where its cost in accuracy was measured.
RATE_MARGIN = 1.5
# Costs are compared in steps of what the seeds differ by, in nats: smaller differences mean nothing.
RESOLUTION = 0.01


@dataclass(frozen=True)
class Recommendation:
    """What to use.

    hook: "none" where compression isn't worth it. speedup: of the step, over no compression. headroom: the
    part of the step that communication takes.
    untested, untested_speedup: the same if hooks cost no more accuracy here than in docs/accuracy.md where
    they send more bytes; hook is one that saves no more bytes here than where its cost was measured.
    """

    hook: str
    speedup: float
    headroom: float
    untested: str
    untested_speedup: float


def eligible(hooks: Sequence[Candidate], max_loss: float) -> list[Candidate]:
    """Return the hooks whose cost in accuracy is known and within max_loss nats, the least cost first.

    A cost below zero counts as zero. Among equals the order is the given one.
    """
    costs = {hook: cost.nats for hook in hooks if (cost := accuracy_cost(hook)) is not None}
    within = [hook for hook, nats in costs.items() if nats <= max_loss]
    return sorted(within, key=lambda hook: round(max(costs[hook], 0.0) / RESOLUTION))


def recommend(
    predictions: Mapping[str, StepPrediction],
    noop_step_s: float,
    hooks: Sequence[Candidate],
    max_loss: float,
) -> Recommendation:
    """Return which hook to use.

    predictions: by hook, "none" among them. noop_step_s: a step without communication.
    """
    none = predictions["none"]
    headroom = 1 - noop_step_s / none.step_s
    if headroom < LEAST_HEADROOM:
        return Recommendation("none", 1.0, headroom, "none", 1.0)
    allowed = [hook for hook in eligible(hooks, max_loss) if hook.name in predictions]
    tested = [hook for hook in allowed if not is_extrapolated(hook, predictions)]
    (hook, speedup), (untested, gain) = _fastest(predictions, tested), _fastest(predictions, allowed)
    if gain < LEAST_GAIN * speedup:
        untested, gain = hook, speedup
    return Recommendation(hook, speedup, headroom, untested, gain)


def _fastest(predictions: Mapping[str, StepPrediction], allowed: Sequence[Candidate]) -> tuple[str, float]:
    """Return the first hook that is about as fast as the fastest, and its speedup."""
    none_s = predictions["none"].step_s
    least_s = min([predictions[hook.name].step_s for hook in allowed], default=none_s)
    for hook in allowed:
        step_s = predictions[hook.name].step_s
        if step_s <= LEAST_GAIN * least_s and none_s >= LEAST_GAIN * step_s:
            return hook.name, none_s / step_s
    return "none", 1.0


def is_extrapolated(hook: Candidate, predictions: Mapping[str, StepPrediction]) -> bool:
    """Return whether the hook saves far more bytes here than where its cost in accuracy was measured."""
    cost, handed = accuracy_cost(hook), predictions[hook.name].handed_bytes
    return cost is None or predictions["none"].handed_bytes > RATE_MARGIN * cost.rate * handed


def sentences(
    found: Recommendation,
    predictions: Mapping[str, StepPrediction],
    hooks: Sequence[Candidate],
    max_loss: float,
) -> str:
    """Return a recommendation in words."""
    if found.headroom < LEAST_HEADROOM:
        return (
            f"Don't compress: without any communication a step would be only {found.headroom:.0%} faster. "
            "That is less than a tenth, so communication is not the bottleneck."
        )
    waits = f"communication takes {found.headroom:.0%} of a step without compression"
    if found.hook == "none":
        text = (
            f"Don't compress: {waits}, but no hook whose cost in accuracy is known, and up to {max_loss:g} "
            f"nats, makes the step {LEAST_GAIN - 1:.0%} faster."
        )
    else:
        text = f"Use {found.hook}: a step is {times(found.speedup)} as fast; {waits}."
    if found.untested == found.hook:
        return text
    cost = accuracy_cost(next(each for each in hooks if each.name == found.untested))
    assert cost is not None
    rate = predictions["none"].handed_bytes / predictions[found.untested].handed_bytes
    return (
        f"{text} {found.untested} would be {times(found.untested_speedup)} as fast, but it sends "
        f"{times(rate)} fewer bytes here, and its cost in accuracy was measured at {times(cost.rate)} fewer: "
        "train your own model with it before you rely on that."
    )


def times(factor: float) -> str:
    """Format a factor for people."""
    return f"{factor:.{0 if factor >= 9.95 else 1}f} times"
