"""Test gpu-check and the checks that it runs, without a GPU."""

import json
import os
import select
from types import SimpleNamespace

import pytest
import torch

from benchmarks import checked_hooks, ddp_check, gpu_check, stream_check
from tests.programs import ROOT, run_module

CPU = torch.device("cpu")


@pytest.mark.parametrize("main", [lambda: gpu_check.main([]), stream_check.main], ids=["gpu", "stream"])
def test_a_check_without_a_gpu_says_so(main, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main() == 2
    assert "no CUDA GPU is available" in capsys.readouterr().out


@pytest.mark.parametrize("name", checked_hooks.HOOKS)
def test_stream_check_judges_results(name, monkeypatch, group_of_one):
    """On the CPU, which has no streams, the check still compares results with the gradient."""
    monkeypatch.setattr(stream_check, "SHAPES", [(64, 48), (9,), (64, 48)])
    for function in ("synchronize", "_sleep", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, function, lambda *arguments: None)
    event = SimpleNamespace(record=lambda: None, query=lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    hook_check = checked_hooks.HOOKS[name]
    state = hook_check.make_state() if hook_check.make_state else None
    hook = hook_check.make()

    def wrong(state, bucket):
        return hook(state, bucket).then(lambda future: future.value() * 1.1)

    assert stream_check.problem_of(hook, state, hook_check.max_error, CPU) is None
    assert "off by" in stream_check.problem_of(wrong, state, hook_check.max_error, CPU)
    if state:
        assert state.compression_stats()[0] > 1, "nothing was compressed"


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
    monkeypatch.setattr(gpu_check, "stages", lambda device: [steps[:-1], steps[-1:]])
    arguments = [argument for step in only for argument in ("--only", step)]
    status = gpu_check.main([*arguments, "--results", str(tmp_path)])
    output = capfd.readouterr().out
    assert status == (1 if exit_status else 0)
    assert "ran with" in output  # a failing step does not stop the others
    assert ("the hooks say something" in output) == (not only)
    assert ("'--record'" in output) == (not only)
    assert ("'--failed-step', 'kernels'" in output) == bool(exit_status)
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


def test_the_stages_end_within_nine_minutes():
    stages = gpu_check.stages("cuda")
    names = {step.name.partition(":")[0] for stage in stages for step in stage}
    checks = set(gpu_check.TESTS)
    checks |= {f"{check}-{backend}" for check in ("ddp", "reducer") for backend in ("gloo", "nccl")}
    assert names == checks | {"streams", "benchmarks"}
    assert sum(max(step.budget_s for step in stage) for stage in stages) <= gpu_check.TOTAL_S < 9 * 60


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_test_file_of_its_folders_runs_once(device):
    """test_compiled.py is left out: it compiles ahead of time, which takes minutes and needs no GPU."""
    steps = [step for stage in gpu_check.stages(device) for step in stage]
    files = [argument for step in steps for argument in step.command if argument.startswith("tests/")]
    there = [path for folder in gpu_check.TESTS for path in (ROOT / "tests" / folder).rglob("test_*.py")]
    expected = {str(path.relative_to(ROOT)) for path in there} - {"tests/kernels/test_compiled.py"}
    assert "tests/testing/ranks/test_simulation.py" in expected
    assert sorted(files) == sorted(expected)
    assert len({step.name for step in steps}) == len(steps)


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
