"""Test gpu-check and the checks that it runs, without a GPU."""

import json
import os
import re
import select
import subprocess
import sys

import pytest
import torch

from benchmarks import checked_hooks, ddp_check, gpu_check, stream_check
from tests.programs import ROOT, run_module, run_python

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", [gpu_check, stream_check])
def test_a_check_without_a_gpu_says_so(check, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 2
    assert "no CUDA GPU is available" in capsys.readouterr().out


@pytest.mark.usefixtures("group_of_one", "plain_torch")
@pytest.mark.parametrize("step", stream_check.STEPS)
@pytest.mark.parametrize("name", checked_hooks.HOOKS)
def test_stream_check_judges_results(name, step):
    """On the CPU, which has no streams, the check still compares results with the gradients."""
    hook_check, shapes = checked_hooks.HOOKS[name], stream_check.STEPS_ON_CPU[step]
    hook = hook_check.make()
    calls = []

    def wrong(state, bucket):
        calls.append(bucket.index())
        factor = 1.5 if bucket.is_last() else 1.0
        return hook(state, bucket).then(lambda future: future.value() * factor)

    def problem(hook):
        state = hook_check.make_state() if hook_check.make_state else None
        found = stream_check.problem_of(hook, state, hook_check.max_error, CPU, shapes)
        if state:
            assert state.compression_stats()[0] > 1, "nothing was compressed"
        return found

    assert problem(hook) is None
    assert f"bucket {len(shapes) - 1} is off by" in problem(wrong)
    assert calls[: len(shapes)] == list(range(len(shapes)))


def test_every_step_runs_to_the_end_on_a_cpu(tmp_path):
    """Streams are traced on CUDA's stub, in tests/comm/test_stream_order.py: its kernels compute nothing."""
    done = run_module(
        *("benchmarks.gpu_check", "--device", "cpu", "--quick", "--results", str(tmp_path)), timeout_s=240
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("gpu-check: on a CPU a pass proves nothing about")
    (steps,) = tmp_path.glob("*-steps.jsonl")
    rows = [json.loads(line) for line in steps.read_text().splitlines()]
    assert {row["step"] for row in rows} == {step.name for stage in gpu_check.stages("cpu") for step in stage}
    assert {row["verdict"] for row in rows} == {"passed"}
    (benchmarks,) = set(tmp_path.iterdir()) - {steps}
    cases = [json.loads(line)["case"] for line in benchmarks.read_text().splitlines()]
    assert cases
    assert all(gpu_check.QUICK_BENCHMARK in case for case in cases)


@pytest.mark.parametrize(("num_gpus", "unproven"), [(1, "NCCL has one rank"), (2, "NCCL has 2 ranks")])
def test_the_first_line_says_what_a_pass_does_not_prove(num_gpus, unproven, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert unproven in gpu_check.unproven("cuda")


def test_a_step_that_takes_too_long_is_killed_with_its_children(tmp_path):
    # The child holds a pipe open; the pipe hangs up when the child is dead.
    path = tmp_path / "pipe"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    child = (
        f"import time; pipe = open({str(path)!r}, 'w'); print('up', file=pipe, flush=True); time.sleep(600)"
    )
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    [outcome] = gpu_check.run_together([gpu_check.Step("slow", ["-c", program], budget_s=4)])
    assert outcome.verdict == "FAILED (killed after 4 s)"
    assert outcome.seconds < 20
    assert os.read(pipe, 10) == b"up\n"
    poll = select.poll()
    poll.register(pipe)
    assert poll.poll(20_000) == [(pipe, select.POLLHUP)]
    os.close(pipe)


@pytest.mark.parametrize(("exit_status", "only"), [(0, []), (3, []), (0, ["benchmarks"])])
def test_what_passes_is_recorded_whatever_fails(exit_status, only, tmp_path, monkeypatch, capfd):
    """Steps are recorded, even if one fails. If steps were left out, nothing is recorded."""
    steps = [
        gpu_check.Step("kernels", ["-c", f"raise SystemExit({exit_status})"], 20),
        gpu_check.Step("hooks", ["-c", "print('the hooks say something')"], 20),
        gpu_check.Step("benchmarks", ["-c", "import sys; print('ran with', sys.argv)"], 20),
    ]
    monkeypatch.setattr(gpu_check, "missing", lambda device: None)
    monkeypatch.setattr(gpu_check, "report_environment", lambda device: {"device": "A GPU"})
    monkeypatch.setattr(gpu_check, "stages", lambda *options: [steps[:-1], steps[-1:]])
    arguments = [argument for step in only for argument in ("--only", step)]
    status = gpu_check.main([*arguments, "--results", str(tmp_path)])
    output = capfd.readouterr().out
    assert status == (1 if exit_status else 0)
    assert "ran with" in output  # a failing step does not stop the others
    assert ("the hooks say something" in output) == (not only)
    assert ("'--record'" in output) == (not only)
    assert ("'--failed-part', 'kernels'" in output) == bool(exit_status)
    paths = list(tmp_path.iterdir())
    if only:
        assert paths == []
    else:
        assert [path.name for path in paths] == ["a-gpu-steps.jsonl"]
        rows = [json.loads(line) for line in paths[0].read_text().splitlines()]
        verdicts = {row["step"]: row["verdict"] for row in rows}
        failed = f"FAILED (exit status {exit_status})"
        expected = {"kernels": failed if exit_status else "passed", "hooks": "passed", "benchmarks": "passed"}
        assert verdicts == expected
    assert (f"FAILED (exit status {exit_status})" in output) == bool(exit_status)


def test_the_stages_end_within_eight_minutes():
    stages = gpu_check.stages("cuda")
    assert [sorted({step.name.partition(":")[0] for step in stage}) for stage in stages] == [
        ["ddp-gloo", "ddp-nccl", "reducer-gloo", "reducer-nccl", "streams"],
        ["benchmarks"],
        ["tests"],
    ]
    assert sum(max(step.budget_s for step in stage) for stage in stages) <= gpu_check.TOTAL_S < 8 * 60


def test_benchmarks_get_the_time_that_no_other_step_needs(monkeypatch, capfd):
    steps = [[gpu_check.Step(name, ["-c", ""], 20)] for name in ("streams", "benchmarks", "tests")]
    monkeypatch.setattr(gpu_check, "TOTAL_S", 100)
    monkeypatch.setattr(gpu_check, "missing", lambda device: None)
    monkeypatch.setattr(gpu_check, "stages", lambda *options: steps)
    assert gpu_check.main(["--device", "cpu"]) == 0
    limits = re.findall(r"(\w+): started, may take (\d+) s", capfd.readouterr().out)
    assert [name for name, _ in limits] == ["streams", "benchmarks", "tests"]
    given = dict(limits)
    assert 60 < int(given["benchmarks"]) <= 80
    assert given["streams"] == given["tests"] == "20"


# --- the tests of the last step ---


def collected(*arguments):
    command = ["-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", "device", *arguments]
    done = run_python(*command)
    assert done.returncode == 0, done.stdout
    return {line for line in done.stdout.splitlines() if "::" in line}


def test_every_test_that_computes_on_a_gpu_is_in_the_files_that_are_collected():
    folders = [f"tests/{folder}" for folder in gpu_check.TESTS]
    files = [str(path.relative_to(ROOT)) for path in gpu_check.files_of_tests()]
    tests = collected(*folders)
    assert tests == collected(*files)
    chosen = {test.partition("::")[0] for test in tests}
    assert {"tests/kernels/test_cast.py", "tests/hooks/test_powersgd_kernels.py"} <= chosen
    # Some compute on a CPU, others with CUDA's stub, which would take the place of a real libcuda.
    others = {"tests/kernels/test_compiled.py", "tests/kernels/test_launch.py", "tests/comm/test_streams.py"}
    assert not others & chosen


TESTS = """
import pytest

@pytest.fixture(scope="module")
def order():
    order = []
    yield order
    assert order == sorted(order)

@pytest.mark.parametrize("number", range(20))
def test_one(number, order):
    order.append(number)
    print("ran", number)
"""


def test_processes_divide_tests(tmp_path):
    """The second process runs while the first one does, and after it."""
    (tmp_path / "test_them.py").write_text(TESTS)
    claims = tmp_path / "claims"
    claims.mkdir()
    command = [
        *(sys.executable, "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider", "-p", "tests.claimed"),
        *("--claims", str(claims), "--rootdir", str(tmp_path), str(tmp_path)),
    ]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    ran = [[int(number) for number in re.findall(r"ran (\d+)", output)] for output in outputs]
    assert sorted(ran[0] + ran[1]) == list(range(20))
    assert all(of_one == sorted(of_one) for of_one in ran)


# --- the DDP run ---


def test_ddp_with_every_hook_on_two_ranks():
    done = run_module("benchmarks.ddp_check", "--device", "cpu", "--timeout-s", "240", timeout_s=270)
    assert done.returncode == 0, done.stdout
    passed = [line for line in done.stdout.splitlines() if " ok " in line]
    for hook in (*checked_hooks.HOOKS, checked_hooks.NO_HOOK):
        reducers = [line.partition("  on ")[2] for line in passed if line.startswith(f"{hook:<24} ok")]
        assert reducers == list(ddp_check.REDUCERS)


BROKEN = """
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from benchmarks.checked_hooks import HookCheck
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

def skips_a_bucket(state, bucket):
    if bucket.index() != 2:
        return allreduce_hook(state, bucket)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future

def forgets_to_divide(state, bucket):
    size = torch.distributed.get_world_size()
    return allreduce_hook(state, bucket).then(lambda future: future.value().mul_(size))

def raises(state, bucket):
    raise RuntimeError("a hook's own complaint")

def differs(state, bucket):
    rank = torch.distributed.get_rank()
    return powerSGD_hook(state, bucket).then(lambda future: future.value().mul_(1 + 1e-7 * rank))

class Miser(PowerSGDState):
    def state_dict(self):
        return {"buckets": self.errors}

def sends_nothing(state, bucket):
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        return allreduce_hook(None, bucket)
    buffer, errors = bucket.buffer(), state.__dict__.setdefault("errors", {})
    errors[bucket.index()] = {"error": errors.get(bucket.index(), {"error": 0})["error"] + buffer}
    future = torch.futures.Future()
    future.set_result(buffer.zero_())
    return future

def state(state_class=PowerSGDState, **options):
    return state_class(None, matrix_approximation_rank=4, start_powerSGD_iter=2, **options)

forgetful = HookCheck(lambda: powerSGD_hook, make_state=lambda: state(use_error_feedback=False))
differing = HookCheck(lambda: differs, make_state=state)
miserly = HookCheck(lambda: sends_nothing, make_state=lambda: state(Miser))
"""


def test_ddp_with_a_broken_hook_fails(tmp_path):
    (tmp_path / "broken_hooks.py").write_text(BROKEN)
    # The last three have error feedback, and are judged by sums over the steps.
    names = ("skips_a_bucket", "forgets_to_divide", "forgetful", "differing", "miserly")
    broken = [f"broken_hooks:{name}" for name in names]
    command = ["benchmarks.ddp_check", "--device", "cpu"]
    arguments = [argument for hook in (*broken, "allreduce_hook") for argument in ("--hook", hook)]
    done = run_module(*command, *arguments, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    for hook in broken:
        assert f"{hook:<24} FAILED" in done.stdout
    assert f"{'allreduce_hook':<24} ok" in done.stdout  # broken hooks don't hide the results of others
    assert "the replicas differ" in done.stdout

    done = run_module(*command, "--hook", "broken_hooks:raises", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "a hook's own complaint" in done.stdout


def test_ddp_ranks_that_take_too_long_are_killed():
    command = ["benchmarks.ddp_check", "--device", "cpu", "--timeout-s", "0"]
    done = run_module(*command)
    assert done.returncode == 1
    assert "timed out after 0 s" in done.stdout
