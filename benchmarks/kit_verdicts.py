"""Print the kit's verdicts on gradcomp's hooks and torch's in Markdown: python -m benchmarks.kit_verdicts"""

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powerSGD
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as torch_quantization

from gradcomp.comm.bucket import Hook
from gradcomp.hooks import AutoState, auto_hook, default_hooks
from gradcomp.hooks import powerSGD_hook as powerSGD
from gradcomp.hooks import quantization_hooks as quantization
from gradcomp.testing.check import PROPERTIES, Report, check_hook
from gradcomp.testing.run import MakeState

MARKS = {"holds": "✓", "fails": "✗", "not claimed": "–", "not checked": "?"}


def power_sgd(module: Any, rank: int) -> MakeState:
    """Return a make_state for gradcomp's or torch's PowerSGD that compresses from the third step on."""
    return partial(module.PowerSGDState, matrix_approximation_rank=rank, start_powerSGD_iter=2)


# Quantizes from the third step on, in blocks that fit in small matrices.
quantized = partial(quantization.QuantizationState, block_size=16, start_iter=2)


def perchannel_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average with quantization_perchannel_hook, in blocks as short as `quantized` makes."""
    return quantization.quantization_perchannel_hook(process_group, bucket, bucket_size=16)


def hooks_of(default: Any, module: Any) -> dict[str, tuple[Hook, MakeState]]:
    return {
        "allreduce": (default.allreduce_hook, None),
        "fp16": (default.fp16_compress_hook, None),
        "bf16": (default.bf16_compress_hook, None),
        "PowerSGD r=1": (module.powerSGD_hook, power_sgd(module, 1)),
        "r=4": (module.powerSGD_hook, power_sgd(module, 4)),
        "batched r=1": (module.batched_powerSGD_hook, power_sgd(module, 1)),
        "PowerSGD r=1, fp16": (default.fp16_compress_wrapper(module.powerSGD_hook), power_sgd(module, 1)),
    }


def automatic(process_group: dist.ProcessGroup) -> AutoState:
    """Make a state that tries four candidates for three steps each, then uses the first: all take as long."""
    names = ("int4", "none", "int8", "powersgd:4:int8")
    return AutoState(process_group, names, start_iter=2, steps_per_turn=3, rounds=1, clock=count().__next__)


OURS: dict[str, tuple[Hook, MakeState]] = {
    **hooks_of(default_hooks, powerSGD),
    "int8": (quantization.quantization_hook, partial(quantized, bits=8)),
    "int4": (quantization.quantization_hook, partial(quantized, bits=4)),
    "pertensor": (quantization.quantization_pertensor_hook, None),
    "perchannel": (perchannel_hook, None),
    "auto": (auto_hook, automatic),
}
TORCHS = {
    **hooks_of(torch_default_hooks, torch_powerSGD),
    "pertensor": (torch_quantization.quantization_pertensor_hook, None),
}


def table(reports: dict[str, Report]) -> str:
    rows = [["", *reports], ["---"] * (1 + len(reports))]
    for name in next(iter(reports.values())).verdicts:
        verdicts = [report.verdicts[name] for report in reports.values()]
        measured = ["" if each.measured is None else f" {each.measured:.1g}" for each in verdicts]
        cells = [MARKS[each.outcome] + text for each, text in zip(verdicts, measured, strict=True)]
        rows.append([name, *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kit_verdicts",
        description="Check gradcomp's hooks and torch's on simulated ranks; print the verdicts as Markdown.",
    )
    text = "workloads that are drawn for each property (default: 25)"
    parser.add_argument("max_examples", nargs="?", type=int, default=25, help=text)
    text = "check this property only; can be given several times"
    names = [each.name for each in PROPERTIES]
    parser.add_argument("--only", action="append", default=[], choices=names, metavar="PROPERTY", help=text)
    parser.add_argument("--hooks", choices=("gradcomp", "torch"), help="check these hooks only")
    options = parser.parse_args(arguments)
    for title, hooks in (("gradcomp", OURS), ("torch", TORCHS)):
        if options.hooks not in (None, title):
            continue
        checked = {"max_examples": options.max_examples, "only": options.only}
        reports = {name: check_hook(*hooks[name], **checked) for name in hooks}
        print(f"### {title}\n\n{table(reports)}\n")
        for name, report in reports.items():
            for failure in report.failures:
                print(f"**{name}**: {failure}\n")


if __name__ == "__main__":
    main()
