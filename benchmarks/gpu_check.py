"""Run everything that needs a GPU, within 8 minutes: python -m benchmarks.gpu_check (make gpu-check).

It needs a bare checkout with torch, triton, numpy, pytest and hypothesis, and no network. In this order:

1. All at once, as they mostly compile kernels, each on a core of its own:
   - streams: lifetimes and stream order; no hook makes the host wait (stream_check.py);
   - ddp-nccl, ddp-gloo: training with each hook beside float64, on torch's DDP and on gradcomp's Reducer
     (ddp_check.py). NCCL has one rank per GPU. On gloo 2 ranks share the first GPU;
   - reducer-nccl, reducer-gloo: the Reducer, the wrapper, FSDP2 and average_ in other scenarios, on the same
     ranks (reducer_check.py);
2. benchmarks: python -m benchmarks alone on the GPU, its rows appended to benchmarks/results/;
3. tests:1, tests:2 ...: processes that share the tests that compute on a GPU, from the folders in TESTS.

Every step has a time limit. A step that fails or exceeds its limit doesn't stop the others. Every step's
outcome is written to a file beside the device's rows as soon as the step ends. Rows of benchmarks name the
steps that failed before. Nothing is recorded if steps were left out. Exit status: 0 if all steps passed, 1 if
one did not, 2 without a GPU.

On a CPU (--device cpu, to try the command out) NCCL's steps run on one rank of gloo. --quick leaves all but a
little of each step out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOTAL_S = 470  # under 8 minutes, including the time to start and to end
# Folders of tests/, with kernels last: what they test is computed in the other steps, too.
TESTS = ("comm", "compress", "fsdp", "hooks", "parallel", "reducer", "testing", "kernels")
# Processes that run tests, on CUDA: of 16 cores, some are left to the ranks of tests.
TEST_PROCESSES = 12

# The benchmark that --quick runs.
QUICK_BENCHMARK = "compress_cast"

PASSED = "passed"


@dataclass(frozen=True)
class Step:
    name: str
    command: list[str]  # the Python interpreter's arguments
    budget_s: float


@dataclass(frozen=True)
class Outcome:
    name: str
    verdict: str
    seconds: float


def stages(device: str, quick: bool = False, claims: str = "claims") -> list[list[Step]]:
    """List the steps by stage. The steps of a stage run together.

    quick: leave out all but a little of each step.
    claims: an empty folder, for tests/claimed.py.
    """
    hooks, scenarios = [], []
    if quick:
        hooks = ["--hook", "bf16_compress_hook", "--hook", "quantization_hook int4 by nodes"]
        scenarios = ["--scenario", "bucket views, Reducer", "--scenario", "FSDP2"]
    checks = [Step("streams", ["-m", "benchmarks.stream_check", "--device", device], 150)]
    for backend in ("nccl", "gloo"):
        on_ranks = _on_ranks(device, backend)
        checks += [
            Step(f"ddp-{backend}", ["-m", "benchmarks.ddp_check", *on_ranks, *hooks], 150),
            Step(f"reducer-{backend}", ["-m", "benchmarks.reducer_check", *on_ranks, *scenarios], 150),
        ]
    benchmarks = [Step("benchmarks", ["-m", "benchmarks", "--device", device], 150)]
    return [checks, benchmarks, _tests(TEST_PROCESSES if device == "cuda" else 2, quick, claims)]


def _on_ranks(device: str, backend: str) -> list[str]:
    """Return a check's arguments for the backend's default ranks: 2 on gloo, one per GPU on NCCL."""
    ranks = ["--device", device, "--backend", backend, "--timeout-s", "140"]
    if (device, backend) == ("cpu", "nccl"):
        ranks += ["--backend", "gloo", "--world-size", "1"]  # as NCCL's one rank on one GPU
    return ranks


def _tests(processes: int, quick: bool, claims: str) -> list[Step]:
    """Make the steps that share the tests that compute on a GPU; see tests/claimed.py."""
    files = [str(path.relative_to(ROOT)) for path in files_of_tests()]
    if quick:
        files = ["tests/kernels/test_scratch.py"]
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.claimed", "--claims", claims]
    command += ["-m", "device", "--durations=3", *files]
    return [Step(f"tests:{i + 1}", command, 160) for i in range(processes)]


def files_of_tests() -> list[Path]:
    """Return the files of TESTS that name a device. pytest then chooses their tests marked so.

    The other files have no such tests, and collecting takes long.
    """
    paths = [path for folder in TESTS for path in sorted((ROOT / "tests" / folder).rglob("test_*.py"))]
    return [path for path in paths if "device" in path.read_text()]


def _group(step: Step) -> str:
    """Return the name by which --only selects the step."""
    return step.name.partition(":")[0]


class Running:
    """A running step, in a session of its own.

    keep_output: whether to print the step's output at its end, not as it comes.
    """

    def __init__(self, step: Step, extra: Sequence[str], limit_s: float, keep_output: bool):
        self.step = step
        self.timeout_s = min(step.budget_s, limit_s)
        self.start = time.monotonic()
        print(f"==== {step.name}: started, may take {self.timeout_s:.0f} s", flush=True)
        self.output = tempfile.TemporaryFile() if keep_output else None  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *step.command, *extra],
            cwd=ROOT,
            env=_environment(),
            stdout=self.output,
            stderr=subprocess.STDOUT if keep_output else None,
            start_new_session=True,
        )

    def poll(self) -> Outcome | None:
        """Return the outcome if the step has ended or timed out, and kill its remaining processes."""
        seconds = time.monotonic() - self.start
        status = self.process.poll()
        if status is None and seconds < self.timeout_s:
            return None
        if status is None:
            verdict = f"FAILED (killed after {self.timeout_s:.0f} s)"
            self._signal(signal.SIGINT)  # pytest tells what it has seen so far
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
        else:
            verdict = PASSED if status == 0 else f"FAILED (exit status {status})"
        self.kill()
        if self.output is not None:
            self.output.seek(0)
            print(f"\n==== {self.step.name}", flush=True)
            print(self.output.read().decode(errors="replace"), flush=True)
            self.output.close()
        print(f"==== {self.step.name}: {verdict}, {seconds:.0f} s", flush=True)
        return Outcome(self.step.name, verdict, seconds)

    def kill(self) -> None:
        """Kill the step and its processes: ranks outlive a parent that a signal kills."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def run_together(
    stage: Sequence[Step],
    extra: Sequence[str] = (),
    limit_s: float = float("inf"),
    keep: Callable[[Outcome], object] = lambda outcome: None,
) -> list[Outcome]:
    """Run the steps of a stage at once, each within its time limit, and keep each outcome as it comes."""
    outcomes: dict[str, Outcome] = {}
    running = [Running(step, extra, limit_s, keep_output=len(stage) > 1) for step in stage]
    try:
        while len(outcomes) < len(running):
            time.sleep(0.1)
            for each in running:
                if each.step.name not in outcomes and (outcome := each.poll()):
                    outcomes[outcome.name] = outcome
                    keep(outcome)
    finally:
        for each in running:
            if each.step.name not in outcomes:
                each.kill()
    return [outcomes[step.name] for step in stage]


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    # All ranks are on this machine, which need not have any network.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # Steps and ranks share the cores.
    environment.setdefault("OMP_NUM_THREADS", "1")
    # Plugins that happen to be installed are not loaded: their warnings would be errors.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return environment


def missing(device: str) -> str | None:
    """Return the reason why nothing can be run here, or None if there is none."""
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        return f"this Python ({sys.executable}) lacks {error.name}"
    if device == "cuda" and not torch.cuda.is_available():
        return f"no CUDA GPU is available to torch {torch.__version__}"
    return None


def unproven(device: str) -> str:
    """Return what a pass on this machine does not prove."""
    import torch

    if device == "cpu":
        return "on a CPU a pass proves nothing about kernels, streams and NCCL: hooks compute in plain torch"
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1:
        return (
            "on one GPU a pass doesn't prove that anything works between GPUs: NCCL has one rank, and on "
            "gloo two ranks share the GPU"
        )
    return f"NCCL has {num_gpus} ranks, one per GPU; a pass doesn't prove that NCCL works between machines"


def report_environment(device: str) -> dict[str, object]:
    """Print and return the device, the versions and the commit."""
    import torch

    from benchmarks import environment

    facts = environment.describe(torch.device(device))
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        facts["L2 cache"] = f"{properties.L2_cache_size / 2**20:.0f} MiB"
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for name, value in facts.items():
        print(f"{name:>18}: {value}", flush=True)
    return facts


def results_folder(args: argparse.Namespace) -> Path | None:
    """Return the folder to record in; None where nothing is recorded: without all steps, and in trials."""
    is_trial = args.device == "cpu" or args.quick
    if args.only or (is_trial and not args.results):
        return None
    folder: Path = args.results or ROOT / "benchmarks" / "results"
    return folder


def record(outcome: Outcome, facts: dict[str, object], folder: Path | None) -> None:
    """Append a step's outcome to the device's file of outcomes."""
    if folder is None:
        return
    from benchmarks.records import slug

    folder.mkdir(parents=True, exist_ok=True)
    row = {**facts, "step": outcome.name, "verdict": outcome.verdict, "seconds": round(outcome.seconds, 1)}
    with (folder / f"{slug(str(facts['device']))}-steps.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def run_all(args: argparse.Namespace, keep: Callable[[Outcome], object]) -> list[Outcome]:
    deadline = time.monotonic() + TOTAL_S
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="gradcomp-claims-") as claims:
        waiting = stages(args.device, args.quick, claims)
        while waiting:
            stage = waiting.pop(0)
            left_out = [step for step in stage if args.only and _group(step) not in args.only]
            outcomes += [Outcome(step.name, "left out", 0.0) for step in left_out]
            chosen = [step for step in stage if step not in left_out]
            reserved_s = sum(max(step.budget_s for step in later) for later in waiting)
            limit_s = max(0.0, deadline - time.monotonic() - reserved_s)
            extra = []
            if [step.name for step in chosen] == ["benchmarks"]:
                chosen = [replace(chosen[0], budget_s=limit_s)]  # there are always more cases to time
                extra = _benchmark_arguments(args, outcomes, limit_s)
            outcomes += run_together(chosen, extra, limit_s, keep)
    return outcomes


def _benchmark_arguments(args: argparse.Namespace, before: Sequence[Outcome], timeout_s: float) -> list[str]:
    # The benchmarks stop by themselves before they would be killed, so that no case is cut off.
    arguments = ["--budget-s", str(max(0, round(timeout_s) - 35))]
    if args.quick or args.device == "cpu":
        arguments.append("--quick")
    if args.quick:
        arguments += ["--filter", QUICK_BENCHMARK]
    folder = results_folder(args)
    if folder is not None:
        arguments += ["--record", "--results", str(folder)]
        for outcome in before:
            if outcome.verdict.startswith("FAILED"):
                arguments += ["--failed-part", outcome.name]
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, help="record here, not in benchmarks/results/")
    parser.add_argument(
        "--quick", action="store_true", help="a little of each step; recorded only with --results"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=sorted({_group(step) for stage in stages("cuda") for step in stage}),
        help="run this step (repeatable); nothing is recorded then",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: try the command out where there is no GPU; recorded only with --results",
    )
    args = parser.parse_args(argv)
    if args.results:
        args.results = args.results.resolve()  # the steps run in the checkout's root
    problem = missing(args.device)
    if problem:
        print(f"gpu-check: {problem}; nothing was run")
        return 2
    print(f"gpu-check: {unproven(args.device)}")
    facts = report_environment(args.device)
    outcomes = run_all(args, lambda outcome: record(outcome, facts, results_folder(args)))
    print("\n==== summary")
    for outcome in outcomes:
        print(f"{outcome.name:<14}{outcome.seconds:>6.0f} s  {outcome.verdict}")
    failed = any(outcome.verdict.startswith("FAILED") for outcome in outcomes)
    print(f"gpu-check: {'FAILED' if failed else PASSED}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
