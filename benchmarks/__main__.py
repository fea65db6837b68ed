"""Time our operations and hooks beside torch's: python -m benchmarks.

Every module in benchmarks/kernels/ is a family of operations. It defines cases(device, quick) ->
Iterator[Case], see harness.py, and is found by itself.

With --compile the kernels of the cases are compiled, for runs of all cases later, and nothing is timed.

With --record a case's rows are written as soon as the case has been timed: a later failure loses nothing. A
case with a wrong result has no rows.

Exit status: 0 when every case was right and timed, 1 otherwise.
"""

import argparse
import importlib
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
import triton

from benchmarks import environment, outcomes
from benchmarks.clock import Clock, gb_per_s
from benchmarks.environment import floor_us
from benchmarks.harness import Case, check
from benchmarks.records import RESULTS, Row, append, file_of, table

COPY = "copy"  # the provider that copies as many bytes as the operation moves

# The beginnings of the cases that come first on a GPU, as there may be no time for the last ones. First quick
# cases of every family, then what large models add to them.
FIRST = (
    "quantization_hook",
    "bf16_compress_hook",
    "quantize 25 MiB, 4 bits, W=8 float32",
    "average 25 MiB, 4 bits, W=8 float32",
    "dequantize 25 MiB, 4 bits, W=8 float32",
    "compress_cast 25 MiB float32->bfloat16",
    "decompress_cast 25 MiB bfloat16->float32",
    "flatten resnet50, 5 buckets float32",
    "unflatten resnet50, 5 buckets float32",
    "reducer resnet50, bucket views",
    "powerSGD_hook resnet50, 5 buckets, r=4 float32",
    "powerSGD_hook bert-large, 38 buckets, r=4 float32",
    "powerSGD_hook bert-large, 38 buckets, r=4, int8 factors",
    "reducer bert-large",
    "powerSGD_hook gpt2-medium, 37 buckets, r=4 float32",
    *(f"powerSGD_hook bert-large, 38 buckets, r={rank} float32" for rank in (32, 1, 8)),
    "powerSGD_hook bert-large, 22 buckets, r=4 bfloat16",
    "flatten bert-large, 38 buckets float32",
    "unflatten bert-large, 38 buckets float32",
)
# The beginnings of cases that need no kernels beside other cases'. PowerSGD's depend on rank and dtype alone.
COMPILED_BY_OTHERS = (
    *("average ", "dequantize ", "reducer ", "powerSGD_hook gpt2-medium"),
    *(f"powerSGD_hook bert-large, 38 buckets, r={rank} float32" for rank in (1, 4, 32)),
)


def discover(device: torch.device, quick: bool) -> list[Case]:
    """List the cases: FIRST, then hooks, the modules in benchmarks/kernels/, the reducers, and PowerSGD."""
    folder = Path(__file__).parent / "kernels"
    kernels = sorted(f"kernels.{module.name}" for module in pkgutil.iter_modules([str(folder)]))
    names = ["hooks", *kernels, "reducer", "powersgd"]
    modules = [importlib.import_module(f"benchmarks.{name}") for name in names]
    return sorted((case for module in modules for case in module.cases(device, quick)), key=_place)


def _place(case: Case) -> int:
    """Return the index in FIRST of the case's beginning, or beyond."""
    return next((index for index, start in enumerate(FIRST) if str(case).startswith(start)), len(FIRST))


def to_compile(cases: Iterable[Case]) -> list[Case]:
    """Return enough of the cases to compile the kernels of all, those that take longest first."""
    found = [case for case in cases if not str(case).startswith(COMPILED_BY_OTHERS)]
    return sorted(found, key=lambda case: case.name != "powerSGD_hook")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--filter", default="", help="only cases whose name holds this text")
    parser.add_argument("--quick", action="store_true", help="small problems, few repetitions")
    text = "time nothing, but compile the kernels, of every Nth case from the Ith on, counted from 0"
    parser.add_argument("--compile", metavar="I/N", help=text)
    parser.add_argument("--record", action="store_true", help="append the rows to --results")
    text = "a part of gpu-check that failed before, noted in the rows (repeatable)"
    parser.add_argument("--failed-part", action="append", default=[], help=text)
    parser.add_argument("--outcomes", type=Path, help="a file to note each case's outcome in")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--device", help="cuda or cpu; cuda where there is one")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="start no case after this many seconds"
    )
    return parser.parse_args(argv)


def measure(
    cases: Sequence[Case],
    run: Callable[[Case], list[Row]],
    budget_s: float = float("inf"),
    keep: Callable[[list[Row]], object] = lambda rows: None,
    noted: Path | None = None,
) -> tuple[list[Row], list[str], list[str]]:
    """Run the cases, print their rows, keep them and note the outcome, case by case.

    Returns the rows, the cases that failed and those not reached.
    """
    rows: list[Row] = []
    failed: list[str] = []
    start = time.monotonic()
    outcomes.plan(noted, map(str, cases))
    for number, case in enumerate(cases, 1):
        seconds = time.monotonic() - start
        if seconds > budget_s:
            return rows, failed, [str(case) for case in cases[number - 1 :]]
        print(f"[{number}/{len(cases)}] {seconds:.1f} s: {case}", flush=True)
        try:
            case_rows = run(case)
        except Exception as error:
            # One broken case must not hide the results of the others.
            traceback.print_exc(file=sys.stdout)
            failed.append(str(case))
            outcomes.note(noted, str(case), outcomes.FAILED, error=repr(error))
            continue
        if case_rows:
            print(table(case_rows), flush=True)
        keep(case_rows)
        outcomes.note(noted, str(case), outcomes.PASSED)
        rows += case_rows
    return rows, failed, []


def compile_case(case: Case) -> list[Row]:
    """Call our providers once, which compiles their kernels for every process; return no rows."""
    torch.cuda.empty_cache()  # other processes need the last case's memory
    setup = case.build()
    for name, provider in setup.providers.items():
        if not name.startswith("torch"):
            setup.restore(name)
            provider()
    return []


def run_case(case: Case, clock: Clock) -> list[Row]:
    """Check the case, time it beside a copy of as many bytes, and return one row per provider."""
    setup = case.build()
    errors = {**check(case, setup), COPY: None}
    timings = clock.time(setup.providers | {COPY: clock.copy(case.num_bytes)}, case.seconds)
    baseline = timings[case.baseline]
    least_us = floor_us(clock.device, case.num_bytes, case.min_launches)
    rows = []
    for name, timing in timings.items():
        rate = gb_per_s(case.num_bytes, timing.us.p50)
        times_baseline = timing.times(baseline)
        rows.append(
            {
                "case": case.name,
                "label": case.label,
                "dtype": case.dtype,
                "provider": name,
                "num_bytes": case.num_bytes,
                "p20_us": timing.us.p20,
                "p50_us": timing.us.p50,
                "p80_us": timing.us.p80,
                "host_us": timing.host_us,
                "host_us_per_bucket": None if timing.host_us is None else timing.host_us / case.num_buckets,
                "bytes_per_element": case.num_bytes / case.num_elements if case.num_elements else None,
                "num_rounds": len(timing.samples_us),
                "gb_per_s": rate,
                "percent_of_copy": 100 * rate / clock.copy_gb_per_s,
                "copy_gb_per_s": clock.copy_gb_per_s,
                "baseline": case.baseline,
                "times_baseline": times_baseline.p50,
                "times_baseline_p20": times_baseline.p20,
                "times_baseline_p80": times_baseline.p80,
                "min_launches": case.min_launches,
                "floor_us": least_us,
                "times_floor": timing.us.p50 / least_us if least_us else None,
                "error": errors[name],
            }
        )
    return rows


def main(argv: Sequence[str] | None = None, cases: Iterable[Case] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    else:
        # As under torchrun. torch's hooks compute on gloo's threads, which would start more threads, and more
        # threads than cores slow down whatever computes in this process later.
        torch.set_num_threads(1)
    if triton.knobs.runtime.interpret:
        print("benchmarks: unset TRITON_INTERPRET: the interpreter's times mean nothing")
        return 1
    torch.manual_seed(0)
    facts = environment.describe(device)
    for name, value in facts.items():
        print(f"{name:>18}: {value}")
    found = discover(device, args.quick) if cases is None else list(cases)
    selected = [case for case in found if args.filter in str(case)]
    if not selected:
        print(f"benchmarks: no case's name holds {args.filter!r}; there are:")
        print("\n".join(f"  {case}" for case in found))
        return 1
    if args.compile:
        index, count = map(int, args.compile.split("/"))
        selected = to_compile(selected)[index::count]
        _, failed, _ = measure(selected, compile_case, args.budget_s, noted=args.outcomes)
        return int(bool(failed))
    clock = Clock(device, args.quick)
    print(f"copy bandwidth {clock.copy_gb_per_s:.1f} GB/s (read + written)")
    facts["failed_parts"] = args.failed_part
    if args.record and args.results == RESULTS and device.type == "cpu" and facts["load"] > 0.5:
        print(f"benchmarks: a load of {facts['load']:.1f} is too much for {RESULTS}: at most 0.5")
        return 1
    path = file_of(facts, args.results)

    def keep(rows: list[Row]) -> None:
        if args.record:
            append(path, ({**facts, **row} for row in rows))

    rows, failed, skipped = measure(
        selected, partial(run_case, clock=clock), args.budget_s, keep, args.outcomes
    )
    for name in failed:
        print(f"benchmarks: FAILED {name}")
    for name in skipped:
        print(f"benchmarks: not reached within {args.budget_s:g} s: {name}")
    if args.record:
        print(f"benchmarks: {len(rows)} rows appended to {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
