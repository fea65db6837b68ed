"""What compression has cost in accuracy: the small GPT of docs/accuracy.md, beside which speed is shown."""

from __future__ import annotations

from dataclasses import dataclass

from .candidates import Candidate

SOURCE = (
    "docs/accuracy.md: validation loss above no compression, in nats per byte, of one small GPT (137,000 "
    "parameters, 4 ranks, 2 seeds, which differ by up to 0.012), at so many times fewer bytes there. Larger "
    "models have not been measured."
)


@dataclass(frozen=True)
class AccuracyCost:
    """What a hook cost the small GPT.

    nats: the loss above that of no compression. rate: how many times fewer bytes per step it sent there.
    note: where the cost is another hook's, or was measured on another number of ranks.
    """

    nats: float
    rate: float
    note: str = ""

    def __str__(self) -> str:
        return f"{self.nats:+.3f} at {self.rate:.3g}×{', ' + self.note if self.note else ''}"


MEASURED = {
    "none": AccuracyCost(0.0, 1.0),
    "fp16": AccuracyCost(0.002, 2.0),
    "int8": AccuracyCost(-0.003, 3.8),
    "int4": AccuracyCost(0.008, 7.1),
    "powersgd:16": AccuracyCost(0.001, 2.6),
    "powersgd:8": AccuracyCost(0.031, 5.6),
    "powersgd:4": AccuracyCost(0.079, 10.5),
    "powersgd:8:bf16": AccuracyCost(0.025, 11.3),
    "powersgd:16:int8": AccuracyCost(0.012, 11.1),
    "powersgd:8:int8": AccuracyCost(0.037, 20.6),
    "powersgd:4:int8": AccuracyCost(0.088, 35.1),
}
# benchmarks/results/accuracy_2_ranks.jsonl, 4 seeds: hooks that the later run hasn't.
ON_2_RANKS = {
    "bf16": AccuracyCost(0.0, 2.0, "2 ranks"),
    "powersgd:2": AccuracyCost(0.152, 18.4, "2 ranks"),
    "powersgd:1": AccuracyCost(0.268, 29.7, "2 ranks"),
}


def accuracy_cost(hook: Candidate) -> AccuracyCost | None:
    """Return what the hook cost; None where neither it nor a hook like it was measured.

    PowerSGD with smaller factors takes the cost of the same rank with factors of 8 bits, which are rounded
    most, or else with factors of 32.
    """
    measured = ON_2_RANKS | MEASURED
    if hook.name in measured:
        return measured[hook.name]
    for other, factors in ((f"powersgd:{hook.rank}:int8", "int8"), (f"powersgd:{hook.rank}", "fp32")):
        if (cost := measured.get(other)) is not None:
            note = ", ".join(filter(None, (cost.note, f"{factors} factors")))
            return AccuracyCost(cost.nats, cost.rate, note)
    return None
