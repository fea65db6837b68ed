"""Time hooks over throttled links: hosts as network namespaces of this machine, with one or more ranks each.

    python -m benchmarks.network --links 200,1000 --models mlp --hosts 2

For every number of hosts, link and model it times steps with each way to average gradients. With --delay-ms
the links also have a delay.
It needs Linux, and root or user namespaces. Nothing stays behind, whatever ends it. Every row is written
to --out at once; tables and a picture follow. --report only draws tables and pictures of earlier rows.
"""

import argparse
import itertools
import json
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.environment import describe
from benchmarks.network import report
from benchmarks.network.hosts import DelayedNetwork, Network, NoPrivilegeError, isolated
from benchmarks.network.rank import WORKLOADS
from benchmarks.pictures import write_picture
from benchmarks.records import append, read
from benchmarks.training.averaging import ALONE, check_name
from benchmarks.training.runs import exit_on_signals
from gradcomp.command_line import positive_int

HOOKS = ("noop", "none", "fp16", "bf16", "int8", "int4", "powersgd:4", "powersgd:8:int8", "torch:fp16")
HOOKS += ("local:20", "local:20:int4", "fsdp2:fp32:fp32", "fsdp2:int8:int4")
SPARE_S = 60  # for what a job does besides its steps
TRIAL_S = 300  # of auto_hook, at most

Job = dict[str, Any]


class Link(NamedTuple):
    """A link's rate, and its one-way delay, None without a router."""

    mbit_per_s: int
    delay_ms: float | None


def numbers(text: str) -> list[int]:
    return [positive_int(part) for part in text.split(",")]


def delays(text: str) -> list[float]:
    found = [float(part) for part in text.split(",")]
    if not all(0 <= each < 1000 for each in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not from 0 up to 1000 ms")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    text = "Mbit/s, comma-separated (default 200,50,1000,10000)"
    parser.add_argument("--links", type=numbers, default=[200, 50, 1000, 10_000], help=text)
    text = (
        "one-way delays in ms, comma-separated: every link with each of them. All packets, with a delay of 0 "
        "too, pass through a router process, checked up to 1,000 Mbit/s (default: no router and no delay)"
    )
    parser.add_argument("--delay-ms", type=delays, metavar="DELAYS", help=text)
    parser.add_argument("--hosts", type=numbers, default=[2, 4], help="numbers of hosts (default 2,4)")
    text = "numbers of ranks on each host, comma-separated (default 1)"
    parser.add_argument("--ranks-per-host", type=numbers, default=[1], help=text)
    text = f"comma-separated, of {', '.join(WORKLOADS)} (default %(default)s)"
    parser.add_argument("--models", default="mlp,gpt", help=text)
    text = (
        "hooks, comma-separated: noop, auto (timed after its choice) and all names in docs/accuracy.md, with "
        ":flat at the end to average flat on hosts of several ranks; torch:fp16 is torch's own, "
        "local:20:int4:delay=5 by local steps, fsdp2:int8:int4 FSDP2 with weights in int8 and gradients in "
        "int4 (default %(default)s)"
    )
    parser.add_argument("--only", default=",".join(HOOKS), metavar="HOOKS", help=text)
    text = "passes over all hooks; tables have medians and ranges over them (default %(default)s)"
    parser.add_argument("--runs", type=positive_int, default=1, metavar="N", help=text)
    text = "time for the steps of a hook, at least five steps (default %(default)s)"
    parser.add_argument("--seconds", type=float, default=2.0, help=text)
    text = "minutes after which nothing more is started (default %(default)s)"
    parser.add_argument("--minutes", type=float, default=45.0, help=text)
    text = "folder of rows, tables and picture (default %(default)s)"
    parser.add_argument("--out", type=Path, default=Path("build/network"), help=text)
    text = "only show the rows of this file, of --models"
    parser.add_argument("--report", type=Path, metavar="FILE", help=text)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    options.models = options.models.split(",")
    for model in options.models:
        if model not in WORKLOADS:
            parser.error(f"--models: there is no {model!r}; known are {', '.join(WORKLOADS)}")
    options.only = options.only.split(",")
    for hook in options.only:
        try:
            check_name(hook)
        except ValueError as error:
            parser.error(f"--only: {error}")
        if hook == ALONE:
            parser.error(f"--only: {hook} sends nothing to time")
    return options


def jobs(options: argparse.Namespace) -> Iterator[tuple[Link, Job]]:
    """Yield (link, job) for every link."""
    for link in itertools.starmap(Link, product(options.links, options.delay_ms or [None])):
        yield link, {"job": "link"}
        for model, run, hook in product(options.models, range(options.runs), options.only):
            job = {"job": "steps", "model": model, **report.placed(hook), "run": run}
            yield link, {**job, "seconds": options.seconds}


class RankFailedError(Exception):
    """A rank ended, or didn't answer."""


class Ranks:
    """The processes on a network's hosts, started when the first job comes and again after one has failed."""

    def __init__(self, network: Network | DelayedNetwork, ranks_per_host: int, folder: Path) -> None:
        self._network, self._folder, self._number = network, folder, 0
        self._ranks_per_host = ranks_per_host
        self._processes: list[Any] = []

    def do(self, job: Job) -> Any:
        """Return rank 0's answer to a job. Raises RankFailedError."""
        try:
            if not self._processes:
                self._start()
            for process in self._processes:
                process.stdin.write(json.dumps(job) + "\n")
                process.stdin.flush()
            trial_s = TRIAL_S if job.get("hook") == "auto" else 0
            return self._answer(job.get("seconds", 0) * 2 + SPARE_S + trial_s)
        except (RankFailedError, BrokenPipeError) as error:
            self.end()
            raise RankFailedError(str(error)) from error

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
        self._processes = []

    def _start(self) -> None:
        places = list(product(self._network.hosts, range(self._ranks_per_host)))
        self._number += 1
        store = (self._folder / f"store{self._number}").as_uri()
        for rank, (host, place) in enumerate(places):
            command = [sys.executable, "-m", "benchmarks.network.rank", str(rank), str(len(places)), store]
            # One thread each, so that a step computes as long on one host as on two.
            environment = {
                "OMP_NUM_THREADS": "1",
                "LOCAL_RANK": str(place),  # as torchrun sets them
                "LOCAL_WORLD_SIZE": str(self._ranks_per_host),
            }
            self._processes.append(host.start(command, environment, self._folder / f"errors{rank}"))
        self._answer(SPARE_S)

    def _answer(self, patience_s: float) -> Any:
        """Wait for rank 0's next line."""
        deadline = time.monotonic() + patience_s
        output = self._processes[0].stdout
        while not select.select([output], [], [], 0.2)[0]:
            if any(process.poll() is not None for process in self._processes):
                raise RankFailedError(self._reason())  # rank 0 may wait for it without end
            if time.monotonic() > deadline:
                raise RankFailedError(f"hangs: no answer for {patience_s:.0f} s")
        line = output.readline()
        if not line.strip():
            raise RankFailedError(self._reason())
        return json.loads(line)

    def _reason(self) -> str:
        """Say how the ranks ended: the signal, and the last line that one of them wrote."""
        for rank, process in enumerate(self._processes):
            try:
                status = process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                continue
            if status:
                lines = (self._folder / f"errors{rank}").read_text().strip().splitlines()
                lines = [line for line in lines if "Error" in line or "what()" in line] or lines or [""]
                by = signal.Signals(-status).name if status < 0 else f"exit status {status}"
                return f"aborts: rank {rank}, {by}: {lines[-1][-300:]}"
        return "a rank ended without an answer"


def measure(options: argparse.Namespace, rows: Path) -> list[str]:
    """Do every job, append a row for each to a file, and return those that there was no time for.

    A hook that has failed with as many ranks isn't tried on another link: it may take a minute to hang again.
    """
    environment = describe(torch.device("cpu"))
    deadline = time.monotonic() + 60 * options.minutes
    kind = Network if options.delay_ms is None else DelayedNetwork
    todo, all_places = list(jobs(options)), list(product(options.hosts, options.ranks_per_host))
    count, number, late = len(todo) * len(all_places), 0, []
    for hosts, ranks_per_host in all_places:
        with kind(hosts) as network, tempfile.TemporaryDirectory() as folder:
            ranks = Ranks(network, ranks_per_host, Path(folder))
            failed: list[Job] = []
            delay_ms: float | None = None
            for link, job in todo:
                number += 1
                row = {"hosts": hosts, "ranks_per_host": ranks_per_host, **link._asdict(), **job}
                label = report.label(row)
                if time.monotonic() > deadline:
                    late.append(label)
                    continue
                same = {**job, "run": 0}
                if same in failed:
                    continue
                if link.delay_ms != delay_ms:
                    ranks.end()  # a process group measures its delay once
                delay_ms = link.delay_ms
                network.throttle(*link)
                try:
                    row |= ranks.do(job)
                except RankFailedError as error:
                    row["failed"] = str(error)
                    failed.append(same)
                row["dropped_packets"] = network.num_dropped()
                append(rows, [{**environment, **row}])
                print(f"[{number}/{count}] {label}: {report.summary(row)}", flush=True)
            ranks.end()
    return late


def show(path: Path, options: argparse.Namespace) -> None:
    rows = [row for row in read(path) if row.get("model") in options.models]
    print("\n" + "\n\n".join([report.tables(rows), report.differences(rows)]))
    write_picture(report.draw, rows, options.out / "network.png")


def run(arguments: list[str], options: argparse.Namespace) -> int:
    """Measure inside of namespaces, then show the rows. Raises NoPrivilegeError."""
    path = options.out / "network.jsonl"
    if options.inside:
        path.unlink(missing_ok=True)
        for label in measure(options, path):
            print(f"network: not reached within {options.minutes:g} minutes: {label}")
        return 0
    command = isolated([sys.executable, "-m", "benchmarks.network", *arguments, "--inside"])
    # A session of its own: Ctrl-C comes to this process, which kills everything below.
    child = subprocess.Popen(command, start_new_session=True)
    try:
        status = child.wait()
    finally:
        child.kill()
        child.wait()
    if status == 0:
        show(path, options)
    return status


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    exit_on_signals()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.report is not None:
        show(options.report, options)
        return 0
    try:
        return run(arguments, options)
    except NoPrivilegeError as error:
        print(f"network: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
