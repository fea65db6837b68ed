"""Test `python -m gradcomp bench` on two gloo ranks: whole runs, refusals, and that no process is left."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from gradcomp.__main__ import main
from gradcomp.bench.group import LinkSample
from gradcomp.bench.run import Measurements, table
from gradcomp.bench.steps import HookTime
from tests.programs import ROOT, TORCHRUN, run_module, run_python, users_environment

MODEL = "tests.bench.benchmarked"
TINY = ["--model", f"{MODEL}:tiny", "--bucket-cap-mb", "0.02"]
QUICK = [*TINY, "--seconds", "0.05", "--hook", "fp16,int4,powersgd:2:int8"]
END_S = 30


def bench(*arguments):
    """Run bench on two ranks of this machine; its standard output includes its standard error."""
    return run_module("gradcomp", "bench", "--cpu", "--ranks", "2", *arguments)


def test_what_is_measured_is_printed_and_written(tmp_path):
    file = tmp_path / "measured.json"
    command = ["-m", "gradcomp", "bench", "--cpu", "--ranks", "2", *QUICK, "--out", file]
    done = run_python(*command, GRADCOMP_ROUND_TRIP_MS="52")
    assert done.returncode == 0, done.stderr
    assert (
        "\ndelay    a message and its answer take 52.0 ms between ranks\nlink     all-reduce: " in done.stdout
    )
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert list(rows)[list(rows).index("noop") - 1] == "hook", "noop comes first"
    for name in ("noop", "none", "fp16", "int4", "powersgd:2:int8"):
        assert name in rows
    assert "Headroom, 1 − noop / none: " in done.stdout
    assert any(line.startswith(("Use ", "Don't compress: ")) for line in done.stdout.splitlines())
    assert "steps with int4" in done.stderr, "progress"

    found = json.loads(file.read_text())
    assert (found["world_size"], found["backend"], found["dtype"]) == (2, "gloo", "float32")
    assert found["round_trip_s"] == 0.052
    sizes = [sample["num_bytes"] for sample in found["link"]]
    assert {2**12, 2**20} <= set(sizes)
    assert {sample["group"] for sample in found["link"]} == {"all"}
    assert found["shapes"] == [[300, 40], [300], [50, 300], [50], [3, 50], [3]]
    hooks = {hook["name"]: hook for hook in found["hooks"]}
    assert list(hooks) == ["noop", "none", "fp16", "int4", "powersgd:2:int8"]
    for hook in hooks.values():
        assert 0 < hook["step_p20_s"] <= hook["step_p50_s"] <= hook["step_p80_s"]
        assert hook["num_steps"] >= 9
    assert hooks["none"]["collective_bytes"] == 2 * hooks["fp16"]["collective_bytes"] == 4 * 27_503


def test_within_and_between_nodes(tmp_path):
    file = tmp_path / "measured.json"
    arguments = ["bench", "--cpu", "--ranks", "4", "--ranks-per-node", "2", *QUICK, "--out", file]
    done = run_python("-m", "gradcomp", *arguments)
    assert done.returncode == 0, done.stderr
    assert "4 ranks on " in done.stdout
    assert "gloo, 2 nodes of 2 ranks" in done.stdout
    for line in ("all-reduce of all ranks", "all-reduce within a node", "all-reduce between nodes"):
        assert f"link     {line}: " in done.stdout
    found = json.loads(file.read_text())
    assert found["ranks_per_node"] == 2
    assert found["round_trip_s"] == 0
    assert {sample["group"] for sample in found["link"]} == {"all", "within", "between"}
    forms = [
        f"{name}{form}"
        for name in ("none", "fp16", "int4", "powersgd:2:int8")
        for form in (" hierarchical", "")
    ]
    assert [hook["name"] for hook in found["hooks"]] == ["noop", *forms]


def test_the_table_by_hand():
    def lines(round_trip_s, ranks_per_node=1):
        """Return the lines of the table of measurements that were made up."""
        link = [LinkSample(4096, 1e-4), LinkSample(2**26, 0.6)]
        steps = [("noop", 0.2, 0.0), ("none", 2.0, 4e6), ("int4", 0.5, 5e5)]
        hooks = [HookTime(name, 0.9 * each, each, 1.1 * each, 9, sent) for name, each, sent in steps]
        place = {"backend": "gloo", "world_size": 4, "ranks_per_node": ranks_per_node}
        model = {"model": "m", "dtype": "float32", "shapes": [[1000, 1000]], "bucket_cap_mb": 25.0}
        found = Measurements(
            "today", "a CPU", **place, num_threads=1, versions={}, **model,
            round_trip_s=round_trip_s, link=link, hooks=hooks,
        )  # fmt: skip
        return table(found, 0.02).splitlines()

    between_ranks = lines(1e-4)
    assert "measured today: 4 ranks on a CPU, gloo, 1 threads each" in between_ranks
    assert "delay    a message and its answer take 100 µs between ranks" in between_ranks
    assert "link     all-reduce: 4.10 kB in 100 µs, 67.11 MB in 600 ms" in between_ranks
    assert "int4   500 ms   450 ms   550 ms      9    4.00  +0.004 at 7.1×" in between_ranks
    assert "delay    a message and its answer take 12.3 ms between nodes" in lines(0.0123, 2)
    assert "link     all-reduce of all ranks: 4.10 kB in 100 µs, 67.11 MB in 600 ms" in lines(0.0123, 2)
    assert not [line for line in lines(0.0) if line.startswith("delay")]


def test_ranks_that_do_not_fill_nodes_are_refused():
    done = run_module("gradcomp", "bench", "--cpu", "--ranks", "3", "--ranks-per-node", "2", *QUICK)
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("ranks_per_node is 2, but 3 ranks don't fill such nodes") == 1, "rank 0 alone"


def test_under_torchrun():
    done = run_python(
        *TORCHRUN, "-m", "gradcomp", "bench", "--cpu", *TINY, "--seconds", "0.05", "--hook", "bf16"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Headroom") == 1, "rank 0 alone prints"
    assert "2 ranks on " in done.stdout


def test_a_lone_process_says_how_to_start_it(capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as end:
        main(["bench"])
    assert end.value.code == 2
    assert "torchrun --nnodes 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hook", "int2"], "argument --hook: there is no hook 'int2'; known are none, allreduce"),
        (["--seconds", "0"], "'0' is not a number above 0"),
        (["--ranks", "0"], "'0' is not a whole number of at least 1"),
        (["--bucket-cap-mb", "-1"], "'-1' is not a number above 0"),
        (["--max-loss", "x"], "'x' is not a number of at least 0"),
        (["--out", "/absent/measured.json"], "/absent/measured.json can't be written"),
    ],
)
def test_bad_arguments_start_nothing(capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        main(["bench", "--ranks", "2", *arguments])
    assert end.value.code == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_several_ranks_one_speaks(capsys, monkeypatch, rank):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as end:
        main(["bench", "--hook", "int2"])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("there is no hook") == (rank == "0")


def test_a_model_that_one_rank_can_not_make_ends_all():
    model = f"{MODEL}:fails_on_rank_1"
    done = bench("--model", model)
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("error: ") == 1, "rank 0 alone prints"
    assert f"rank 1: model '{model}': calling it without" in done.stdout
    assert "FileNotFoundError: no data here" in done.stdout


def test_one_rank_is_refused():
    done = run_module("gradcomp", "bench", "--cpu", "--ranks", "1", *QUICK)
    assert done.returncode == 2, done.stdout
    assert "one rank has nobody to communicate with" in done.stdout


def test_a_rank_that_dies_ends_the_others():
    done = bench("--model", f"{MODEL}:dies_on_rank_1", "--seconds", "0.1")
    assert done.returncode not in (0, 2), done.stdout


# --- no process is left ---


@contextmanager
def running() -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """Run a long benchmark until it has joined its ranks; yield its process and its ranks' pidfds."""
    command = [sys.executable, "-m", "gradcomp", "bench", "--cpu", "--ranks", "2", *TINY, "--seconds", "600"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=users_environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # A shell starts background processes with SIGINT ignored; restore it, so that Ctrl-C ends this one.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    ranks: list[int] = []
    try:
        assert process.stderr is not None
        while "links" not in (line := process.stderr.readline()):
            assert line, "it ended before it began"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks += [os.pidfd_open(int(child)) for child in children]
        yield process, ranks
    finally:
        process.kill()
        process.communicate()
        for each in ranks:
            os.close(each)


def have_ended(ranks: list[int]) -> bool:
    """Wait until these processes (pidfds) have ended; return whether all have, in time."""
    return all(select.select([each], [], [], END_S)[0] for each in ranks)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_it_ends_its_ranks(number):
    with running() as (process, ranks):
        assert len(ranks) >= 2  # and multiprocessing's own process
        process.send_signal(number)
        _, err = process.communicate(timeout=END_S)
        assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130)
        assert "Traceback" not in err
        assert have_ended(ranks)


def test_an_interrupt_under_torchrun_is_one_line():
    """The rest of the output is torchrun's own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "gradcomp", "bench", "--cpu", *TINY, "--seconds", "600"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=users_environment(), stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        assert process.stderr is not None
        while "links" not in (line := process.stderr.readline()):
            assert line, "it ended before it began"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, err = process.communicate(timeout=END_S)
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    assert err.splitlines().count("interrupted") == 1
    assert "gradcomp/" not in err
