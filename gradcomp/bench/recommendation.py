"""The hook to use, by measured steps and by each hook's cost in accuracy."""

from __future__ import annotations

from collections.abc import Sequence

from gradcomp.hooks.named_hooks import NamedHook

from .steps import NOOP, HookTime

SOURCE = (
    "docs/accuracy.md: validation loss above no compression, in nats per byte, of one small GPT (137,000 "
    "parameters, 4 ranks, 3 seeds; seeds differ by up to 0.011), and how many times fewer bytes it sent. No "
    "larger model was measured."
)

# Below this part of a step, communication isn't the bottleneck; see docs/choosing.md.
LEAST_HEADROOM = 0.1
# A hook that costs more accuracy must be faster by this factor.
LEAST_GAIN = 1.05
# A measured cost in accuracy holds up to this factor more bytes saved.
RATE_MARGIN = 1.5
# Costs are rounded to this number of nats: the seeds differ by as much.
RESOLUTION = 0.01


def recommendation(steps: Sequence[HookTime], max_loss: float) -> str:
    """Return the hook to use, in sentences.

    steps: of hooks, "none" and NOOP among them.
    max_loss: the most nats that the hook may cost.
    """
    by_name = {each.name: each for each in steps}
    none, noop = by_name["none"], by_name[NOOP]
    headroom = 1 - noop.step_p50_s / none.step_p50_s
    if headroom < LEAST_HEADROOM:
        return (
            f"Don't compress: without any communication a step would be only {headroom:.0%} faster. "
            "That is less than a tenth, so communication is not the bottleneck."
        )
    allowed = _eligible(steps, max_loss)
    tested = [each for each in allowed if _rate(each, none) <= RATE_MARGIN * _measured_rate(each)]
    best, fastest = _mildest_of_the_fastest(tested, none), _mildest_of_the_fastest(allowed, none)
    waits = f"communication takes {headroom:.0%} of a step without compression"
    if best is none:
        text = (
            f"Don't compress: {waits}, but no hook whose cost in accuracy is known, and up to {max_loss:g} "
            f"nats, makes the step {LEAST_GAIN - 1:.0%} faster."
        )
    else:
        text = f"Use {best.name}: a step is {_speedup(best, none)} as fast; {waits}."
        sixteen = next((by_name[name] for name in ("bf16", "fp16") if name in by_name), best)
        if sixteen is not best:
            text += f" It is {_speedup(best, sixteen)} as fast as with 16 bits ({sixteen.name})."
    if best.step_p50_s < LEAST_GAIN * fastest.step_p50_s:
        return text
    return (
        f"{text} {fastest.name} is {_speedup(fastest, none)} as fast, but it sends "
        f"{_rate(fastest, none):.3g} times fewer bytes here, and its cost in accuracy was measured at "
        f"{_measured_rate(fastest):.3g} times fewer: train your own model with it before you rely on that."
    )


def _eligible(steps: Sequence[HookTime], max_loss: float) -> list[HookTime]:
    """Return hooks with a known cost in accuracy of up to max_loss nats, the least cost first.

    A negative cost counts as zero. Hooks of equal cost keep their order.
    """
    costs = [(each, NamedHook.form_named(each.name).cost) for each in steps if each.name != NOOP]
    within = [(each, cost.nats) for each, cost in costs if cost is not None and cost.nats <= max_loss]
    return [each for each, nats in sorted(within, key=lambda pair: round(max(pair[1], 0.0) / RESOLUTION))]


def _mildest_of_the_fastest(steps: Sequence[HookTime], none: HookTime) -> HookTime:
    """Return the first of these hooks that is about as fast as the fastest, in its faster form.

    That is none, if no hook is faster.
    """
    least_s = min([each.step_p50_s for each in steps], default=none.step_p50_s)
    for hook in steps:
        if hook.step_p50_s <= LEAST_GAIN * least_s and none.step_p50_s >= LEAST_GAIN * hook.step_p50_s:
            name = NamedHook.form_named(hook.name).flat_name
            forms = [each for each in steps if NamedHook.form_named(each.name).flat_name == name]
            return min(forms, key=lambda each: each.step_p50_s)
    return none


def _rate(hook: HookTime, none: HookTime) -> float:
    """Return how many times fewer bytes the hook sends."""
    return none.collective_bytes / hook.collective_bytes


def _measured_rate(hook: HookTime) -> float:
    """Return how many times fewer bytes it sent where its cost in accuracy was measured."""
    cost = NamedHook.form_named(hook.name).cost
    assert cost is not None
    return cost.rate


def _speedup(hook: HookTime, other: HookTime) -> str:
    return f"{other.step_p50_s / hook.step_p50_s:.2f} times"
