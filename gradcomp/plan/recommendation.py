"""The hook that a plan recommends for a model on a network, and each hook's cost in accuracy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gradcomp.compress.accuracy_cost import accuracy_cost

from .candidates import CANDIDATES, Candidate
from .hardware import Device, Link
from .models import Bucket
from .prediction import Compute, StepPrediction, StepWork, step_work

SOURCE = (
    "docs/accuracy.md: validation loss above no compression, in nats per byte, of one small GPT (137,000 "
    "parameters, 4 ranks, 3 seeds; seeds differ by up to 0.011), at so many times fewer bytes there. Larger "
    "models have not been measured."
)

# Below this part of a step, communication isn't the bottleneck; see docs/choosing.md.
LEAST_HEADROOM = 0.1
# A hook that costs more accuracy must be faster by this factor.
LEAST_GAIN = 1.05
# A measured cost in accuracy holds up to this factor more bytes saved.
RATE_MARGIN = 1.5
# The 16-bit hook that others are compared with: the first that was predicted.
REFERENCES = ("bf16", "fp16")
# Costs are rounded to this number of nats: the seeds differ by as much.
RESOLUTION = 0.01


@dataclass(frozen=True)
class Recommendation:
    """The hook to use.

    hook: the best hook with a cost in accuracy that was measured at as many bytes saved as here. "none" if
        compression isn't worth it.
    speedup: of the step, over no compression.
    headroom: the part of the step that communication takes.
    untested, untested_speedup: the best hook, and its speedup, if saving more bytes cost no more accuracy.
    """

    hook: str
    speedup: float
    headroom: float
    untested: str
    untested_speedup: float


def eligible(hooks: Sequence[Candidate], max_loss: float) -> list[Candidate]:
    """Return the hooks with a known cost in accuracy of up to max_loss nats, the least cost first.

    A negative cost counts as zero. Hooks of equal cost keep their order.
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
    """Return the hook to use.

    predictions: by hook, "none" among them.
    noop_step_s: the time of a step without communication.
    max_loss: the most nats that the hook may cost.
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
    """Return the first allowed hook that is about as fast as the fastest, in its faster form.

    Returns its name and its speedup.
    """
    none_s = predictions["none"].step_s
    least_s = min([predictions[hook.name].step_s for hook in allowed], default=none_s)
    for hook in allowed:
        step_s = predictions[hook.name].step_s
        if step_s <= LEAST_GAIN * least_s and none_s >= LEAST_GAIN * step_s:
            forms = [each.name for each in allowed if each.flat_name == hook.flat_name]
            form = min(forms, key=lambda name: predictions[name].step_s)
            return form, none_s / predictions[form].step_s
    return "none", 1.0


def is_extrapolated(hook: Candidate, predictions: Mapping[str, StepPrediction]) -> bool:
    """Return whether the hook saves far more bytes here than in the measurement of its cost."""
    cost, own_bytes = accuracy_cost(hook), predictions[hook.name].collective_bytes
    return cost is None or predictions["none"].collective_bytes > RATE_MARGIN * cost.rate * own_bytes


def with_16_bits(predictions: Mapping[str, StepPrediction]) -> StepPrediction | None:
    """Return the prediction that other hooks are compared with, besides "none"; None without 16 bits."""
    return next((predictions[name] for name in REFERENCES if name in predictions), None)


def has_forms(hook: Candidate, hooks: Sequence[Candidate]) -> bool:
    """Return whether the hook is compared both flat and by nodes."""
    return sum(each.flat_name == hook.flat_name for each in hooks) > 1


def sentences(
    found: Recommendation,
    predictions: Mapping[str, StepPrediction],
    hooks: Sequence[Candidate],
    max_loss: float,
    ranks_per_node: int = 1,
) -> str:
    """Format a recommendation as sentences.

    ranks_per_node: for the state of a hook that is compared both flat and by nodes.
    Other arguments: see recommend.
    """
    if found.headroom < LEAST_HEADROOM:
        return (
            f"Don't compress: without any communication a step would be only {found.headroom:.0%} faster. "
            "That is less than a tenth, so communication is not the bottleneck."
        )
    reference = with_16_bits(predictions)
    waits = f"communication takes {found.headroom:.0%} of a step without compression"
    if found.hook == "none":
        text = (
            f"Don't compress: {waits}, but no hook whose cost in accuracy is known, and up to {max_loss:g} "
            f"nats, makes the step {LEAST_GAIN - 1:.0%} faster."
        )
    else:
        hook = _named(found.hook, hooks)
        text = f"Use {_form(hook, hooks)}: a step is {times(found.speedup)} as fast; {waits}."
        if reference is not None and not hook.is_16_bit:
            gain = reference.step_s / predictions[hook.name].step_s
            text += f" It is {times(gain)} as fast as with 16 bits ({reference.hook})."
        text += _written(hook, hooks, ranks_per_node)
    if found.untested == found.hook:
        return text
    hook, untested = _named(found.untested, hooks), predictions[found.untested]
    cost = accuracy_cost(hook)
    assert cost is not None
    rate = predictions["none"].collective_bytes / untested.collective_bytes
    # With nodes the table has other bytes: those that leave a node.
    sends = "sends" if ranks_per_node == 1 else "compresses to"
    text = (
        f"{text} {_form(hook, hooks)} would be {times(found.untested_speedup)} as fast, but it {sends} "
        f"{times(rate)} fewer bytes here, and its cost in accuracy was measured at {times(cost.rate)} fewer: "
        "train your own model with it before you rely on that."
    )
    if reference is not None:
        gain, rate = (
            reference.step_s / untested.step_s,
            reference.collective_bytes / untested.collective_bytes,
        )
        text += f" Against 16 bits it would be {times(gain)} as fast, with {times(rate)} fewer bytes."
    return text + _written(hook, hooks, ranks_per_node)


def _named(name: str, hooks: Sequence[Candidate]) -> Candidate:
    return next(each for each in hooks if each.name == name)


def _form(hook: Candidate, hooks: Sequence[Candidate]) -> str:
    is_flat = has_forms(hook, hooks) and not hook.is_by_nodes
    return f"{hook.name} flat" if is_flat else hook.name


def _written(hook: Candidate, hooks: Sequence[Candidate], ranks_per_node: int) -> str:
    return f" Its state: {hook.state(ranks_per_node)}." if has_forms(hook, hooks) else ""


def times(factor: float) -> str:
    """Format a factor for people."""
    return f"{factor:.{0 if factor >= 9.95 else 1}f} times"


@dataclass(frozen=True)
class Scenario:
    """A model on a device, to be predicted on any link and number of ranks.

    hooks: the hooks to compare, "none" among them.
    max_loss: the most nats that a recommended hook may cost.
    compute_source, cost_source: the origin of the model's times, and of the hooks' own work, in words.
    """

    model: str
    buckets: tuple[Bucket, ...]
    dtype: torch.dtype
    device: Device
    backend: str
    compute: Compute
    hooks: tuple[Candidate, ...]
    max_loss: float
    compute_source: str
    cost_source: str

    @property
    def numel(self) -> int:
        return sum(bucket.numel for bucket in self.buckets)

    def forms(self, link: Link, world_size: int) -> tuple[Candidate, ...]:
        """Return the hooks; between nodes of several ranks, each is followed by its form by nodes, if any.

        Raises ValueError for ranks that aren't whole nodes.
        """
        num_nodes = link.num_nodes(world_size)
        has_nodes = num_nodes > 1 and link.nodes.ranks > 1
        return tuple(forms_of(self.hooks, has_nodes=has_nodes, is_gloo=link.gathers_by_messages))

    def predict(self, link: Link, world_size: int) -> dict[str, StepPrediction]:
        """Return the prediction for every form of every hook, by name, and for a 16-bit hook if possible."""
        hooks = self.forms(link, world_size)
        references = [CANDIDATES[name] for name in REFERENCES]
        timed = [hook for hook in references if self.device.has_time_of(hook)]
        compared = tuple(dict.fromkeys((*hooks, *timed[:1])))
        return {work.hook: work.on(link, self.compute) for work in self._work(link, world_size, compared)}

    def recommend(self, link: Link, world_size: int) -> Recommendation:
        hooks = self.forms(link, world_size)
        return self._recommend(link, self._work(link, world_size, hooks), hooks)

    def sweep(
        self, link: Link, bandwidths: Sequence[float], world_sizes: Sequence[int]
    ) -> list[list[Recommendation]]:
        """Return a row of recommendations for each world size, one for each bandwidth in bytes/s.

        link: the links' other properties. Its rates for single kinds of collectives are dropped.
        """
        links = [replace(link, bytes_per_s=bandwidth, measured={}) for bandwidth in bandwidths]
        found = []
        for world_size in world_sizes:
            allowed = eligible(self.forms(link, world_size), self.max_loss)
            work = self._work(link, world_size, allowed)
            found.append([self._recommend(each, work, allowed) for each in links])
        return found

    def _work(self, link: Link, world_size: int, hooks: Sequence[Candidate]) -> list[StepWork]:
        return [step_work(self.buckets, hook, link, world_size, self.device, self.dtype) for hook in hooks]

    def _recommend(self, link: Link, work: Sequence[StepWork], hooks: Sequence[Candidate]) -> Recommendation:
        predictions = {each.hook: each.on(link, self.compute) for each in work}
        return recommend(predictions, self.compute.step_s, hooks, self.max_loss)


def forms_of(hooks: Iterable[Candidate], *, has_nodes: bool, is_gloo: bool) -> Iterator[Candidate]:
    """Yield hooks. If has_nodes, each is followed by its form by nodes, if it has one."""
    for hook in hooks:
        yield hook
        if has_nodes and hook.has_form_by_nodes(is_gloo=is_gloo):
            yield hook.by_nodes()
