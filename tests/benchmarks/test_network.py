"""Test a short `make bench-network`, its tables, and its messages about privileges and arguments."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.network import __main__ as network
from benchmarks.network import hosts, report
from benchmarks.network.router import Timetable
from benchmarks.records import read
from tests.depth import everyday
from tests.programs import ROOT, descendants, is_running, refusal, run_module, users_environment

MLP_BYTES = 4 * 1_863_690
PACKET_BYTES = 1_000


@pytest.fixture(scope="module")
def allowed():
    try:
        hosts.isolated(["true"])
    except hosts.NoPrivilegeError as error:
        pytest.skip(f"needs network namespaces: {error}")


def command(out: Path, *arguments: str) -> list[str]:
    short = ["--models", "mlp", "--links", "400", "--hosts", "2", "--seconds", "0"]
    return ["benchmarks.network", *short, "--out", str(out), *arguments]


@pytest.mark.usefixtures("allowed")
def test_steps_over_a_throttled_link(tmp_path):
    hooks = ["none", "powersgd:8:int8", "torch:fp16"]
    hooks += [f"fsdp2:{name}" for name in ("fp32:fp32", "bf16:fp32", "bf16:bf16")]
    done = run_module(*command(tmp_path, "--only", ",".join(hooks)), timeout_s=200)
    assert done.returncode == 0, done.stdout
    found = {report.name_of(row): row for row in report.of(read(tmp_path / "network.jsonl"), job="steps")}
    none, powersgd = found["none"], found["powersgd:8:int8"]
    # The network counts the bytes that torch was given, plus TCP's headers.
    assert none["all_reduce_bytes"] == pytest.approx(MLP_BYTES, rel=0.001)
    assert MLP_BYTES < none["sent_bytes_per_step"] < 1.1 * MLP_BYTES
    assert powersgd["sent_bytes_per_step"] < MLP_BYTES / 40
    # A fast machine can't send faster than the link; how slow a busy one is doesn't matter.
    assert none["step_ms"] > 0.9 * MLP_BYTES * 8 / 400e6 * 1e3
    # FSDP2 gathers parameters twice; gloo's reduce-scatter sends what an all-reduce sends.
    for hook, share in (("fp32:fp32", 2.0), ("bf16:fp32", 1.5), ("bf16:bf16", 1.0)):
        assert share < found[f"fsdp2:{hook}"]["sent_bytes_per_step"] / MLP_BYTES < 1.1 * share
    assert f"| torch's fp16 | {found['torch:fp16']['sent_bytes_per_step']:,.0f} | " in done.stdout
    assert "No picture: it needs links with two delays between two hosts" in done.stdout


@pytest.mark.usefixtures("allowed")
def test_a_host_of_three_ranks_sends_what_one_rank_does(tmp_path):
    hooks = everyday(["int4"], ["int4", "int8"])
    names = ["none", *(f"{hook}{form}" for hook in hooks for form in ("", ":flat"))]
    arguments = ["--only", ",".join(names), "--ranks-per-host", "1,3"]
    done = run_module(*command(tmp_path, *arguments), timeout_s=200)
    assert done.returncode == 0, done.stdout
    rows = read(tmp_path / "network.jsonl")
    sent = {
        (row["hook"], row["ranks_per_host"]): row["sent_bytes_per_step"]
        for row in report.of(rows, job="steps", hooks="gradcomp", wrapper="torch")
    }
    for hook in hooks:
        assert sent[hook, 3] < 1.05 * sent[hook, 1]
        assert sent[f"{hook}:flat", 3] > 2.5 * sent[hook, 1]
    assert sent["none", 3] > 1.4 * sent["none", 1]
    assert "mlp, 2 hosts of 3 ranks: times as fast as without a hook, and ms per step" in done.stdout


@pytest.mark.usefixtures("allowed")
def test_steps_over_links_with_a_delay(tmp_path):
    arguments = ["--delay-ms", "5,0", "--only", "none,local:2", "--runs", "2"]
    done = run_module(*command(tmp_path, *arguments), timeout_s=200)
    assert done.returncode == 0, done.stdout
    rows = read(tmp_path / "network.jsonl")
    assert [row["dropped_packets"] for row in rows] == [0] * 10
    # A rank sends once it knows that another one waits, so that an exchange takes the delay there and back.
    links = {row["delay_ms"]: row["exchange_seconds"] for row in report.of(rows, job="link")}
    assert links[0] < 0.01 < links[5] < 0.04
    stepped = report.of(rows, job="steps")
    assert [(row["delay_ms"], row["run"], row["hook"]) for row in stepped] == [
        (delay, run, hook) for delay in (5, 0) for run in (0, 1) for hook in ("none", "2")
    ]
    for row in stepped:
        every = {"none": 1, "2": 2}[row["hook"]]
        assert MLP_BYTES < every * row["sent_bytes_per_step"] < 1.1 * MLP_BYTES
        assert every * row["step_ms"] > 0.9 * MLP_BYTES * 8 / 400e6 * 1e3 + row["delay_ms"]
    assert "| | bytes sent | 400 Mbit/s, 0 ms | 400 Mbit/s, 5 ms |" in done.stdout
    assert (tmp_path / "network.png").exists()


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(("number", "delay"), [(signal.SIGTERM, []), (signal.SIGKILL, ["--delay-ms", "1"])])
def test_nothing_survives_the_program(number, delay, tmp_path):
    program = subprocess.Popen(
        [sys.executable, "-m", *command(tmp_path, "--only", "none", *delay)],
        cwd=ROOT,
        env=users_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    program.stdout.readline()  # the first job is done, so all processes run
    below = descendants(program.pid)
    assert len(below) > 4  # ranks, and the processes that hold the namespaces
    program.send_signal(number)
    program.wait(timeout=30)
    program.stdout.close()
    deadline = time.monotonic() + 30
    while alive := [pid for pid in below if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"


def arrivals_ms(mbit_per_s, delay_ms, sent, num_hosts=2):
    """Return when packets of 1,000 bytes arrive: sent is (source, target, ms) of each, in order of time."""
    timetable = Timetable(num_hosts)
    timetable.set(mbit_per_s * 125_000, delay_ms / 1e3)
    arrivals = [timetable.arrival_s(source, target, PACKET_BYTES, ms / 1e3) for source, target, ms in sent]
    return pytest.approx([arrival * 1e3 for arrival in arrivals])


def test_packets_take_the_time_of_their_bytes_and_the_delay():
    # At 8 Mbit/s a packet takes 1 ms. The third one finds the link free again.
    assert arrivals_ms(8, 25, [(0, 1, 0), (0, 1, 0), (0, 1, 10)]) == [26, 27, 36]
    # The delay takes no time of the link.
    assert arrivals_ms(8, 0, [(0, 1, 0), (0, 1, 0), (0, 1, 10)]) == [1, 2, 11]


def test_directions_have_links_of_their_own():
    assert arrivals_ms(8, 5, [(0, 1, 0), (1, 0, 0), (0, 1, 0), (1, 0, 0)]) == [6, 6, 7, 7]


def test_packets_queue_before_their_receivers_downlink_too():
    assert arrivals_ms(8, 5, [(0, 2, 0), (1, 2, 0), (1, 0, 0)], num_hosts=3) == [6, 7, 7]


def test_a_change_of_the_link_is_for_packets_to_come():
    timetable = Timetable(2)
    timetable.set(1e6, 0.025)
    arrivals = [timetable.arrival_s(0, 1, PACKET_BYTES, 0.0)]
    timetable.set(1e5, 0.0)
    arrivals.append(timetable.arrival_s(0, 1, PACKET_BYTES, 0.0))
    assert arrivals == pytest.approx([0.026, 0.011])


@pytest.mark.parametrize(
    ("bytes_per_s", "num_packets"),
    [(1e5, 4_000), (1e7, 10_000)],  # 4 MB take 40 s; 1 s of the rate is 10 MB
)
def test_full_queues_drop_packets(bytes_per_s, num_packets):
    timetable = Timetable(2)
    timetable.set(bytes_per_s, 0.025)
    taken = [timetable.arrival_s(0, 1, PACKET_BYTES, 0.0) for _ in range(num_packets + 100)]
    assert None not in taken[:num_packets]
    assert set(taken[num_packets + 2 :]) == {None}
    assert timetable.arrival_s(1, 0, PACKET_BYTES, 0.0) is not None


class HostOf:
    """A host that runs this code, whatever it is asked to start."""

    def __init__(self, code):
        self.code = code

    def start(self, _, environment, errors):
        with errors.open("w") as file:
            return subprocess.Popen(
                [sys.executable, "-c", self.code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )


def test_a_rank_that_ends_is_named_though_rank_0_waits_for_it(tmp_path):
    silent = "import time; print('0', flush=True); time.sleep(600)"
    ended = "input(); raise RuntimeError('lost')"
    ranks = network.Ranks(SimpleNamespace(hosts=[HostOf(silent), HostOf(ended)]), 1, tmp_path)
    with pytest.raises(network.RankFailedError, match="aborts: rank 1, exit status 1: RuntimeError: lost"):
        ranks.do({"job": "link"})


def test_missing_tools_are_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert network.main(["--out", str(tmp_path)]) == 2
    assert "not installed: ip, tc, unshare, nsenter, setpriv" in capsys.readouterr().err


def test_missing_rights_are_named(monkeypatch, tmp_path, capsys):
    for tool in hosts.TOOLS:
        path = tmp_path / tool
        path.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2; exit 1\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert network.main(["--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "Operation not permitted" in message
    assert "Run it as root, or allow user namespaces" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "resnet"], "--models: there is no 'resnet'; known are mlp, gpt"),
        (["--links", "fast"], "'fast' is not a whole number"),
        (["--hosts", "0"], "'0' is not a whole number of at least 1"),
        (["--only", "none,powersgd"], "--only: there is no hook 'powersgd'"),
        (["--only", "alone"], "--only: alone sends nothing to time"),
        (["--only", "fsdp2:int8:int2"], "--only: 'int2' is none of fp32, bf16, 16bit, int8, int4"),
        (["--delay-ms", "5,-1"], "'5,-1' is not from 0 up to 1000 ms"),
        (["--delay-ms", "long"], "argument --delay-ms: invalid delays value: 'long'"),
        (["--runs", "0"], "'0' is not a whole number of at least 1"),
        (["--only", "torch:int4"], "--only: there is no hook 'torch:int4'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, capsys):
    assert message in refusal(capsys, network.main, arguments)


def jobs_of(*arguments):
    """Return (link, job's kind, hook, run) of the jobs."""
    options = network.parse(["--models", "mlp", "--links", "200", *arguments])
    return [
        (tuple(link), job["job"], job["job"] == "steps" and report.name_of(job), job.get("run"))
        for link, job in network.jobs(options)
    ]


def test_passes_over_exactly_the_hooks_that_are_named():
    names = ["noop", "powersgd:8:bf16", "torch:fp16", "local:20:int8", "fsdp2:int8:int4"]
    arguments = ["--only", ",".join(names), "--runs", "2", "--delay-ms", "0,2.5"]
    assert jobs_of(*arguments) == [
        ((200, delay), *job)
        for delay in (0.0, 2.5)
        for job in (("link", False, None), *(("steps", name, run) for run in (0, 1) for name in names))
    ]


def test_rows_say_whose_a_hook_is_and_where_it_is_timed():
    placed = {name: tuple(report.placed(name).values()) for name in ("int8", "torch:fp16", "local:20:int8")}
    assert placed == {
        "int8": ("gradcomp", "int8", "torch"),
        "torch:fp16": ("torch", "fp16", "torch"),
        "local:20:int8": ("gradcomp", "20:int8", "local steps"),
    }


def row(hook, **values):
    names = {"hosts": 2, "mbit_per_s": 200, "model": "mlp", "hooks": "gradcomp", "wrapper": "torch"}
    return {**names, "hook": hook, **values}


# tests/docs/test_recorded_times.py compares the tables of recorded rows with pages.
def test_a_hook_that_failed_has_its_failure_in_the_table():
    failed = row("int4", job="steps", failed="hangs: no answer for 60 s", run=1)
    assert report.tables([failed]).splitlines()[-1] == "| int4 |  | hangs |"
    assert report.label(failed) == "2 hosts, 200 Mbit/s, mlp, int4, run 2, steps"


def test_tables_have_a_column_for_each_delay_and_medians_over_runs(tmp_path):
    def timed(hook, delay_ms, *times, **values):
        link = {"mbit_per_s": 1000, "delay_ms": delay_ms, "sent_bytes_per_step": 1000.0}
        return [row(hook, job="steps", run=run, step_ms=ms, **link, **values) for run, ms in enumerate(times)]

    rows = [
        *timed("none", 25, 290.0, 288.0, 300.0),
        *timed("int4", 25, 93.2, 88.0, 90.1, dropped_packets=0),
        *timed("none", 0, 70.0, 70.0, 70.0),
        *timed("int4", 0, 35.0, 28.0, 140.0),
    ]
    lines = report.tables(rows).splitlines()
    assert "| | bytes sent | 1,000 Mbit/s, 0 ms | 1,000 Mbit/s, 25 ms |" in lines
    assert "| none | 1,000 | 1.0×, 70.0 | 1.0×, 290 |" in lines
    assert "| int4 | 1,000 | 2.0×, 35.0 | 3.2×, 90.1 |" in lines
    differ = "The slowest run took 5 % longer than the fastest (median; at most 400 %)"
    assert report.differences(rows) == differ
    assert report.differences(rows[:1]) == ""
    assert report.label(rows[0]) == "2 hosts, 1,000 Mbit/s, 25 ms, mlp, none, steps"
    assert report.label(rows[1]) == "2 hosts, 1,000 Mbit/s, 25 ms, mlp, none, run 2, steps"
    report.draw(rows, tmp_path / "network.png")
    assert (tmp_path / "network.png").stat().st_size > 5_000
    (lossy,) = timed("fp16", 25, 400.0, dropped_packets=1234, p20_ms=390.0, p80_ms=410.0)
    assert report.summary(lossy) == "400.0 ms/step (390.0-410.0); 1,234 PACKETS DROPPED"
    said = report.tables([*rows, lossy]).splitlines()[-1]
    assert said == "PACKETS WERE DROPPED, so times may be too long: fp16 at 1,000 Mbit/s, 25 ms"


def test_the_line_of_a_link_has_the_smallest_exchange():
    seconds = [(1_000, 0.0004), (4_000_000, 0.165)]
    link = {"job": "link", "hosts": 2, "exchange_seconds": 0.0102, "all_reduce_seconds": seconds}
    line = "exchange of 8 B 10.20 ms, all-reduce of 4,000,000 B 165.0 ms, of 1,000 B 0.40 ms"
    assert report.summary(link) == line


def test_a_picture_needs_two_delays(tmp_path):
    times = {"job": "steps", "step_ms": 30.0}
    rows = [row("int4", **times, delay_ms=0.0), row("int4:flat", **times, delay_ms=25.0)]
    for few in (rows[:1], [rows[0], rows[1] | {"hosts": 4}], [rows[0], row("none", **times)]):
        with pytest.raises(ValueError, match="it needs links with two delays between two hosts"):
            report.draw(few, tmp_path / "network.png")
    report.draw(rows, tmp_path / "network.png")
    assert (tmp_path / "network.png").stat().st_size > 5_000
