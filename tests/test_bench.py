"""Test `torchrun … -m gradcomp bench`: its table, advice and refusals."""

import os
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradcomp import bench
from gradcomp.__main__ import main
from tests.programs import TORCHRUN, refusal, run_python

QUICK = ["--model", "tests.test_bench:tiny", "--bucket-cap-mb", "0.02", "--hook", "int4"]


def run_bench(*arguments, num_ranks=2):
    return run_python(*TORCHRUN[:-1], str(num_ranks), "-m", "gradcomp", "bench", "--cpu", *arguments)


# --- models, which the tests name on bench's command line ---


def tiny():
    """Return a model of two buckets at 0.02 MB, and its loss."""
    module, x = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 50)), torch.ones(2, 40)
    return module, lambda model: model(x).square().mean()


def fails_on_rank_1():
    if os.environ["RANK"] == "1":
        raise FileNotFoundError("no data here")
    return tiny()


def test_the_large_gpt_has_the_size_that_is_said():
    with torch.device("meta"):
        module, loss = bench.MODELS["gpt-medium"]()
    assert round(sum(each.numel() for each in module.parameters()) / 1e6) == 303
    assert loss(module).shape == ()


# --- what it prints ---


def test_noop_and_every_form_are_printed_and_advice_comes_last():
    done = run_bench("--ranks-per-node", "2", "--rounds", "1", *QUICK, num_ranks=4)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[0] == "tests.test_bench:tiny: 27,350 parameters, 4 ranks, gloo"
    assert lines[1].startswith("headroom: without communication (noop) a step is ")
    assert done.stdout.count("headroom: ") == 1  # on rank 0 alone
    names = ["noop", "none hierarchical", "none", "int4 hierarchical", "int4"]
    assert [line.split("  ")[0] for line in lines[2:8]] == ["hook", *names]
    assert lines[-1].startswith(("Use ", "Don't compress: ", "Steps vary too much to tell: "))


@pytest.mark.parametrize(
    ("choice", "is_sure", "advice"),
    [
        ("none", True, "Don't compress: no hook surely gains more than 5% of a step, within the wait."),
        ("none", False, "Steps vary too much to tell: no hook surely gains more than 5% of a step, within "),
        ("int4", True, "Use int4: a step takes 33.5 ms instead of 90 ms."),
    ],
)
def test_the_advice_is_the_states_choice(choice, is_sure, advice):
    unknown = dict.fromkeys(("gain_ms", "gain_low_ms", "gain_high_ms", "wait_ms", "sent_bytes", "nats"))
    none = {"candidate": "none", "ms": 90.0, "why": ""}
    int4 = {"candidate": "int4", "ms": 33.5, "gain_ms": 56.5, "gain_low_ms": 50.0, "gain_high_ms": 60.25}
    table = [
        {**unknown, **none, "wait_ms": 61.0, "sent_bytes": 4_000_000},
        {**unknown, **int4, "sent_bytes": 520_000, "nats": 0.004, "why": "reason"},
    ]
    lines = bench.report(
        SimpleNamespace(table=table, choice=choice, is_sure=is_sure, tolerance=0.05), 30.0, 91.0
    )
    assert lines[0].endswith("a step is 67% shorter")
    rows = [" ".join(line.split()) for line in lines[3:6]]
    assert rows == [
        "noop 30 ms 61 ms 0 B it averages nothing",
        "none 90 ms 61 ms 4.00 MB",
        "int4 33.5 ms 56.5 ms 50 to 60.2 520.00 kB +0.004 reason",
    ]
    assert lines[-1].startswith(advice)


@pytest.mark.usefixtures("group_of_one")
def test_noop_takes_turns_with_steps_that_communicate(monkeypatch):
    """Here a bucket's all-reduce takes 3 ms, and nothing else takes time."""
    now = SimpleNamespace(s=0.0)

    def slow_hook(_, bucket):
        now.s += 3e-3
        return bench.noop_hook(None, bucket)

    monkeypatch.setattr(bench, "allreduce_hook", slow_hook)
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: now.s))
    cpu, state = torch.device("cpu"), SimpleNamespace(steps_per_turn=6, rounds=3, choice="none")
    assert bench.measure(*tiny(), state, cpu, 0.02) == pytest.approx([0.0, 2 * 3.0])


# --- refusals ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hook", "int2"], "argument --hook: there is no hook 'int2'; known are none, allreduce"),
        (["--hook", "batched:4"], "candidates: 'batched:4' can't be a candidate"),
        (["--rounds", "0"], "'0' is not a whole number of at least 1"),
        (["--bucket-cap-mb", "-1"], "'-1' is not a number above 0"),
        (["--ranks-per-node", "3"], "2 ranks don't fill nodes of 3 (--ranks-per-node)"),
        ([], "one rank has nobody to communicate with; start it with torchrun, on one machine (torchrun"),
    ],
)
def test_bad_arguments_start_nothing(capsys, monkeypatch, arguments, message):
    monkeypatch.setenv("WORLD_SIZE", "2" if arguments else "1")
    said = refusal(capsys, main, ["bench", *arguments])
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("tests.test_bench:fails_on_rank_1", "rank 1: .*FileNotFoundError: no data here"),
        ("gtp", "model 'gtp' can't be trained: .* it is neither one of gpt, gpt-medium nor module"),
        ("torch.nn:Identity", r"non-iterable Identity object; a callable must return \(module, loss"),
    ],
)
def test_a_model_that_can_not_be_trained_ends_all_ranks(model, message):
    done = run_bench("--model", model)
    assert done.returncode, done.stdout
    assert re.search(message, done.stderr), done.stderr
