"""Test gpu-check without a GPU."""

import os
import select
from dataclasses import dataclass

import torch

from benchmarks import __main__ as bench
from benchmarks import gpu_check
from benchmarks.records import read
from tests.programs import ROOT, run_python


@dataclass(frozen=True)
class Programs(gpu_check.Part):
    """A part that runs programs."""

    programs: tuple[str, ...] = ()

    def commands(self, args, scratch, failed):
        program = "import sys; failed, outcomes, claims = sys.argv[1].split(), sys.argv[2], sys.argv[3]\n{}"
        arguments = [" ".join(failed), str(scratch / "outcomes"), str(scratch)]
        return [["-c", program.format(each), *arguments] for each in self.programs]


def run_parts(folder, monkeypatch, parts, *arguments):
    """Run these parts on the CPU; return gpu-check's exit status, and the parts' rows."""
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    status = gpu_check.main(["--device", "cpu", "--results", str(folder), *arguments])
    [path] = folder.glob("*-parts.jsonl")
    return status, read(path)


# --- the parts ---


def test_without_a_gpu_nothing_is_run(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "no CUDA GPU is available" in capsys.readouterr().out


def test_the_parts_end_within_eight_minutes():
    parts = {part.name: part.limit_s for part in gpu_check.PARTS}
    assert list(parts) == ["new", "kernels", "arrival", "hooks", "reducer", "compile", "benchmarks"]
    assert sum(parts.values()) <= 470


def test_processes_share_the_kernels_to_compile(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    [part] = [part for part in gpu_check.PARTS if part.name == "compile"]
    status, [row] = run_parts(tmp_path, monkeypatch, [part])
    assert status == 0
    cases = bench.to_compile(bench.discover(torch.device("cpu"), quick=True))
    assert row["counts"] == {"passed": len(cases)}
    assert not list(tmp_path.glob("cpu*-threads.jsonl"))  # nothing was timed


def test_every_test_on_the_device_is_in_a_part():
    tests = [test for part in gpu_check.PARTS for test in part.tests]
    assert len(set(tests)) == len(tests)
    assert all((ROOT / test).exists() for test in tests)
    # Those of benchmarks are of tables of sizes.
    others = [f"--ignore={each}" for each in ("tests/benchmarks", "tests/kernels", *tests)]
    command = ["-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", "device"]
    done = run_python(*command, *others, "tests")
    assert "::" not in done.stdout
    assert "no tests collected" in done.stdout
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "kernels").rglob("test_*.py")}
    assert files == {test for test in tests if test.startswith("tests/kernels/")}


def test_whatever_fails_the_next_part_runs_and_rows_tell(tmp_path, monkeypatch, capsys):
    note = "import json; open(outcomes, 'a').write(json.dumps({}) + '\\n'); print('said it\\n', end='')\n"
    broken = note.format({"name": "a", "outcome": "failed", "error": "it broke"}) + "sys.exit(3)"
    crashed = note.format({"name": "b", "outcome": "left"})
    parts = [
        Programs("kernels", 20, programs=(broken, crashed)),
        Programs("hooks", 1, programs=("import signal; signal.pause()",)),
        Programs("arrival", 20, programs=("sys.exit('left out')",)),
        Programs("benchmarks", 20, programs=("assert failed == ['kernels', 'hooks'], failed",)),
    ]
    status, rows = run_parts(tmp_path, monkeypatch, parts, "--skip", "arrival")
    assert status == 1
    assert [(row["part"], row["verdict"]) for row in rows] == [
        ("kernels", "FAILED (exit status 3)"),
        ("hooks", "killed after 1 s"),
        ("benchmarks", "passed"),
    ]
    assert rows[0]["failed"] == {"a": "it broke"}
    assert rows[0]["left"] == ["b"]
    assert {"device", "torch", "triton", "commit", "seconds"} < rows[0].keys()
    assert (tmp_path / "kernels.log").read_text() == "said it\nsaid it\n"
    assert "a: it broke" in capsys.readouterr().out
    status, rows = run_parts(tmp_path, monkeypatch, parts[3:], "--only", "benchmarks")
    assert status == 1  # neither part failed before in this run
    assert [row["part"] for row in rows] == ["kernels", "hooks", "benchmarks", "benchmarks"]


def test_no_process_of_a_part_outlives_it(tmp_path):
    # The child holds a pipe open; the pipe hangs up when the child is dead.
    path = tmp_path / "pipe"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    child = f"import signal; pipe = open({str(path)!r}, 'w'); print('up', flush=True); signal.pause()"
    start = f"subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)"
    program = f"import subprocess, sys; {start}.stdout.readline()"
    assert gpu_check.run([["-c", program]], 60, tmp_path / "log") == [0]
    poll = select.poll()
    poll.register(pipe)
    assert poll.poll(20_000) == [(pipe, select.POLLHUP)]
    os.close(pipe)


def test_a_part_of_tests_runs_on_a_cpu(tmp_path, monkeypatch):
    parts = [part for part in gpu_check.PARTS if part.name == "kernels"]
    status, [row] = run_parts(tmp_path, monkeypatch, parts, "--tests", "-k 'test_cast and 4097'")
    assert status == 0
    assert row["counts"].keys() == {"passed"}
    lines = list(filter(None, (tmp_path / "kernels.log").read_text().splitlines()))
    assert len(lines) == row["counts"]["passed"]
    assert all("  tests/kernels/test_cast.py::" in line for line in lines)


# --- the tests of a part, divided among processes ---

TESTS = """
import os, signal
import pytest, torch

FOLDER = os.path.dirname(__file__)

@pytest.fixture(scope="module")
def order():
    order = []
    yield order
    assert order == sorted(order)

@pytest.mark.parametrize("number", range(40))
def test_one(number, order, monkeypatch):
    order.append(number)
    assert not os.path.exists(f"{FOLDER}/ran-{number}")
    open(f"{FOLDER}/ran-{number}", "x").close()
    if number == 6:
        lose_cuda()
    if number == 14:
        pytest.skip("not here")
    if number == 36:
        os.kill(os.getpid(), signal.SIGKILL)
    assert number != 10, "ten"

def lose_cuda():
    def synchronize():
        raise RuntimeError("an illegal memory access")

    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, synchronize
    raise RuntimeError("this process never recovers")
"""


def test_processes_divide_tests_and_leave_a_list(tmp_path, monkeypatch):
    """Test 6 loses CUDA, and its process starts again. Test 36 kills its process."""
    (tmp_path / "test_them.py").write_text(TESTS)
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.claimed", "--every", "2"]
    folder = ["--rootdir", str(tmp_path), str(tmp_path)]
    program = (
        f"import os; command = [sys.executable, *{command}, '--claims', claims, '--outcomes', outcomes]\n"
    )
    program += f"os.execv(sys.executable, command + {folder})"
    results = tmp_path / "results"
    status, [row] = run_parts(results, monkeypatch, [Programs("kernels", 100, programs=(program, program))])
    assert status == 1
    assert row["verdict"] == "FAILED (exit status -9)"
    assert row["failed"] == {
        "test_them.py::test_one[6]": "RuntimeError: this process never recovers",
        "test_them.py::test_one[10]": "AssertionError: ten",
    }
    # The process that was killed may have claimed the next test, too.
    assert "test_them.py::test_one[36]" in row["left"]
    assert len(row["left"]) <= 2
    left = len(row["left"])
    assert row["counts"] == {"passed": 17 - left, "failed": 2, "skipped": 1, "left": left}
    log = (results / "kernels.log").read_text()
    assert "E       AssertionError: ten" in log
    assert log.count("  test_them.py::test_one[") == 20 - left
