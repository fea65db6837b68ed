"""Train the same small GPT with each hook on several ranks; compare loss, time and bytes sent.

    python -m benchmarks.demo --hook all --steps 400

Each run is torchrun with benchmarks/demo/train.py: the same weights, data and order for every hook. The text
is the source of Python's own standard library. It writes a JSON record per hook and a picture to --out.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from benchmarks.demo import chart
from benchmarks.demo.options import (
    add_training_options,
    check_training_options,
    positive,
    training_arguments,
)
from benchmarks.demo.train import HOOKS

ROOT = Path(__file__).resolve().parents[2]
FIRST_HOOKS = "none,bf16,int4,powersgd_int8"  # one of each kind, so that a first run takes two minutes
GRACE_S = 5.0  # the time between asking a run's processes to end and killing them


class RunFailedError(Exception):
    """A hook's run ended with an error."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = ",".join(HOOKS)
    parser.add_argument(
        "--hook", default=FIRST_HOOKS, help=f"some of {known}, in this order, or all (default %(default)s)"
    )
    parser.add_argument("--ranks", type=positive, default=2, help="processes (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder (default %(default)s)")
    add_training_options(parser)
    options = parser.parse_args(arguments)
    check_training_options(parser, options)
    options.hooks = list(HOOKS) if options.hook == "all" else options.hook.split(",")
    for hook in options.hooks:
        if hook not in HOOKS:
            parser.error(f"--hook: there is no {hook!r}; known are {known}, and all")
    return options


def run_hook(hook: str, options: argparse.Namespace) -> chart.Record:
    """Train with one hook under torchrun, which prints its output, and return the record it wrote.

    Whatever ends this call (a signal too) ends every process of the run. Raises RunFailedError.
    """
    record = options.out / f"{hook}.json"
    record.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(options.ranks), "-m", "benchmarks.demo.train"),
        *("--hook", hook, "--record", str(record.resolve()), *training_arguments(options)),
    ]
    # torchrun's default is one thread; the ranks divide the cores among themselves.
    threads = str(max(1, len(os.sched_getaffinity(0)) // options.ranks))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    # A session of its own, so that its processes can be ended together.
    run = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        status = run.wait()
    finally:
        end_session(run)
    if status:
        raise RunFailedError(f"training with {hook!r} failed: torchrun's exit status is {status}; see above")
    result: chart.Record = json.loads(record.read_text())
    return result


def end_session(run: subprocess.Popen[bytes]) -> None:
    """Ask every process of the run to end, and kill those that don't.

    torchrun's ranks are in sessions of their own, so they are found by their parents, before these die.
    """
    pids = set() if run.poll() is not None else {run.pid, *descendants(run.pid)}
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience_s
        while any(map(is_running, pids)) and time.monotonic() < deadline:
            run.poll()  # collects torchrun's exit status: until then it counts as running
            time.sleep(0.05)
    run.wait()


def descendants(pid: int) -> set[int]:
    """Return the process ids of all descendants of a process."""
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found |= {child} | descendants(child)
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def write_picture(records: list[chart.Record], path: Path) -> None:
    try:
        chart.draw(records, path)
        print(f"\nLoss against bytes sent: {path}")
    except ImportError:
        print("\nNo picture: it needs matplotlib (pip install 'gradcomp[demo]')")


def stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    records = []
    for hook in options.hooks:
        print(f"\n== {hook}: {options.ranks} ranks, {options.steps} steps", flush=True)
        try:
            records.append(run_hook(hook, options))
        except RunFailedError as error:
            print(f"demo: {error}", file=sys.stderr)
            return 1
    print("\n" + chart.table(records))
    write_picture(records, options.out / "loss_vs_bytes.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
