"""What each hook costs in accuracy, as docs/accuracy.md has measured it."""

from dataclasses import dataclass

from .named import NamedHook


@dataclass(frozen=True)
class AccuracyCost:
    """A hook's measured cost in accuracy on the small GPT.

    nats: the loss minus the loss without compression.
    rate: how many times fewer bytes per step the hook sent.
    note: for a cost that was measured with another hook, or on another number of ranks.
    """

    nats: float
    rate: float
    note: str = ""

    def __str__(self) -> str:
        return f"{self.nats:+.3f} at {self.rate:.3g}×{', ' + self.note if self.note else ''}"


MEASURED = {
    "none": AccuracyCost(0.0, 1.0),
    "fp16": AccuracyCost(0.0, 2.0),
    "int8": AccuracyCost(0.0, 3.8),
    "int4": AccuracyCost(0.004, 7.1),
    "powersgd:16": AccuracyCost(0.002, 2.6),
    "powersgd:8": AccuracyCost(0.032, 5.6),
    "powersgd:4": AccuracyCost(0.083, 10.5),
    "powersgd:8:bf16": AccuracyCost(0.027, 11.3),
    "powersgd:16:int8": AccuracyCost(0.006, 11.1),
    "powersgd:8:int8": AccuracyCost(0.032, 20.6),
    "powersgd:4:int8": AccuracyCost(0.087, 35.1),
}
# From benchmarks/results/accuracy_2_ranks.jsonl, 4 seeds: hooks that weren't measured on 4 ranks.
ON_2_RANKS = {
    "bf16": AccuracyCost(0.0, 2.0, "2 ranks"),
    "powersgd:2": AccuracyCost(0.152, 18.4, "2 ranks"),
    "powersgd:1": AccuracyCost(0.268, 29.7, "2 ranks"),
}


def accuracy_cost(hook: NamedHook) -> AccuracyCost | None:
    """Return the hook's cost; None if neither the hook nor a similar one was measured.

    A hook by nodes, which was not measured, is assumed to cost as much as flat. It sums fewer codes.

    Similar to PowerSGD is PowerSGD of equal rank with int8 factors, the coarsest, or else with fp32 factors.
    """
    measured = ON_2_RANKS | MEASURED
    if hook.flat_name in measured:
        return measured[hook.flat_name]
    for other, factors in ((f"powersgd:{hook.rank}:int8", "int8"), (f"powersgd:{hook.rank}", "fp32")):
        if (cost := measured.get(other)) is not None:
            note = ", ".join(filter(None, (cost.note, f"{factors} factors")))
            return AccuracyCost(cost.nats, cost.rate, note)
    return None
