"""Print the five kernels that take longest on a 25 MiB bucket, and the bytes that they must move.

python -m benchmarks.slowest. Every operation is called once, with an empty cache, under torch.profiler. On a
CPU, where there are no kernels, whole operations are timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import environment, models, outcomes, powersgd_stages
from benchmarks.clock import Clock, gb_per_s
from benchmarks.harness import Case
from benchmarks.kernels import casting, flattening, quantizing
from benchmarks.powersgd_problem import HOOK_STAGES, Problem
from benchmarks.records import RESULTS, Row, append, file_of

NUM_SLOWEST = 5
RANKS = (4, 32)
# The bytes of an element of P that these kernels read and write. back_project launches them, too.
P_BYTES = {"_gram_kernel": 4, "_orthonormalize_kernel": 4 + 4}


class Launched(NamedTuple):
    """A launched kernel; on a CPU, an operation."""

    kernel: str
    us: float


def operations(device: torch.device) -> list[tuple[Case, int]]:
    """List every operation, with the number of elements of P in it."""
    found = []
    bucket = tuple(models.one_bucket("bert-large"))
    for rank in RANKS:
        problem = Problem("bert-large", (bucket,), torch.float32, rank, device)
        p_numel = sum(matrix.rows * matrix.rank for matrix in problem.layouts[0].matrices)
        label = f"bert-large, 1 bucket, r={rank}"
        found += [(powersgd_stages.case_of(label, problem, stage), p_numel) for stage in HOOK_STAGES]
    families = [family.cases(device, quick=True) for family in (quantizing, casting, flattening)]
    return found + [(case, 0) for cases in families for case in cases if case.comes_first]


def call_of(case: Case) -> Callable[[], object]:
    """Return the call of our operation, with everything compiled."""
    call = case.build().providers["gradcomp"]
    call()
    return call


def on_cpu(clock: Clock, cases: Iterable[Case]) -> list[list[Launched]]:
    return [[Launched(case.name, clock.sample_us(call_of(case)))] for case in cases]


def by_profiler(clock: Clock, cases: Iterable[Case]) -> list[list[Launched]]:
    """Return the kernels that each operation launches."""
    launched = []
    for case in cases:
        call = call_of(case)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            clock.sample_us(call)
            torch.cuda.synchronize()
        events = [event for event in profile.events() if is_ours(event.name)]
        launched.append([Launched(event.name, event.time_range.elapsed_us()) for event in events])
    return launched


def is_ours(kernel: str) -> bool:
    return kernel.startswith("_") and kernel.endswith("_kernel")


def slowest(
    launched: Sequence[Sequence[Launched]], found: Sequence[tuple[Case, int]], clock: Clock, measured_by: str
) -> list[Row]:
    """Return a row for each of the slowest kernels."""
    rows = []
    for (case, p_numel), of_case in zip(found, launched, strict=True):
        for each in of_case:
            num_bytes = P_BYTES[each.kernel] * p_numel if each.kernel in P_BYTES else case.num_bytes
            rate = gb_per_s(num_bytes, each.us)
            row = {"case": case.name, "label": case.label, "dtype": case.dtype, **each._asdict()}
            row |= {"measured_by": measured_by, "num_bytes": num_bytes, "gb_per_s": rate}
            rows.append(
                row
                | {"copy_gb_per_s": clock.copy_gb_per_s, "percent_of_copy": 100 * rate / clock.copy_gb_per_s}
            )
    return sorted(rows, key=lambda row: -row["us"])[:NUM_SLOWEST]


def show(row: Row) -> str:
    return (
        f"{row['kernel']:<26}{row['us']:>9.1f} us{row['num_bytes'] / 1e6:>9.2f} MB"
        f"{row['gb_per_s']:>9.1f} GB/s{row['percent_of_copy']:>5.0f} % of a copy's"
        f"  {row['case']} {row['label']} {row['dtype']}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slowest", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--outcomes", type=Path, help="a file to note the kernels in")
    args = parser.parse_args(argv)
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    clock, found = Clock(device, quick=True), operations(device)
    cases = [case for case, _ in found]
    launched = by_profiler(clock, cases) if device.type == "cuda" else on_cpu(clock, cases)
    rows = slowest(launched, found, clock, "torch.profiler" if device.type == "cuda" else "clock")
    print("The slowest kernels on a 25 MiB bucket:")
    print("\n".join(map(show, rows)), flush=True)
    facts = environment.describe(device)
    append(file_of(facts, args.results), ({**facts, **row} for row in rows))
    for row in rows:
        outcomes.note(args.outcomes, show(row), outcomes.PASSED)
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
