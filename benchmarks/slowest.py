"""Print the five kernels that take longest on a 25 MiB bucket, and the bytes that they must move.

python -m benchmarks.slowest. Every operation is called once, with an empty cache, under torch.profiler; then
under ncu, if it is on the PATH, which also counts the bytes that the kernels do move. On a CPU, where there
are no kernels, whole operations are timed.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
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
TIME, BYTES = "gpu__time_duration.sum", "dram__bytes.sum"
# In ns and bytes, with the clock as in training, and only what is launched between start and stop.
NCU = ["--csv", "--page", "raw", "--print-units", "base", "--metrics", f"{TIME},{BYTES}"]
NCU += ["--clock-control", "none", "--profile-from-start", "off"]
TIME_S = 22  # until ncu is stopped, counted from main: gpu-check gives 30 s to all


class Launched(NamedTuple):
    """A launched kernel; on a CPU, an operation. dram_bytes: what it moved, as counted by ncu."""

    kernel: str
    us: float
    dram_bytes: float | None = None


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


def call_under_ncu(clock: Clock, cases: Iterable[Case]) -> None:
    """Call every operation, after a kernel of torch's that empties the cache."""
    for case in cases:
        call = call_of(case)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        clock.sample_us(call)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def by_ncu(ncu: str, num_operations: int, deadline: float) -> list[list[Launched]]:
    """Return the kernels that each operation launches; nothing, and print why, if ncu fails."""
    command = [ncu, *NCU, sys.executable, "-m", "benchmarks.slowest", "--device", "cuda", "--under-ncu"]
    try:
        left_s = max(1.0, deadline - time.monotonic())
        done = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        output = "there was no time left"
    launched = parse_ncu(output)
    if len(launched) == num_operations:
        return launched
    print(f"ncu measured {len(launched)} operations of {num_operations}: {output[-2000:]}")
    return []


def parse_ncu(output: str) -> list[list[Launched]]:
    """Return the kernels that each operation launches. A kernel of torch's comes before each operation."""
    start = output.find('"ID"')
    launched: list[list[Launched]] = []
    is_new = True
    for row in csv.DictReader(output[start:].splitlines() if start >= 0 else ()):
        kernel = (row["Kernel Name"] or "").partition("(")[0]
        if not row["ID"].isdigit() or not is_ours(kernel):
            is_new = True
            continue
        if is_new:
            launched.append([])
        ns, num_bytes = (float(row[name].replace(",", "")) for name in (TIME, BYTES))
        launched[-1].append(Launched(kernel, ns / 1e3, num_bytes))
        is_new = False
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
    moved = "-" if row["dram_bytes"] is None else f"{row['dram_bytes'] / 1e6:.2f}"
    return (
        f"{row['kernel']:<26}{row['us']:>9.1f} us{row['num_bytes'] / 1e6:>9.2f} MB, moved {moved:>7}"
        f"{row['gb_per_s']:>9.1f} GB/s{row['percent_of_copy']:>5.0f} % of a copy's"
        f"  {row['case']} {row['label']} {row['dtype']}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slowest", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--outcomes", type=Path, help="a file to note the kernels in")
    parser.add_argument("--under-ncu", action="store_true", help="only launch, for ncu to measure")
    args = parser.parse_args(argv)
    start = time.monotonic()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    clock, found = Clock(device, quick=True), operations(device)
    cases = [case for case, _ in found]
    if args.under_ncu:
        call_under_ncu(clock, cases)
        return 0
    facts = environment.describe(device)
    ways = {"torch.profiler": partial(by_profiler, clock, cases)}
    if device.type == "cpu":
        ways = {"clock": partial(on_cpu, clock, cases)}
    elif ncu := shutil.which("ncu"):
        ways["ncu"] = partial(by_ncu, ncu, len(cases), start + TIME_S)
    is_measured = False
    for way, measure in ways.items():
        launched = measure()
        rows = slowest(launched, found, clock, way) if launched else []
        print(f"The slowest kernels on a 25 MiB bucket, by {way}:")
        print("\n".join(map(show, rows)), flush=True)
        append(file_of(facts, args.results), ({**facts, **row} for row in rows))
        for row in rows:
            outcomes.note(args.outcomes, show(row), outcomes.PASSED)
        is_measured |= bool(rows)
    return 0 if is_measured else 1


if __name__ == "__main__":
    sys.exit(main())
