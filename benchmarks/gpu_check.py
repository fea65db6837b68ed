"""Run everything that needs a GPU: python -m benchmarks.gpu_check (make gpu-check).

It needs a bare checkout with torch, triton, pytest and hypothesis, but no network, and takes under 9 minutes.
First, all at once, the steps that check:

- kernels, hooks, reducer ...: the tests of the folders in TESTS, on CUDA. Large folders run in several
  processes (kernels:1, kernels:2 ...);
- ddp-nccl, ddp-gloo: training with each hook, on torch's DDP and on gradcomp's Reducer (ddp_check.py). NCCL
  has one rank per GPU. On gloo 2 ranks share the first GPU;
- reducer-nccl, reducer-gloo: the Reducer, the wrapper and average_ in other scenarios, on the same ranks
  (reducer_check.py);

then, one after another, the steps that need the GPU for themselves:

- streams: no hook makes the host wait (stream_check.py);
- benchmarks: python -m benchmarks, its rows appended to benchmarks/results/.

A step that fails or exceeds its time limit doesn't stop the others. Every step's outcome is written to a file
beside the device's rows as soon as the step ends. Rows of benchmarks name the steps that failed before.
Nothing is recorded if steps were left out. Exit status: 0 if all steps passed, 1 if one did not, 2 without a
GPU.
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOTAL_S = 520  # under 9 minutes, including the time to start and to end
# Folders of tests/, and in how many processes their tests run on CUDA.
TESTS = {
    "kernels": 6,
    "comm": 1,
    "compress": 1,
    "fsdp": 1,
    "hooks": 2,
    "parallel": 1,
    "reducer": 1,
    "testing": 2,
}

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


def stages(device: str) -> list[list[Step]]:
    """List the steps for this device by stage. The steps of a stage run together.

    On a CPU, for trying the command out, there are only the steps that need no GPU.
    """
    cuda = device == "cuda"
    checks = [
        Step("ddp-gloo", _on_ranks("ddp_check", device, "gloo", timeout_s=140), 150),
        Step("reducer-gloo", _on_ranks("reducer_check", device, "gloo", timeout_s=210), 220),
    ]
    for folder, processes in TESTS.items():
        checks += _tests(folder, processes if cuda else 1)
    if cuda:
        checks += [
            Step("ddp-nccl", _on_ranks("ddp_check", device, "nccl", timeout_s=140), 150),
            Step("reducer-nccl", _on_ranks("reducer_check", device, "nccl", timeout_s=210), 220),
        ]
    streams = [Step("streams", ["-m", "benchmarks.stream_check"], 50)]
    benchmarks = [Step("benchmarks", ["-m", "benchmarks", "--device", device], 240)]
    return [checks, streams, benchmarks] if cuda else [checks, benchmarks]


def _tests(folder: str, processes: int) -> list[Step]:
    """Make the steps that run the tests of a folder and its subfolders.

    tests/kernels/test_compiled.py is left out: it takes minutes and needs no GPU.
    """
    paths = (path for path in (ROOT / "tests" / folder).rglob("test_*.py") if path.name != "test_compiled.py")
    files = sorted(str(path.relative_to(ROOT)) for path in paths)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=3"]
    names = [folder] if processes == 1 else [f"{folder}:{i + 1}" for i in range(processes)]
    return [Step(name, [*command, *files[i::processes]], 230) for i, name in enumerate(names)]


def _group(step: Step) -> str:
    """Return the name by which --only selects the step."""
    return step.name.partition(":")[0]


def _on_ranks(check: str, device: str, backend: str, timeout_s: int) -> list[str]:
    """Return the command of a check, on the backend's default ranks: 2 on gloo, one per GPU on NCCL."""
    where = ["--device", device, "--backend", backend]
    return ["-m", f"benchmarks.{check}", *where, "--timeout-s", str(timeout_s)]


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
    """Return the folder to record in; None where nothing is recorded."""
    if args.only or (args.device == "cpu" and not args.results):
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
    for stage in stages(args.device):
        left_out = [step for step in stage if args.only and _group(step) not in args.only]
        outcomes += [Outcome(step.name, "left out", 0.0) for step in left_out]
        chosen = [step for step in stage if step not in left_out]
        limit_s = max(0.0, deadline - time.monotonic())
        extra = []
        if [step.name for step in chosen] == ["benchmarks"]:
            extra = _benchmark_arguments(args, outcomes, min(chosen[0].budget_s, limit_s))
        outcomes += run_together(chosen, extra, limit_s, keep)
    return outcomes


def _benchmark_arguments(args: argparse.Namespace, before: Sequence[Outcome], timeout_s: float) -> list[str]:
    # The benchmarks stop by themselves before they would be killed, so that no case is cut off.
    arguments = ["--budget-s", str(max(0, round(timeout_s) - 35))]
    if args.quick or args.device == "cpu":
        arguments.append("--quick")
    folder = results_folder(args)
    if folder is not None:
        arguments += ["--record", "--results", str(folder)]
        for outcome in before:
            if outcome.verdict.startswith("FAILED"):
                arguments += ["--failed-step", outcome.name]
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, help="record here, not in benchmarks/results/")
    parser.add_argument("--quick", action="store_true", help="small benchmarks")
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
        help="cpu: try the check itself out where there is no GPU; recorded only with --results",
    )
    args = parser.parse_args(argv)
    if args.results:
        args.results = args.results.resolve()  # the steps run in the checkout's root
    problem = missing(args.device)
    if problem:
        print(f"gpu-check: {problem}; nothing was run")
        return 2
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
