"""Test and time everything on a GPU in under 8 minutes: python -m benchmarks.gpu_check (make gpu-check).

It needs a bare checkout with torch, triton, numpy, pytest and hypothesis, and no network. Its parts run one
after another; within a part of tests, processes share them:

new         what no GPU has run yet
kernels     the kernels against float64 and plain torch, those first whose failure says most
arrival     PowerSGD's arrival counters under contention
hooks       streams and hooks, on NCCL and gloo
reducer     the Reducer, the wrapper and FSDP2
compile     the benchmarks' kernels, in several processes
benchmarks  python -m benchmarks: beside torch's hooks and beside a copy of as many bytes

Each part has a time limit. A part that fails or is killed at its limit doesn't stop the next one. As soon as
a part ends, the results folder has its output, PART.log (of compile: benchmarks.log), and its row in
DEVICE-parts.jsonl: device, versions, commit, verdict, and what failed or was left. Exit status: 0 if all
parts passed, 1 if one did not, 2 if nothing could be run.

With --device cpu it tries itself out where there is no GPU: few tests on interpreted kernels, small
benchmarks in plain torch. A pass on a CPU proves nothing about kernels, streams and NCCL.
"""

import argparse
import contextlib
import importlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import outcomes

ROOT = Path(__file__).resolve().parent.parent
ARRIVAL = "tests/kernels/powersgd/test_arrival.py"
# Their failures say most: steps of PowerSGD and their stages, stages of quantization, copies, then what steps
# are made of.
FIRST = (
    "tests/kernels/powersgd/test_step.py",
    "tests/kernels/quantize/test_stages.py",
    "tests/kernels/test_copy.py",
    "tests/kernels/test_cast.py",
    "tests/kernels/powersgd/test_orthonormalize.py",
    "tests/kernels/powersgd/test_random.py",
    "tests/kernels/powersgd/test_plan.py",
)
# The other files with tests on the device, likewise.
HOOKS = (
    "tests/comm/test_late_gradients.py",
    "tests/hooks/test_every_hook.py",
    "tests/hooks/test_kernels.py",
    "tests/compress/test_reduce_scatter.py",
    "tests/hooks/test_default_hooks.py",
    "tests/hooks/test_powersgd_resume.py",
    "tests/testing/test_check.py",
)
REDUCER = (
    "tests/reducer/test_gradients.py",
    "tests/reducer/test_average.py",
    "tests/reducer/test_broadcast.py",
    "tests/parallel/test_averaged.py",
    "tests/parallel/test_training.py",
    "tests/parallel/test_state.py",
    "tests/parallel/test_join.py",
    "tests/fsdp/test_feedback.py",
)
# On a CPU, which interprets kernels, a part has every Nth of its tests, unless --tests chooses some.
EVERY_ON_CPU = 16
PASSED = "passed"


@dataclass(frozen=True)
class Part:
    """A part of the check.

    limit_s: the time after which it is killed.
    tests: files and folders whose tests on the device it runs.
    cores: the share of the cores that get a process each. Some are left to the ranks of tests.
    module: the program that it runs instead of tests, and its options.
    shares: the number of processes that share a program's cases; 0 if the program runs once.
    """

    name: str
    limit_s: float
    tests: tuple[str, ...] = ()
    cores: float = 0.0
    module: tuple[str, ...] = ()
    shares: int = 0

    def commands(self, args: argparse.Namespace, scratch: Path, failed: Sequence[str]) -> list[list[str]]:
        """Return the arguments of each of its processes, which note outcomes in the scratch folder."""
        noted = ["--outcomes", str(scratch / "outcomes"), "--device", args.device]
        if self.module:
            options = ["--results", str(args.results), *self.module[1:]]
            options += [option for part in failed for option in ("--failed-part", part)]
            options += ["--quick"] * (args.device == "cpu")
            command = ["-m", self.module[0], *options, *noted]
            count = min(self.shares, os.cpu_count() or 1)
            return [[*command, "--compile", f"{i}/{count}"] for i in range(count)] or [command]
        command = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.claimed", "--claims", str(scratch)]
        command += ["-m", "device", *self.tests, *shlex.split(args.tests), *noted]
        if args.device == "cpu" and not args.tests:
            command += ["--every", str(EVERY_ON_CPU)]
        return [command] * max(2 if self.cores else 1, round(self.cores * (os.cpu_count() or 1)))


def tests_of_kernels() -> tuple[str, ...]:
    """Return the files of tests/kernels without ARRIVAL, beginning with FIRST."""
    paths = (ROOT / "tests" / "kernels").rglob("test_*.py")
    return (*FIRST, *sorted({str(path.relative_to(ROOT)) for path in paths} - {*FIRST, ARRIVAL}))


PARTS = (
    Part("new", 60, ("tests/test_new_on_gpus.py",), cores=0.5),
    Part("kernels", 55, tests_of_kernels(), cores=0.75),
    Part("arrival", 40, (ARRIVAL,)),
    Part("hooks", 85, HOOKS, cores=0.5),
    Part("reducer", 45, REDUCER, cores=0.5),
    # Together they take 45 GB of the GPU's memory.
    Part("compile", 45, module=("benchmarks",), shares=8),
    # It stops by itself, so that no case is cut off.
    Part("benchmarks", 140, module=("benchmarks", "--record", "--budget-s", "115")),
)


def run(commands: Sequence[Sequence[str]], limit_s: float, log: Path) -> list[int | None]:
    """Run Python with each of these arguments at once; return the exit statuses, None for what was killed."""
    with log.open("ab") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=_environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for command in commands
        ]
        deadline = time.monotonic() + limit_s
        try:
            while time.monotonic() < deadline and any(each.poll() is None for each in processes):
                time.sleep(0.1)
            return [each.poll() for each in processes]
        finally:
            for each in processes:
                with contextlib.suppress(ProcessLookupError):
                    if each.poll() is None:
                        os.kill(each.pid, signal.SIGABRT)  # pytest then prints stacks
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            each.wait(timeout=1)
                    os.killpg(each.pid, signal.SIGKILL)  # ranks outlive a parent that is killed
                each.wait()


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    # All ranks are on this machine, which need not have any network.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # Processes and ranks share the cores.
    environment.setdefault("OMP_NUM_THREADS", "1")
    # Of the part's 40 s, the rest is for starting, and for compiling what is left to compile.
    environment.setdefault("GRADCOMP_ARRIVAL_SECONDS", "25")
    # Ranks that hang are to be reported before the part is killed.
    environment.setdefault("GRADCOMP_RANKS_TIMEOUT_S", "25")
    # Plugins that happen to be installed are not loaded: their warnings would be errors.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return environment


def run_part(part: Part, args: argparse.Namespace, failed: Sequence[str]) -> dict[str, Any]:
    """Run a part, and return what its row says of it."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gradcomp-") as scratch:
        commands = part.commands(args, Path(scratch), failed)
        # Both parts of one program share a log: eight files are the most that some machines give back.
        statuses = run(commands, part.limit_s, args.results / f"{(part.module or [part.name])[0]}.log")
        found = outcomes.read(Path(scratch, "outcomes"))
    wrong = {name: row.get("error") for name, row in found.items() if row["outcome"] == outcomes.FAILED}
    status = next((status for status in statuses if status), 1 if wrong else 0)
    if None in statuses:
        verdict = f"killed after {part.limit_s:.0f} s"
    else:
        verdict = PASSED if status == 0 else f"FAILED (exit status {status})"
    return {
        "part": part.name,
        "verdict": verdict,
        "seconds": round(time.monotonic() - start, 1),
        "counts": Counter(row["outcome"] for row in found.values()),
        "failed": wrong,
        "left": [name for name, row in found.items() if row["outcome"] == outcomes.LEFT],
    }


def missing(device: str) -> str | None:
    """Return the reason why nothing can be run here, or None if there is none."""
    try:
        torch, *_ = map(importlib.import_module, ("torch", "triton", "numpy", "pytest", "hypothesis"))
    except ImportError as error:
        return f"this Python ({sys.executable}) lacks {error.name}"
    found = importlib.util.find_spec("tests.claimed")
    if found is None or not str(found.origin).startswith(str(ROOT)):
        return f"another package is called tests: {found and found.origin}"
    if device == "cuda" and not torch.cuda.is_available():
        return f"no CUDA GPU is available to torch {torch.__version__}"
    return None


def describe(device: str) -> dict[str, Any]:
    """Print and return the device, the versions and the commit."""
    import torch

    from benchmarks import environment

    facts: dict[str, Any] = environment.describe(torch.device(device))
    if device == "cuda":
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["num_gpus"] = torch.cuda.device_count()  # NCCL has a rank on each
    for name, value in facts.items():
        print(f"{name:>18}: {value}", flush=True)
    return facts


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = [part.name for part in PARTS]
    parser.add_argument("--only", action="append", choices=names, help="run this part (repeatable)")
    text = "leave this part out (repeatable)"
    parser.add_argument("--skip", action="append", choices=names, default=[], help=text)
    text = "arguments of pytest for the parts of tests, as in --tests '-k every_stage'"
    parser.add_argument("--tests", default="", help=text)
    text = "folder of the results; benchmarks/results, or on a CPU build/gpu-check"
    parser.add_argument("--results", type=Path, help=text)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(argv)
    default = ROOT / ("benchmarks/results" if args.device == "cuda" else "build/gpu-check")
    args.results = (args.results or default).resolve()  # parts run in the checkout's root
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    problem = missing(args.device)
    if problem:
        print(f"gpu-check: {problem}; nothing was run")
        return 2
    facts = describe(args.device)
    args.results.mkdir(parents=True, exist_ok=True)
    from benchmarks.records import append, file_of

    path = file_of(facts, args.results)
    rows: list[dict[str, Any]] = []
    for part in PARTS:
        if part.name in args.skip or (args.only and part.name not in args.only):
            continue
        print(f"==== {part.name}: at most {part.limit_s:.0f} s", flush=True)
        row = run_part(part, args, [each["part"] for each in rows if each["verdict"] != PASSED])
        rows.append(row)
        append(path.with_name(f"{path.stem}-parts.jsonl"), [{**facts, **row}])
        print(f"==== {part.name}: {row['verdict']}", flush=True)
        for name, error in row["failed"].items():
            print(f"{name}: {error}", flush=True)
    print(f"\n{'part':<12}{'seconds':>8}{'passed':>8}{'failed':>8}{'skipped':>8}{'left':>8}  verdict")
    for row in rows:
        counts = "".join(f"{row['counts'][name]:>8}" for name in (PASSED, "failed", "skipped", "left"))
        print(f"{row['part']:<12}{row['seconds']:>8.1f}{counts}  {row['verdict']}")
    print(f"gpu-check: results in {args.results}", flush=True)
    return int(any(row["verdict"] != PASSED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
